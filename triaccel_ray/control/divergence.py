"""When a training has diverged."""

from __future__ import annotations

from triaccel_ray.records.plan import Precision
from triaccel_ray.records.signals import Observation


class NonFiniteGradientsError(RuntimeError):
    """The training has diverged: no step was made for a while."""


def require_finite(observation: Observation, max_skipped_steps: int) -> None:
    """Ends a training whose gradients are no longer finite. FP16 may overflow: it is left to the loss scale.

    Raises:
        NonFiniteGradientsError: `max_skipped_steps` steps in a row were skipped.
    """
    num_skipped = observation.num_skipped_in_row
    if num_skipped >= max_skipped_steps and Precision.FP16 not in observation.plan.precision.values():
        raise NonFiniteGradientsError(
            f"the gradients of the last {num_skipped} steps were NaN or infinite, up to step {observation.step}: "
            "none of these steps was made. Lower the learning rate, set clip_norm, or look for log(0) and 0/0 in "
            f"model and loss; max_skipped_steps = {max_skipped_steps} says how many may follow one another"
        )
