"""The end of a step in PyTorch's operations: the specification of the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossScaleState:
    """A dynamic loss scale, in tensors on the device that are written in place."""

    scale: Tensor
    """fp32 scalar."""
    num_finite: Tensor
    """Finite steps since the scale last moved, fp32 scalar."""
    num_skipped: Tensor
    """Steps skipped so far, fp64 scalar."""
    growth_interval: int
    """Finite steps in a row after which the scale doubles."""
    minimum: float
    """Smallest scale."""
    maximum: float
    """Largest scale."""


def move_scale(state: LossScaleState, found_nonfinite: Tensor) -> None:
    """Halves the scale after an overflow, doubles it after `growth_interval` finite steps in a row."""
    overflow = found_nonfinite > 0
    state.num_skipped.add_(overflow)
    state.num_finite.copy_(torch.where(overflow, 0.0, state.num_finite + 1.0))
    grow = state.num_finite >= state.growth_interval
    state.num_finite.copy_(torch.where(grow, 0.0, state.num_finite))
    factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
    state.scale.mul_(factor).clamp_(state.minimum, state.maximum)


def end_step(
    loss_sum: Tensor, num_samples: int, totals: Tensor, found_nonfinite: Tensor, state: LossScaleState | None
) -> None:
    """Adds (loss_sum, num_samples) to every row of `totals`, and moves the loss scale; see `api.end_step`."""
    added = torch.stack([loss_sum, torch.full_like(loss_sum, num_samples)])
    if state is not None:
        move_scale(state, found_nonfinite)
        added = torch.where(found_nonfinite > 0, 0.0, added)
    totals += added
