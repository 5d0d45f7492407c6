"""What a batch normalisation remembers from call to call."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RunningStatistics:
    """Moving averages, written in place by every call in training mode, as `torch.nn.BatchNorm2d` does."""

    mean: Tensor
    """[C], of the channels' means."""
    var: Tensor
    """[C], of the channels' unbiased variances."""
    num_batches: Tensor | None = None
    """Integer scalar, increased by one; None: not counted."""
    momentum: float = 0.1
    """Weight of the new batch, in [0, 1]."""
