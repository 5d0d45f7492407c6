"""Batch normalization, residual sum, activation and cast in one operation, forward and backward."""

from triaccel_ray.kernels.batch_norm_act.api import batch_norm_act, recomputer
from triaccel_ray.kernels.batch_norm_act.reference import RunningStatistics

__all__ = ["RunningStatistics", "batch_norm_act", "recomputer"]
