"""What makes a run's training steps, put together from the user's model, optimizer, loss and data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.apply.compile import Compilation, is_compiled, repeated_blocks
from triaccel_ray.apply.copies import ComputeCopies
from triaccel_ray.apply.fuse import Fusion, Refusal, fuse
from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision, supported_precisions, useless_precisions
from triaccel_ray.apply.step import Step
from triaccel_ray.config import ControlConfig
from triaccel_ray.cuda.capture_checks import watching_forward
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.stream_pool import LentStream
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import as_source, delivered
from triaccel_ray.kernels.step_end import end_step
from triaccel_ray.measure.memory import MemoryMeter, memory_meter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.dry_run import require_working
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import Layer, Loss, find_layers, require_trainable, to_channels_last, unwatched_weights
from triaccel_ray.records.plan import Fault, FaultKind, Precision


class TrainingUpdate:
    """Takes in gradients: watches their variance, steps the optimizer, moves the loss scale, adds up the loss."""

    def __init__(
        self,
        precision: LayerPrecision,
        moments: GradientMoments,
        optimizer: LayerwiseOptimizer,
        loss_scale: LossScale,
        loss_sums: Tensor,
        clip_norm: float | None = None,
    ) -> None:
        """Adds each step's loss to every row of `loss_sums`: fp64 [rows, 2], sum over the samples and their number.

        With `clip_norm` gradients whose global norm is larger are scaled down to it.
        """
        self._precision, self._moments, self._optimizer, self._loss_scale = precision, moments, optimizer, loss_scale
        self._loss_sums, self._clip_norm = loss_sums, clip_norm

    @property
    def is_capturable(self) -> bool:
        """Whether `run` is device work alone."""
        return self._optimizer.is_capturable

    def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients) -> None:
        """Takes in one step: its loss summed over the samples (fp64 scalar), and its gradients.

        A step with a gradient that is not finite is not made, in whatever precision.
        """
        active = self._precision.needs_loss_scale
        scale = self._loss_scale.factor(active)
        found = self._moments.update(gradients, scale)
        divisor = scale if active else None
        if self._clip_norm is not None:
            norm = self._moments.norm(scale)  # of unscaled gradients; clipping is a larger divisor
            divisor = scale * (norm / self._clip_norm).clamp(min=1.0).float()
        self._optimizer.update(gradients, divisor=divisor, found_nonfinite=found)
        if not self._optimizer.is_capturable and self._precision.copies is not None:
            # PyTorch's fused optimizers write parameters without telling, which `refresh` would rely on.
            self._precision.copies.write(self._optimizer.parameters)
        end_step(loss_sum, num_samples, self._loss_sums, found, self._loss_scale.state, moves_scale=active)


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """What makes the steps of a run, and what it is measured with."""

    model: nn.Module
    loss: Loss
    layers: Sequence[Layer]
    supported: Sequence[tuple[str, tuple[Precision, ...]]]
    """Each layer's name, and what it may compute in."""
    device: torch.device
    memory: MemoryMeter
    pool: GraphPool
    optimizer: LayerwiseOptimizer
    sampler: Sampler
    loss_scale: LossScale
    moments: GradientMoments
    loss_sums: Tensor
    """fp64 [2, 2]: sum over the samples and their number, of the present epoch and since the last tick."""
    steps: StepCache
    make_room: Callable[[], None]
    """Gives back all memory that can be had again: captured steps, and what the allocator keeps."""
    faults: Sequence[Fault]
    """What steps are made of, what makes them slower than asked for, and what the loop leaves as it is."""

    @property
    def precision(self) -> LayerPrecision:
        """What computes each layer in its precision."""
        return self.steps.step.precision

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns a context in which the model computes in FP32, as its own code has it.

        On the stream of the steps, whose memory is then used again, and which alone shares memory between its graphs.
        """
        with self.steps.on_stream(), self.precision.suspended():
            yield

    def remove(self) -> None:
        """Gives the model its own forward functions back, and the graphs' memory to the device; all of it is tried."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.sampler.close)
            stack.callback(self.pool.release)
            stack.callback(self.precision.remove)
            if self.steps.step.compilation is not None:
                stack.callback(self.steps.step.compilation.remove)


def assemble(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    data: Any,
    config: ControlConfig,
    *,
    memory: tuple[int | None, int | None],
    seed: int,
) -> Training:
    """Returns what trains `model`, whose forward functions are wrapped from here on; arguments as of `ControlLoop`.

    `memory` are the budget and the headroom in bytes.
    On a GPU the norms of a BatchNorm network are fused; a model without, or that cannot be traced, is compiled.
    """
    layers = find_layers(model)
    require_trainable(model, optimizer, layers)
    device, execution = next(model.parameters()).device, config.execution
    on_gpu = device.type == "cuda"
    to_channels_last(model)
    meter, pool = memory_meter(device, *memory), GraphPool(device)

    def make_room() -> None:
        pool.release()
        meter.release()

    layerwise = LayerwiseOptimizer(optimizer, layers, release_memory=make_room)
    source = delivered(as_source(data), device, execution.data_on)
    # On a stream that the steps use again: another one would keep workspaces of its own.
    with LentStream(device).current() if on_gpu else contextlib.nullcontext(), watching_forward(model) as waits:
        require_working(model, loss, source)
    sampler, loss_scale = Sampler(source, seed=seed, device=device), LossScale(config.loss_scale, device)
    meter.require_room()

    # Every step adds its loss to both rows: that of the epoch, and that since the last tick.
    loss_sums = torch.zeros(2, 2, dtype=torch.float64, device=device)
    moments = GradientMoments(layers, layerwise.watched, beta=config.precision.beta)

    faults: list[Fault] = []
    fusion = compilation = None
    if on_gpu and execution.compile != "on" and execution.fuse:
        fused = _fuse(model, layers, recompute=execution.recompute)
        if isinstance(fused, Refusal):
            faults.append(_noted(FaultKind.FUSION_REFUSED, "fuse", fused.reason))
        else:
            fusion = fused
    compiles = execution.compile == "on" or (execution.compile == "auto" and on_gpu and fusion is None)
    copies = ComputeCopies(layers, layerwise.parameters) if on_gpu and not compiles else None
    precision = LayerPrecision(model, layers, copies=copies, norms=() if fusion is None else fusion.norms)
    if compiles:
        compilation, detail = _compile(model, waits, whole=execution.compile == "on", batch_varies=config.batch.enabled)
        faults.append(_noted(FaultKind.COMPILED, "compile", detail))
    step = Step(
        model,
        loss,
        sampler,
        precision,
        check_memory=meter.check,
        release_memory=make_room,
        is_exceeded_at_rest=lambda: meter.is_exceeded_at_rest,
        fusion=fusion,
        compilation=compilation,
    )
    update = TrainingUpdate(precision, moments, layerwise, loss_scale, loss_sums, config.clip_norm)
    useless = useless_precisions(device.type, is_compiled=step.is_compiled)
    withheld = {} if config.precision.offer_useless else useless
    return Training(
        model=model,
        loss=loss,
        layers=layers,
        supported=[(layer.name, supported_precisions(layer, without=withheld)) for layer in layers],
        device=device,
        memory=meter,
        pool=pool,
        optimizer=layerwise,
        sampler=sampler,
        loss_scale=loss_scale,
        moments=moments,
        loss_sums=loss_sums,
        steps=StepCache(step, update, lambda: Gradients(layerwise.watched), pool, execution),
        make_room=make_room,
        faults=[*faults, *_limitations(model, layers, layerwise, sampler, config, withheld)],
    )


def _noted(kind: FaultKind, phase: str, detail: str) -> Fault:
    return Fault(kind=kind, step=0, phase=phase, detail=detail)


def _limitations(
    model: nn.Module,
    layers: Sequence[Layer],
    optimizer: LayerwiseOptimizer,
    sampler: Sampler,
    config: ControlConfig,
    withheld: Mapping[Precision, str],
) -> Iterator[Fault]:
    """Yields what the loop leaves as it is, or cannot do as asked for, for the record."""
    if reason := sampler.source.streamed_because:
        yield _noted(FaultKind.DATA_STREAMED, "data", reason)
    wanted = set(Precision) if config.precision.enabled else {config.precision.initial}
    wanted |= set(config.precision.initial_layers.values())
    for level, reason in withheld.items():
        if level in wanted:
            yield _noted(FaultKind.PRECISION_REFUSED, "precision", f"{reason}: it is not offered")
    if names := unwatched_weights(model, layers):
        text = f"weights beside child layers are no layers, and not adapted: {', '.join(names)}"
        yield _noted(FaultKind.NOT_A_LAYER, "layers", text[:500])
    if sampler.generator.device.type == "cuda" and optimizer.waits_for_host:
        text = "the host waits at each step for whether gradients are finite: give the optimizer fused=True"
        yield _noted(FaultKind.CAPTURE_FAILED, "optimizer", text)


def _compile(
    model: nn.Module, waits: Sequence[str], *, whole: bool, batch_varies: bool
) -> tuple[Compilation | None, str]:
    """Returns the model compiled, and how and why, for the record.

    `waits` says why the host waits for the device inside the model's forward pass, as it is.
    """
    if is_compiled(model):
        return None, "the model is compiled already: it stays as it is"
    blocks = () if whole else repeated_blocks(model)
    why = "its blocks repeat" if blocks else "as asked" if whole else "no block of it repeats"
    if blocks and waits:
        blocks, why = (), f"between its blocks {waits[0]}"
    compilation = Compilation(model, blocks, batch_varies=batch_varies)
    return compilation, f"{compilation}: {why}"


def _fuse(model: nn.Module, layers: Sequence[Layer], *, recompute: bool) -> Fusion | Refusal | None:
    """Returns the model with its norms fused, or why not; None for a model without batch normalisation."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return None
    if not model.training:
        model.train()
    return fuse(model, [module for layer in layers for module in layer.modules], recompute=recompute)
