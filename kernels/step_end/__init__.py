"""The end of a training step: updates the loss scale and accumulates the loss."""

from triaccel_ray.kernels.step_end.api import LossScaleState, end_step

__all__ = ["LossScaleState", "end_step"]
