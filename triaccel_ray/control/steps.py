"""A training step put together: batch, gradients, statistics, optimizer, loss scale, captured where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.apply.compile import Compilation, is_compiled, repeated_blocks
from triaccel_ray.apply.copies import ComputeCopies
from triaccel_ray.apply.fuse import Fusion, Refusal, fuse
from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.step import Step
from triaccel_ray.config import ExecutionConfig
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.kernels.step_end import end_step
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import Layer, Loss
from triaccel_ray.records.plan import Fault, FaultKind


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
class StepParts:
    """What a step is put together from."""

    model: nn.Module
    loss: Loss
    layers: Sequence[Layer]
    sampler: Sampler
    optimizer: LayerwiseOptimizer
    moments: GradientMoments
    loss_scale: LossScale
    loss_sums: Tensor
    """fp64 [rows, 2]: every step adds its loss, and its number of samples, to each row."""
    memory: MemoryMeter
    make_room: Callable[[], None]
    """Gives back all memory that can be had again."""
    pool: GraphPool
    batch_varies: bool = True
    """Whether the batch size may change between steps."""
    waits: Sequence[str] = ()
    """Why the host waits for the device inside the model's forward pass, as it is."""
    clip_norm: float | None = None


def build_steps(parts: StepParts, config: ExecutionConfig) -> tuple[StepCache, tuple[Fault, ...]]:
    """Returns what makes the steps, and as faults what they are made of and what makes them slower than asked for.

    On a GPU the norms of a BatchNorm network are fused; a model without, or that cannot be traced, is compiled.
    """
    fusion = compilation = None
    faults: tuple[Fault, ...] = ()
    on_gpu = parts.pool.handle is not None
    if on_gpu and config.compile != "on":
        fused = _fuse(parts, recompute=config.recompute) if config.fuse else None
        if isinstance(fused, Refusal):
            faults = (Fault(kind=FaultKind.FUSION_REFUSED, step=0, phase="fuse", detail=fused.reason),)
        else:
            fusion = fused
    compiles = config.compile == "on" or (config.compile == "auto" and on_gpu and fusion is None)
    norms = () if fusion is None else fusion.norms
    copies = ComputeCopies(parts.layers, parts.optimizer.parameters) if on_gpu and not compiles else None
    precision = LayerPrecision(parts.model, parts.layers, copies=copies, norms=norms)
    if compiles:
        compilation, detail = _compile(parts, whole=config.compile == "on")
        faults += (Fault(kind=FaultKind.COMPILED, step=0, phase="compile", detail=detail),)
    step = Step(
        parts.model,
        parts.loss,
        parts.sampler,
        precision,
        check_memory=parts.memory.check,
        release_memory=parts.make_room,
        is_exceeded_at_rest=lambda: parts.memory.is_exceeded_at_rest,
        fusion=fusion,
        compilation=compilation,
    )
    update = TrainingUpdate(
        precision, parts.moments, parts.optimizer, parts.loss_scale, parts.loss_sums, parts.clip_norm
    )
    cache = StepCache(step, update, lambda: Gradients(parts.optimizer.watched), parts.pool, config)
    return cache, faults


def _compile(parts: StepParts, *, whole: bool) -> tuple[Compilation | None, str]:
    """Returns the model compiled, and how and why, for the record."""
    if is_compiled(parts.model):
        return None, "the model is compiled already: it stays as it is"
    blocks = () if whole else repeated_blocks(parts.model)
    why = "its blocks repeat" if blocks else "as asked" if whole else "no block of it repeats"
    if blocks and parts.waits:
        blocks, why = (), f"between its blocks {parts.waits[0]}"
    compilation = Compilation(parts.model, blocks, batch_varies=parts.batch_varies)
    return compilation, f"{compilation}: {why}"


def _fuse(parts: StepParts, *, recompute: bool) -> Fusion | Refusal | None:
    """Returns the model with its norms fused, or why not; None for a model without batch normalisation."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in parts.model.modules()):
        return None
    if not parts.model.training:
        parts.model.train()
    layers = [module for layer in parts.layers for module in layer.modules]
    return fuse(parts.model, layers, recompute=recompute)
