"""What ends a training step: the loss scale moves, and the loss is added up."""

from triaccel_ray.kernels.step_end.api import LossScaleState, end_step

__all__ = ["LossScaleState", "end_step"]
