"""Forward and backward over one batch, in parts when it does not fit whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.feed import Feed
from triaccel_ray.apply.fuse import Fusion
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.layers import Loss, forward
from triaccel_ray.obstacles import watched
from triaccel_ray.out_of_memory import BudgetExceededError, first_line, is_out_of_memory
from triaccel_ray.plan import Fault, FaultKind
from triaccel_ray.structure import map_tensors


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one batch gave, with its gradients in `.grad`."""

    loss_sum: Tensor
    """Sum of the samples' losses, fp64 scalar on the device."""
    num_samples: int
    faults: tuple[Fault, ...] = ()
    obstacles: tuple[str, ...] = ()
    """What the pass did that a captured step could not do again; found only where `run` was asked to watch."""


class Step:
    """Computes the gradients of one batch; survives a batch that does not fit.

    On an out-of-memory error everything the attempt left is dropped, buffers and random states go back to where they
    were, and the same samples are tried again in twice as many micro-batches: none is lost, none counts twice. Their
    number stays until it is set anew, so that the steps until the next tick do not fail again. A budget that the device
    does not enforce itself, on a CPU, gives way where no smaller batch would help: a fault says so.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        feed: Feed,
        precision: LayerPrecision,
        *,
        check_memory: Callable[[], None],
        release_memory: Callable[[], None],
        is_exceeded_at_rest: Callable[[], bool] = lambda: False,
        fusion: Fusion | None = None,
    ) -> None:
        """Borrows the model and its surroundings; `check_memory` raises when the process is beyond its budget.

        `is_exceeded_at_rest` says whether it is so without a batch in flight. `fusion` computes in place of `model`
        for as long as it stands for it.
        """
        self.model, self._loss, self.feed, self.precision = model, loss, feed, precision
        self.fusion = fusion
        self._check_memory, self._release_memory = check_memory, release_memory
        self._is_exceeded_at_rest = is_exceeded_at_rest
        self._num_micro_batches = 1
        self._is_budget_waived = False

    @property
    def num_micro_batches(self) -> int:
        """Parts in which batches pass now: the plan's, or more after one that did not fit."""
        return self._num_micro_batches

    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Passes batches through the model in this many parts from now on."""
        self._num_micro_batches = num_micro_batches
        self._is_budget_waived = False

    def run(self, indices: Tensor, loss_scale: Tensor, *, step: int, watch: bool = False) -> StepOutcome:
        """Returns the loss over the samples at `indices`, their mean gradient times `loss_scale` in `.grad`.

        With `watch`, the outcome's `obstacles` are found out.

        Raises:
            torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        """
        obstacles: list[str] = []
        faults: list[Fault] = []
        before, num_parts = _Snapshot(self.model, self.feed), self._num_micro_batches
        while True:
            self.zero_grad()
            try:
                loss_sum = self.accumulate(
                    self.batches(indices), len(indices), loss_scale, obstacles if watch else None
                )
                return StepOutcome(
                    loss_sum=loss_sum, num_samples=len(indices), faults=tuple(faults), obstacles=tuple(obstacles)
                )
            except (RuntimeError, MemoryError) as error:
                is_soft = isinstance(error, BudgetExceededError)
                is_smallest = -(-len(indices) // self._num_micro_batches) == 1
                if not is_out_of_memory(error) or (is_smallest and not is_soft):
                    raise
                detail = first_line(error)
            # Outside the handler: the traceback no longer holds the attempt's tensors.
            self.zero_grad()
            before.restore(self.model, self.feed)
            self._release_memory()
            if is_soft and (is_smallest or self._is_exceeded_at_rest()):
                self._num_micro_batches, self._is_budget_waived = num_parts, True
                exceeded = FaultKind.BUDGET_EXCEEDED
                faults = [Fault(kind=exceeded, step=step, phase="forward_backward", detail=detail)]
                continue
            self._num_micro_batches = min(2 * self._num_micro_batches, len(indices))
            at_once = -(-len(indices) // self._num_micro_batches)
            faults = [
                Fault.out_of_memory(
                    detail, step=step, phase="forward_backward", batch_size=len(indices), micro_batch_size=at_once
                )
            ]

    def accumulate(
        self,
        batches: Iterable[tuple[Any, Tensor]],
        num_samples: int,
        loss_scale: Tensor,
        obstacles: list[str] | None = None,
    ) -> Tensor:
        """Adds up the gradients of `batches`, parts of one batch of `num_samples`; returns the sum of their losses.

        Device work alone, as long as the model, the loss and the source of the batches do nothing else. With a list of
        `obstacles`, what a captured step could not do again is watched for, and added there.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=loss_scale.device)
        model = self.model if self.fusion is None or not self.fusion.holds() else self.fusion.module
        device = loss_scale.device
        for inputs, targets in batches:
            watch = contextlib.nullcontext() if obstacles is None else watched(obstacles, device)
            with watch:
                with self.precision.in_force():
                    outputs = _as_fp32(forward(model, inputs))
                with torch.autocast(device.type, enabled=False):
                    loss = self._loss(outputs, targets)
                self._require_memory()
                (loss * (loss_scale * (len(targets) / num_samples))).backward()
            if self._num_micro_batches > 1 and self.precision.copies is not None:
                self.precision.copies.gather_gradients()
            loss_sum += loss.detach().double() * len(targets)
            self._require_memory()
        return loss_sum

    def _require_memory(self) -> None:
        if not self._is_budget_waived:
            self._check_memory()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.precision.copies is not None:
            self.precision.copies.zero_grad()

    def batches(self, indices: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yields the samples at `indices` in the present number of micro-batches."""
        for part in _micro_batches(indices, self._num_micro_batches):
            yield self.feed.source.batch(part, self.feed.generator)


class _Snapshot:
    """Buffers and random states before a step, to go back to after a failed attempt."""

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        buffers = [buffer for buffer in model.buffers() if buffer is not None]
        self._buffers = [buffer.clone() for buffer in buffers]
        self._generator = feed.generator.get_state()
        self._device = feed.generator.device
        self._global = torch.get_rng_state()
        self._global_cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def restore(self, model: nn.Module, feed: Feed) -> None:
        with torch.no_grad():
            for buffer, saved in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(saved)
        feed.generator.set_state(self._generator)
        torch.set_rng_state(self._global)
        if self._global_cuda is not None:
            torch.cuda.set_rng_state(self._global_cuda, self._device)


def _micro_batches(indices: Tensor, num_micro_batches: int) -> Sequence[Tensor]:
    """Returns `indices` in at most `num_micro_batches` parts of nearly equal size.

    No sample is left alone beside larger parts: batch normalisation could not take it.
    """
    parts = torch.tensor_split(indices, min(num_micro_batches, len(indices)))
    if len(parts[-1]) == 1 < len(parts[0]):
        return torch.tensor_split(indices, len(indices) // 2)
    return parts


def _as_fp32(outputs: Any) -> Any:
    return map_tensors(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor, outputs)
