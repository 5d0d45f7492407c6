"""What every training loop of ours takes and returns by the epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
