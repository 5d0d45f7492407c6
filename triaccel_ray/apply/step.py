"""Forward and backward over one batch, in parts when it does not fit whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.compile import Compilation, first_paragraph, is_compile_error, is_compiled
from triaccel_ray.apply.fuse import Fusion
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.recompute import Recomputation
from triaccel_ray.apply.step_in_backward import StepInBackward
from triaccel_ray.cuda.capture_checks import watched
from triaccel_ray.cuda.out_of_memory import BudgetExceededError, first_line, is_out_of_memory
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.model.layers import Loss, forward, restoring_buffers
from triaccel_ray.model.pytree import cast_floating
from triaccel_ray.records.plan import Fault, FaultKind


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

    On an out-of-memory error buffers and random states go back to where they were, and the same samples are tried again
    in twice as many micro-batches: none is lost, none counts twice. Their number stays until it is set anew. A budget
    that the device does not enforce itself, on a CPU, gives way where no smaller batch would help: a fault says so.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        sampler: Sampler,
        precision: LayerPrecision,
        *,
        check_memory: Callable[[], None],
        release_memory: Callable[[], None],
        is_exceeded_at_rest: Callable[[], bool] = lambda: False,
        fusion: Fusion | None = None,
        compilation: Compilation | None = None,
        stepper: StepInBackward | None = None,
        recomputation: Recomputation | None = None,
    ) -> None:
        """Borrows the model and its surroundings; `check_memory` raises when the process is beyond its budget.

        `is_exceeded_at_rest` says whether it is so without a batch in flight. `fusion` computes in place of `model`
        for as long as it stands for it, `compilation` until compiling fails. `stepper` takes gradients as they arrive.
        `recomputation` has regions of the model computed again in the backward pass.
        """
        self.model, self._loss, self.sampler, self.precision = model, loss, sampler, precision
        self.fusion, self.compilation, self.stepper = fusion, compilation, stepper
        self.recomputation = recomputation
        self._is_users_compiled = is_compiled(model) and compilation is None
        self._check_memory, self._release_memory = check_memory, release_memory
        self._is_exceeded_at_rest = is_exceeded_at_rest
        self.num_micro_batches = 1
        """Parts in which batches pass now: the plan's, or more after one that did not fit."""
        self.min_micro_batch_size = 1
        """Samples below which no part of a short batch is divided further."""
        self._is_budget_waived = False
        self._parameters = tuple(model.parameters())
        self._with_buffers = tuple(module for module in model.modules() if module._buffers)

    @property
    def is_compiled(self) -> bool:
        """Whether passes run code from `torch.compile`, ours or the user's."""
        return self.compilation is not None or self._is_users_compiled

    def set_num_micro_batches(self, num_micro_batches: int, min_micro_batch_size: int = 1) -> None:
        """Passes batches through the model in this many parts from now on.

        A short batch, at the end of an epoch, passes in fewer where these hold at most `min_micro_batch_size` samples.
        """
        self.num_micro_batches, self.min_micro_batch_size = num_micro_batches, min_micro_batch_size
        self._is_budget_waived = False

    def run(self, indices: Tensor, loss_scale: Tensor, *, step: int, watch: bool = False) -> StepOutcome:
        """Returns the loss over the samples at `indices`, their mean gradient times `loss_scale` in `.grad`.

        With `watch`, the outcome's `obstacles` are found out.

        Raises:
            torch.OutOfMemoryError, MemoryError: not even a single sample fits.
        """
        obstacles: list[str] = []
        mended: tuple[Fault, ...] = ()
        retreat: tuple[Fault, ...] = ()  # the last attempt's alone
        restore = _snapshot(self._with_buffers, self.sampler.generator)
        as_planned, num_samples = (self.num_micro_batches, self.min_micro_batch_size), len(indices)
        while True:
            num_parts = self._num_parts(num_samples)
            self.zero_grad()
            try:
                parts = self.batches(indices)
                loss_sum = self.accumulate(parts, num_samples, loss_scale, obstacles if watch else None)
                faults = (*mended, *retreat)
                return StepOutcome(loss_sum=loss_sum, num_samples=num_samples, faults=faults, obstacles=(*obstacles,))
            except (RuntimeError, MemoryError) as error:
                is_soft = isinstance(error, BudgetExceededError)
                is_smallest = num_parts >= num_samples
                mending = self._mend(error, step)
                if not mending and (not is_out_of_memory(error) or (is_smallest and not is_soft)):
                    raise
                detail = first_line(error)
            # Outside the handler: the traceback no longer holds the attempt's tensors.
            self.zero_grad()
            restore()
            self._release_memory()
            obstacles.clear()
            mended += mending
            if mending:
                continue
            if is_soft and (is_smallest or self._is_exceeded_at_rest()):
                (self.num_micro_batches, self.min_micro_batch_size), self._is_budget_waived = as_planned, True
                exceeded = FaultKind.BUDGET_EXCEEDED
                retreat = (Fault(kind=exceeded, step=step, phase="forward_backward", detail=detail),)
                continue
            if num_parts >= min(self.num_micro_batches, num_samples):
                self.num_micro_batches = min(2 * num_parts, num_samples)
            self.min_micro_batch_size = 1
            passing = -(-num_samples // self.num_micro_batches)
            fault = Fault.out_of_memory(
                detail, step=step, phase="forward_backward", batch_size=num_samples, micro_batch_size=passing
            )
            retreat = (fault,)

    def _mend(self, error: BaseException, step: int) -> tuple[Fault, ...]:
        """Does without what made the attempt fail, if that was more than the model needs; returns what it was."""
        if self.recomputation is not None and (kept := self.recomputation.keep_failed(error, step)):
            return kept
        if self.compilation is None or not is_compile_error(error) or is_out_of_memory(error):
            return ()
        self.compilation.remove()
        self.compilation = None
        text = f"torch.compile failed, the model runs as it is: {first_paragraph(error)}"
        return (Fault(kind=FaultKind.COMPILED, step=step, phase="compile", detail=text),)

    def accumulate(
        self,
        batches: Iterable[tuple[int, Any, Any]],
        num_samples: int,
        loss_scale: Tensor,
        obstacles: list[str] | None = None,
    ) -> Tensor:
        """Adds up the gradients of `batches`, parts of one batch of `num_samples`; returns the sum of their losses.

        Each part is its number of samples, its inputs and its targets.

        Device work alone, as long as the model, the loss and the source of the batches do nothing else. With a list of
        `obstacles`, what a captured step could not do again is watched for, and added there.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=loss_scale.device)
        device = loss_scale.device
        num_passed = 0
        if self.stepper is not None:
            self.stepper.attempt()
        for count, inputs, targets in batches:
            called = self._forward_of(inputs)
            with contextlib.ExitStack() as around:
                if obstacles is not None:
                    around.enter_context(watched(obstacles, device))
                around.enter_context(self._compiling())
                if self.recomputation is not None:
                    around.enter_context(self.recomputation.in_force(called, self._again))
                with self.precision.in_force():
                    outputs = cast_floating(forward(called, inputs), torch.float32)
                with torch.autocast(device.type, enabled=False):
                    loss = self._loss(outputs, targets)
                self._require_memory()
                if self.stepper is not None:
                    is_last = num_passed + count == num_samples
                    around.enter_context(self.stepper.taking(is_first=not num_passed, is_last=is_last))
                (loss * (loss_scale * (count / num_samples))).backward()
            num_passed += count
            if self.num_micro_batches > 1 and self.stepper is None:
                for parameter in self._parameters:
                    self.precision.weights.gather_gradient(parameter)
            loss_sum += loss.detach().double() * count
            self._require_memory()
        return loss_sum

    def _compiling(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.compilation is None else self.compilation.in_force()

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Returns a context for what is computed again in the backward pass."""
        with self._compiling(), self.precision.promoting():
            yield

    def _forward_of(self, inputs: Any) -> nn.Module:
        """Returns what to call with `inputs`: the model, or what stands for it."""
        if self.fusion is not None and self.fusion.holds():
            divided = None if self.recomputation is None else self.recomputation.divided
            return self.fusion.module if divided is None else divided.module
        return self.model if self.compilation is None else self.compilation.forward_of(inputs)

    def _require_memory(self) -> None:
        if not self._is_budget_waived:
            self._check_memory()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self.precision.weights.zero_grad()

    def batches(self, indices: Tensor) -> Iterator[tuple[int, Any, Any]]:
        """Yields the samples at `indices` in the present number of micro-batches: number, inputs, targets."""
        num_samples, num_parts = len(indices), self._num_parts(len(indices))
        if num_samples // num_parts == 1 and num_samples > num_parts:
            num_parts = num_samples // 2  # no sample is left alone beside larger parts, for batch normalisation's sake
        for part in indices.tensor_split(num_parts):
            yield len(part), *self.sampler.source.batch(part, self.sampler.generator)

    def _num_parts(self, num_samples: int) -> int:
        return min(self.num_micro_batches, -(-num_samples // self.min_micro_batch_size))


def _snapshot(with_buffers: Iterable[nn.Module], generator: torch.Generator) -> Callable[[], None]:
    """Returns what puts these modules' buffers and the random states back to where they are now."""
    restore_buffers = restoring_buffers(with_buffers)
    generators = [generator, torch.default_generator]
    if generator.device.type == "cuda":
        generators.append(torch.cuda.default_generators[generator.device.index])
    states = [each.get_state() for each in generators]

    def restore() -> None:
        restore_buffers()
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)

    return restore
