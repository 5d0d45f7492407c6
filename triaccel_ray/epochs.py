"""What every training loop of ours takes and returns by the epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Schedule = Callable[[float], float]
"""Maps epochs trained, fractional, to a factor on the optimizer's learning rates."""


@dataclass(frozen=True, kw_only=True)
class EpochStats:
    """One pass over the training samples."""

    epoch: int
    """Epochs done, from 1."""
    loss: float
    """Mean over the samples, as they were met."""
    num_steps: int
    num_samples: int
    seconds: float
    """Wall-clock, the device synchronised at both ends."""


def mean_loss(loss: Tensor) -> float:
    """Returns sum over number, from the two on the device (fp64 [2]); NaN when every step of the epoch was skipped."""
    loss_sum, num_samples = loss.tolist()
    return float(loss_sum / num_samples) if num_samples else math.nan
