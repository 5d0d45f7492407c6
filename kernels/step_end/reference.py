"""The end of a step in plain PyTorch: the specification of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """A dynamic loss scale. Its tensors are on the device and updated in place."""

    scale: Tensor
    """fp32 scalar."""
    num_finite: Tensor
    """Finite steps since the scale last changed, fp32 scalar."""
    num_skipped: Tensor
    """Steps skipped so far, fp64 scalar."""
    num_skipped_in_row: Tensor
    """Consecutive steps skipped so far, fp64 scalar."""
    growth_interval: int
    """Consecutive finite steps after which the scale doubles."""
    minimum: float
    """Smallest scale."""
    maximum: float
    """Largest scale."""


def count_skipped(state: LossScaleState, overflow: Tensor) -> None:
    """Counts the step as skipped if `overflow`, a bool scalar, is true."""
    state.num_skipped.add_(overflow)
    state.num_skipped_in_row.add_(1.0).mul_(overflow)


def move_scale(state: LossScaleState, overflow: Tensor) -> None:
    """Halves the scale if `overflow`, a bool scalar; doubles it after `growth_interval` consecutive finite steps."""
    count_skipped(state, overflow)
    state.num_finite.copy_(torch.where(overflow, 0.0, state.num_finite + 1.0))
    grow = state.num_finite >= state.growth_interval
    state.num_finite.copy_(torch.where(grow, 0.0, state.num_finite))
    factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
    state.scale.mul_(factor).clamp_(state.minimum, state.maximum)


def end_step(
    loss_sum: Tensor,
    num_samples: int,
    totals: Tensor,
    found_nonfinite: Tensor,
    state: LossScaleState,
    *,
    moves_scale: bool,
) -> None:
    """Adds (loss_sum, num_samples) to every row of `totals` and updates the loss scale; see `api.end_step`."""
    overflow = found_nonfinite > 0
    (move_scale if moves_scale else count_skipped)(state, overflow)
    if not overflow:  # reading it costs nothing on a CPU
        totals += torch.stack([loss_sum, torch.full_like(loss_sum, num_samples)])
