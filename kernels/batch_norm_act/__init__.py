"""Batch normalisation, residual sum, activation and change of precision in one operation, forward and backward."""

from triaccel_ray.kernels.batch_norm_act.api import batch_norm_act, batch_norm_act_forked, recomputer
from triaccel_ray.kernels.batch_norm_act.running import RunningStatistics

__all__ = ["RunningStatistics", "batch_norm_act", "batch_norm_act_forked", "recomputer"]
