"""Ends a training whose gradients stay NaN or infinite."""

from __future__ import annotations

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.records.signals import Observation


class NonFiniteGradientsError(RuntimeError):
    """Training has diverged: too many consecutive steps had NaN or infinite gradients (`max_skipped_steps`)."""


def require_finite(config: ControlConfig, observation: Observation) -> None:
    """Raises an error if gradients stay NaN or infinite, except in FP16, whose overflows the loss scale handles."""
    most, num_skipped = config.max_skipped_steps, observation.num_skipped_in_row
    if num_skipped >= most and Precision.FP16 not in observation.plan.precision.values():
        raise NonFiniteGradientsError(
            f"the gradients of the last {num_skipped} steps were NaN or infinite, up to step {observation.step}: "
            "none of these steps was made. Lower the learning rate, set clip_norm, or look for log(0) and 0/0 in "
            f"model and loss; max_skipped_steps = {most} says how many may follow one another"
        )
