"""Forward and backward over one batch, in parts when it does not fit whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.feed import Feed
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.layers import forward
from triaccel_ray.plan import Fault, FaultKind

Loss = Callable[[Any, Tensor], Tensor]
"""Maps outputs (floating-point tensors in FP32) and targets to the mean loss over the batch."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that the device, or the budget, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "can't allocate memory",
        "CUDA error: out of memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, its type's name when there is none (Python's MemoryError)."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one batch gave, with its gradients in `.grad`."""

    loss_sum: Tensor
    """Sum of the samples' losses, fp64 scalar on the device."""
    num_samples: int
    faults: tuple[Fault, ...] = ()


class Step:
    """Computes the gradients of one batch; survives a batch that does not fit.

    On an out-of-memory error everything the attempt left is dropped, buffers and the augmentation's random state go
    back to where they were, and the same samples are tried again in twice as many parts: none is lost, none counts
    twice. The parts stay until `set_parts`, so that the steps until the next tick do not fail again.
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
    ) -> None:
        """Borrows the model and its surroundings; `check_memory` raises when the process is beyond its budget."""
        self._model, self._loss, self._feed, self._precision = model, loss, feed, precision
        self._check_memory, self._release_memory = check_memory, release_memory
        self._parts = 1

    @property
    def num_parts(self) -> int:
        """Parts in which batches pass now: the plan's, or more after one that did not fit."""
        return self._parts

    def set_parts(self, num_micro_batches: int) -> None:
        """Passes batches through the model in this many parts from now on."""
        self._parts = num_micro_batches

    def run(self, indices: Tensor, loss_scale: Tensor, *, step: int) -> StepOutcome:
        """Returns the loss over the samples at `indices`, their mean gradient times `loss_scale` in `.grad`.

        Raises:
            torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        """
        faults: list[Fault] = []
        before = _Snapshot(self._model, self._feed)
        while True:
            self._zero_grad()
            try:
                loss_sum = self._accumulate(indices, loss_scale)
                return StepOutcome(loss_sum=loss_sum, num_samples=len(indices), faults=tuple(faults))
            except (RuntimeError, MemoryError) as error:
                part_size = -(-len(indices) // self._parts)
                if not is_out_of_memory(error) or part_size == 1:
                    raise
                detail = first_line(error)
            # Outside the handler: the traceback no longer holds the attempt's tensors.
            self._parts = min(2 * self._parts, len(indices))
            self._zero_grad()
            before.restore(self._model, self._feed)
            self._release_memory()
            fault = Fault(
                kind=FaultKind.OUT_OF_MEMORY,
                step=step,
                phase="forward_backward",
                batch_size=len(indices),
                micro_batch_size=-(-len(indices) // self._parts),
                detail=detail,
            )
            faults = [fault]

    def _accumulate(self, indices: Tensor, loss_scale: Tensor) -> Tensor:
        loss_sum = torch.zeros((), dtype=torch.float64, device=loss_scale.device)
        for part in _parts(indices, self._parts):
            inputs, targets = self._feed.source.batch(part, self._feed.generator)
            with self._precision.in_force():
                outputs = _as_fp32(forward(self._model, inputs))
            with torch.autocast(loss_scale.device.type, enabled=False):
                loss = self._loss(outputs, targets)
            self._check_memory()
            (loss * (loss_scale * (len(part) / len(indices)))).backward()
            loss_sum += loss.detach().double() * len(part)
            self._check_memory()
        return loss_sum

    def _zero_grad(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None


class _Snapshot:
    """Buffers and augmentation state before a step, to go back to after a failed attempt."""

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        buffers = [buffer for buffer in model.buffers() if buffer is not None]
        self._buffers = [buffer.clone() for buffer in buffers]
        self._generator = feed.generator.get_state()

    def restore(self, model: nn.Module, feed: Feed) -> None:
        with torch.no_grad():
            for buffer, saved in zip(model.buffers(), self._buffers, strict=True):
                buffer.copy_(saved)
        feed.generator.set_state(self._generator)


def _parts(indices: Tensor, num_parts: int) -> Sequence[Tensor]:
    """Returns `indices` in at most `num_parts` parts of nearly equal size.

    No sample is left alone beside larger parts: batch normalisation could not take it.
    """
    parts = torch.tensor_split(indices, min(num_parts, len(indices)))
    if len(parts[-1]) == 1 < len(parts[0]):
        return torch.tensor_split(indices, len(indices) // 2)
    return parts


def _as_fp32(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.is_floating_point() else outputs
    if isinstance(outputs, dict):
        return type(outputs)((key, _as_fp32(value)) for key, value in outputs.items())
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(_as_fp32(value) for value in outputs))
    if isinstance(outputs, list | tuple):
        return type(outputs)(_as_fp32(value) for value in outputs)
    return outputs
