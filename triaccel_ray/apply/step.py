"""Forward and backward pass over one batch, split into micro-batches if it does not fit in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.agreement import Agreement, PeerCompileError
from triaccel_ray.apply.compile import Compilation, first_paragraph, is_compile_error, is_compiled, loss_in_fp32
from triaccel_ray.apply.fuse import Fusion
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.reduce import Reduction
from triaccel_ray.apply.region_recorder import RegionRecorder
from triaccel_ray.apply.step_in_backward import BucketedGradients, StepInBackward
from triaccel_ray.cuda.capture_checks import Obstacle, watched
from triaccel_ray.cuda.out_of_memory import BudgetExceededError, MemoryBudget, first_line, is_out_of_memory
from triaccel_ray.cuda.random_states import restoring_random_states
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import (
    Loss,
    batch_norms,
    forward,
    restoring_buffers,
    trained_modules,
    uses_batch_statistics,
)
from triaccel_ray.records.plan import Fault, FaultKind, largest_micro_batch
from triaccel_ray.records.signals import RegionSignal


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The result of one batch."""

    loss_sum: Tensor
    """Sum of the samples' losses, fp64 scalar on the device."""
    faults: tuple[Fault, ...] = ()
    obstacles: tuple[Obstacle, ...] = ()
    """What a captured graph of the pass may not repeat; collected only by `run(watch=True)`."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Optional parts of a step."""

    fusion: Fusion | None = None
    """Runs in place of the model while it is valid (`Fusion.holds`)."""
    compilation: Compilation | None = None
    """Runs in place of the model and of the loss until compiling fails."""
    stepper: StepInBackward | None = None
    """Consumes gradients as they arrive."""
    activations: Activations | None = None
    """Stores what regions of the model save; None: there are no regions, and all is kept."""
    peers: Agreement = field(default_factory=Agreement)
    """The other ranks: after an error on any of them, all take the same way out."""
    reduction: Reduction | None = None
    """Sums gradients over the ranks."""


class Step:
    """Computes the gradients of one batch; retries a batch that runs out of memory.

    After an out-of-memory error, buffers and random states are restored, and the same samples are retried. First all
    regions that can be are recomputed, if the plan may choose so. Then the number of micro-batches doubles. No sample
    is lost or counted twice. Storage and number of micro-batches stay until they are set again. A memory budget on a
    CPU, which the device does not enforce, is waived with a fault if no smaller batch would help.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        sampler: Sampler,
        precision: LayerPrecision,
        memory: MemoryBudget,
        options: StepOptions | None = None,
    ) -> None:
        options = options or StepOptions()
        self.model, self._loss, self.sampler, self.precision, self._memory = model, loss, sampler, precision, memory
        self.fusion, self.compilation, self.stepper = options.fusion, options.compilation, options.stepper
        self.activations = options.activations or Activations({}, sampler.generator.device)
        self.peers, self._reduction = options.peers, options.reduction
        self.recorder: RegionRecorder | None = None
        """What has recorded the first micro-batch of the last pass; None if nothing had to be recorded."""
        self._is_compiled_by_user = is_compiled(model) and self.compilation is None
        self.num_micro_batches = 1
        """Micro-batches per batch now: the plan's number, or more after a batch that did not fit."""
        self.min_micro_batch_size = 1
        """A short batch is not split further once its micro-batches hold at most this many samples."""
        self._is_budget_waived = False
        self._parameters = tuple(model.parameters())
        self.trained = trained_modules(model, loss)
        self._batch_norms = batch_norms(self.trained)
        self._modules_with_buffers = tuple(module for module in self.trained.modules() if module._buffers)

    @property
    def is_compiled(self) -> bool:
        """Whether passes run code from `torch.compile`, ours or the user's."""
        return self.compilation is not None or self._is_compiled_by_user

    def pass_kind(self, num_own: int, num_samples: int) -> Hashable:
        """Returns a key for a pass over `num_own` of `num_samples` samples: passes of one key make the same calls."""
        stored = tuple(self.activations.storage.items())
        return num_own, num_samples, self.num_parts(num_samples), self.precision.key, stored

    def region_costs(self, batch_size: int) -> tuple[int, tuple[RegionSignal, ...]]:
        """Returns the size of a batch's micro-batches, and the regions' costs in a pass of one; empty if not known.

        The size counts the samples of all ranks, the costs are those of this rank's share.
        """
        share = self.peers.ranks.largest_share(batch_size)
        size, own_size = (largest_micro_batch(number, self.num_micro_batches) for number in (batch_size, share))
        is_divided = self.fusion is not None and self.fusion.holds()
        return size, self.activations.signals(own_size, self.precision.key, is_divided=is_divided)

    def set_num_micro_batches(self, num_micro_batches: int, min_micro_batch_size: int = 1) -> None:
        """Sets the number of micro-batches that each batch is split into from now on.

        A short batch at the end of an epoch is split into fewer if these hold at most `min_micro_batch_size` samples.
        """
        self.num_micro_batches, self.min_micro_batch_size = num_micro_batches, min_micro_batch_size
        self._is_budget_waived = False

    def run(
        self, indices: Tensor, loss_scale: Tensor, *, step: int, watch: bool = False, num_samples: int | None = None,
        gradients: Gradients | BucketedGradients | None = None,
    ) -> StepOutcome:  # fmt: skip
        """Returns the loss of the samples at `indices`; leaves their mean gradient times `loss_scale` in `.grad`.

        With `watch`, the outcome's `obstacles` are collected. If the samples are this rank's share of `num_samples`,
        loss and gradient are its addends to those of all ranks. `gradients` collect theirs, and are packed to be sent;
        then `.grad` may be empty.

        Raises:
            torch.OutOfMemoryError, MemoryError: not even a single sample fits, or two with batch normalization; or
                there is no memory to pack their gradients.
        """
        num_samples = len(indices) if num_samples is None else num_samples
        most_parts = max(self.peers.ranks.largest_share(num_samples) // self._least_samples, 1)
        planned = self.num_micro_batches, self.min_micro_batch_size, self.activations.storage
        obstacles: list[Obstacle] = []
        feature_faults: tuple[Fault, ...] = ()
        memory_faults: tuple[Fault, ...] = ()  # of the last attempt only
        restores = restoring_buffers(self._modules_with_buffers), restoring_random_states(self.sampler.generator)
        while True:
            num_parts, phase = self.num_parts(num_samples), "forward_backward"
            self.zero_grad()
            try:
                kind = self.pass_kind(len(indices), num_samples)
                with self.peers.agreeing(), self.activations.rng.recording_pass(kind):
                    parts = self.batches(indices, num_samples)
                    loss_sum = self.accumulate(parts, num_samples, loss_scale, obstacles if watch else None)
                    if gradients is not None:
                        gradients.collect(self.precision.weights.companions, self.precision.weights.sums)
                if gradients is not None:
                    phase = "reduce"
                    gradients.pack(self.precision.weights.companions)
                faults = feature_faults + memory_faults + self._learn(step)
                return StepOutcome(loss_sum=loss_sum, faults=faults, obstacles=tuple(obstacles))
            except (RuntimeError, MemoryError) as error:
                is_over_budget = isinstance(error, BudgetExceededError)
                is_smallest = num_parts >= most_parts
                disabled = self._disable_failed_feature(error, step)
                is_hopeless = not is_out_of_memory(error) or (is_smallest and not is_over_budget)
                lacks_memory = not disabled and is_out_of_memory(error)
                stores_less = lacks_memory and self.activations.recompute_all()
                if not disabled and is_hopeless and not stores_less:
                    raise
                detail = first_line(error)
            # Outside the handler: the traceback no longer holds the attempt's tensors.
            self.zero_grad()
            if gradients is not None:
                gradients.drop()
            for restore in restores:
                restore()
            self._memory.release()
            obstacles.clear()
            if disabled:
                feature_faults += disabled
                continue
            if is_over_budget and ((is_smallest and not stores_less) or self._memory.is_exceeded_at_rest()):
                self.num_micro_batches, self.min_micro_batch_size = planned[:2]
                self.activations.set(planned[2])
                self._is_budget_waived = True
                kind = FaultKind.BUDGET_EXCEEDED
                memory_faults = (Fault(kind=kind, step=step, phase="forward_backward", detail=detail),)
                continue
            if not stores_less:
                if num_parts >= min(self.num_micro_batches, most_parts):
                    self.num_micro_batches = min(2 * num_parts, most_parts)
                self.min_micro_batch_size = 1
            memory_faults = (self._out_of_memory_fault(detail, num_samples, step, phase),)

    def _out_of_memory_fault(self, detail: str, num_samples: int, step: int, phase: str) -> Fault:
        """Returns the fault of a batch that is retried as the step is set now."""
        return Fault(
            kind=FaultKind.OUT_OF_MEMORY,
            step=step,
            phase=phase,
            batch_size=num_samples,
            micro_batch_size=largest_micro_batch(num_samples, self.num_parts(num_samples)),
            stores_least=self.activations.stores_least,
            detail=detail,
        )

    def _learn(self, step: int) -> tuple[Fault, ...]:
        """Keeps what the last pass has recorded of the regions; returns a fault if some can no longer be offloaded."""
        if self.recorder is not None:
            self.activations.learn(self.recorder)
        return self.activations.exclude_unpinned(step, self.peers.ranks)

    def _disable_failed_feature(self, error: BaseException, step: int) -> tuple[Fault, ...]:
        """Disables what raised `error`: recomputation, or the compiled loss, blocks or model; returns faults."""
        is_compiling = is_compile_error(error) or isinstance(error, PeerCompileError)
        if self.compilation is None or not is_compiling or is_out_of_memory(error):
            return self.activations.exclude_failed(error, step)
        if self.peers.ranks.any(self.compilation.compiles_loss):
            self.compilation.stop_compiling_loss()
            consequence = "the loss runs as it is"
        elif self.activations.kept_shares:
            why = f"compiling what is recomputed in part failed: {first_paragraph(error)}"
            return self.activations.exclude_selective(why, step)
        elif self.compilation.blocks and not self.activations.are_planned:
            self.compile_whole()
            consequence = "the model is compiled as a whole"
        else:
            self.compilation.remove()
            self.compilation, consequence = None, "the model runs as it is"
            self.activations.exclude_selective(consequence, step)
        text = f"torch.compile failed, {consequence}: {first_paragraph(error)}"
        return (Fault(kind=FaultKind.COMPILED, step=step, phase="compile", detail=text),)

    def compile_whole(self) -> None:
        """Compiles the model as a whole in place of its blocks, and drops its regions: they are part of the code."""
        assert self.compilation is not None
        self.compilation.compile_whole()
        self.activations = Activations({}, self.sampler.generator.device)

    def accumulate(
        self,
        batches: Iterable[tuple[int, Any, Any]],
        num_samples: int,
        loss_scale: Tensor,
        obstacles: list[Obstacle] | None = None,
        *,
        is_captured: bool = False,
    ) -> Tensor:
        """Accumulates the gradients of micro-batches of `num_samples` in all; returns the sum of their losses.

        Each of `batches` is a number of samples, their inputs and their targets.

        Launches only device work, provided that model, loss and data source do so. If `obstacles` is a list, what
        a captured graph of the pass may not repeat is appended to it. `is_captured` says that it is captured.
        """
        device = loss_scale.device
        self.recorder = None
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        num_passed = 0
        if self.stepper is not None:
            self.stepper.attempt()
        with self._compiling():
            for count, inputs, targets in batches:
                recorder = None
                if not num_passed:
                    recorder = self.recorder = self.activations.recorder(
                        count, self.precision.key, is_captured=is_captured
                    )
                module = self._forward_of(inputs, is_divided=bool(self.activations.storage) or recorder is not None)
                with contextlib.ExitStack() as around:
                    if obstacles is not None:
                        around.enter_context(watched(obstacles, device))
                    around.enter_context(self.activations.in_force(module, self._recomputing, recorder))
                    with self.precision.in_force():
                        outputs = forward(module, inputs)
                    with torch.autocast(device.type, enabled=False):
                        compute = loss_in_fp32 if self.compilation is None else self.compilation.loss
                        loss = compute(self._loss, outputs, targets)
                    self._require_memory()
                    if self.stepper is not None:
                        is_last = num_passed + count == num_samples
                        around.enter_context(self.stepper.taking(is_first=not num_passed, is_last=is_last))
                    if self._reduction is not None:
                        is_whole = self.num_micro_batches == 1 and num_samples >= self.peers.ranks.world_size
                        around.enter_context(
                            self._reduction.taking(self.precision.weights.companions, is_whole=is_whole)
                        )
                    (loss * (loss_scale * (count / num_samples))).backward()
                num_passed += count
                if self.num_micro_batches > 1 and self.stepper is None:
                    for parameter in self._parameters:
                        self.precision.weights.gather_gradient(parameter)
                loss_sum += loss.detach().double() * count
                self._require_memory()
        return loss_sum

    def _compiling(self) -> contextlib.AbstractContextManager[None]:
        if self.compilation is None:
            return contextlib.nullcontext()
        return self.compilation.in_force(self.activations.kept_shares)

    @contextlib.contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Returns a context for recomputation in the backward pass."""
        with self._compiling(), self.precision.promoting():
            yield

    def _forward_of(self, inputs: Any, *, is_divided: bool) -> nn.Module:
        """Returns the module to call with `inputs`: the model, or its fused, divided or compiled form."""
        if self.fusion is not None and self.fusion.holds():
            divided = self.activations.divided
            return divided.module if divided is not None and is_divided else self.fusion.module
        return self.model if self.compilation is None else self.compilation.forward_of(inputs)

    def _require_memory(self) -> None:
        if not self._is_budget_waived:
            self._memory.check()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self.precision.weights.zero_grad()

    def batches(self, indices: Tensor, num_of_all: int) -> Iterator[tuple[int, Any, Any]]:
        """Yields the samples at `indices` as micro-batches: number of samples, inputs, targets.

        Of `num_of_all` samples of all ranks, these are one rank's share.
        """
        num_samples = len(indices)
        if num_samples == 0:
            return
        num_parts = min(self.num_parts(num_of_all), max(num_samples // self._least_samples, 1))
        for part in indices.tensor_split(num_parts):
            yield len(part), *self.sampler.source.batch(part, self.sampler.generator)

    def num_parts(self, num_samples: int) -> int:
        """Returns the number of micro-batches of a batch of so many samples."""
        return min(self.num_micro_batches, -(-num_samples // self.min_micro_batch_size))

    @property
    def _least_samples(self) -> int:
        """Samples that a micro-batch needs: a single one's vector, or its map of one pixel, has no variance."""
        return 2 if any(uses_batch_statistics(norm) for norm in self._batch_norms) else 1
