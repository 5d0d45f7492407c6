"""What follows the gradients of a step: statistics, optimizer, loss scale, loss. Device work alone, where it can be."""

from __future__ import annotations

import torch
from torch import Tensor

from triaccel_ray.apply.loss_scale import LossScale
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.gradients import Gradients
from triaccel_ray.measure.moments import GradientMoments


class TrainingUpdate:
    """Takes in gradients: watches their variance, steps the optimizer, moves the loss scale, adds up the loss."""

    def __init__(
        self,
        precision: LayerPrecision,
        moments: GradientMoments,
        optimizer: LayerwiseOptimizer,
        loss_scale: LossScale,
        loss_sums: Tensor,
    ) -> None:
        """Adds each step's loss to every row of `loss_sums`: fp64 [rows, 2], sum over the samples and their number."""
        self._precision, self._moments, self._optimizer, self._loss_scale = precision, moments, optimizer, loss_scale
        self._loss_sums = loss_sums

    @property
    def is_capturable(self) -> bool:
        """Whether `run` is device work alone."""
        return self._optimizer.is_capturable

    def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients) -> None:
        """Takes in one step: its loss summed over the samples (fp64 scalar), and its gradients."""
        active = self._precision.needs_loss_scale
        scale = self._loss_scale.factor(active)
        found = self._moments.update(gradients, scale)
        self._optimizer.update(gradients, loss_scale=scale if active else None, found_nonfinite=found)
        loss = torch.stack([loss_sum, torch.full_like(loss_sum, num_samples)])
        if active:
            self._loss_scale.update(found)
            # A step that overflowed was not made, and its loss may be as infinite as its gradients.
            loss = torch.where(found > 0, 0.0, loss)
        self._loss_sums += loss
