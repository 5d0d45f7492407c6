"""What a step does with its gradients: statistics, parameters, loss scale and the sums of losses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.step_in_backward import BucketedGradients
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.kernels.step_end import end_step
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.gradients import Gradients


class TrainingUpdate:
    """Processes a step's gradients: updates variance statistics, parameters, loss scale and the sums of losses."""

    def __init__(
        self,
        precision: LayerPrecision,
        moments: GradientMoments,
        optimizer: LayerwiseOptimizer,
        loss_scale: LossScale,
        loss_sums: Tensor,
        clip_norm: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Adds a step's loss on all `ranks` to every row of `loss_sums`: fp64 [rows, 2], sum and number of samples.

        With `clip_norm`, gradients whose global norm is larger are scaled down to it. Gradients that arrive in buckets
        are clipped by the last step's norm, because their own is known only after they are freed. Those of the first
        step are scaled to zero.
        """
        self._precision, self._moments, self._optimizer, self._loss_scale = precision, moments, optimizer, loss_scale
        self._loss_sums, self._clip_norm = loss_sums, clip_norm
        self._ranks = ranks or Ranks()
        self._divisor: Tensor | None = None

    @property
    def is_capturable(self) -> bool:
        """Whether `run` consists of device work only."""
        return self._optimizer.is_capturable

    def begin(self) -> None:
        """Starts a step whose gradients arrive in buckets."""
        self._moments.stats.begin()
        active = self._precision.needs_loss_scale
        self._divisor = self._divisor_of(self._loss_scale.factor(active), active, lambda: self._moments.last_norm)

    def take(self, bucket: int, gradients: Gradients, do_step: bool) -> None:
        """Processes a bucket's gradients, which may be freed afterwards; with `do_step`, updates its parameters.

        If a gradient is not finite, this bucket and all later ones are not updated. Earlier ones already are.
        """
        found = self._moments.stats.reduce(gradients.table, bucket)
        if do_step:
            self._optimizer.update(gradients, divisor=self._divisor, found_nonfinite=found, bucket=bucket)

    def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients | BucketedGradients) -> None:
        """Completes one step from its loss summed over the samples (fp64 scalar) and its gradients.

        A step with a non-finite gradient is skipped in every precision. Buckets have already been processed by `take`.
        """
        active = self._precision.needs_loss_scale
        scale = self._loss_scale.factor(active)
        wait_for_loss = self._ranks.start_all_reduce([loss_sum])
        if isinstance(gradients, Gradients):
            found = self._moments.stats.update(gradients.table, scale)
            divisor = self._divisor_of(scale, active, lambda: self._moments.norm(scale))
            self._optimizer.update(gradients, divisor=divisor, found_nonfinite=found)
        else:
            found = self._moments.stats.combine(scale)
            if self._clip_norm is not None:
                self._moments.remember_norm(scale)
        if not self._optimizer.is_capturable:
            self._precision.weights.written(self._optimizer.parameters)
        wait_for_loss()
        end_step(loss_sum, num_samples, self._loss_sums, found, self._loss_scale.state, moves_scale=active)

    def _divisor_of(self, scale: Tensor, active: bool, norm: Callable[[], Tensor]) -> Tensor | None:
        """Returns the divisor of the gradients, fp32 scalar, or None; `norm` gives the norm of unscaled gradients."""
        if self._clip_norm is None:
            return scale if active else None
        return scale * (norm() / self._clip_norm).clamp(min=1.0).float()  # clipping is a larger divisor
