"""One dynamic loss scale for the whole model, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from triaccel_ray.config import LossScaleConfig

MAXIMUM = 2.0**24
"""Beyond this the scaled loss itself approaches the end of FP32's range in long sums."""


class LossScale:
    """Doubles after `growth_interval` finite steps in a row, halves at an overflow (Micikevicius et al. 2018).

    All state is in device scalars, updated without a look from the host.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        """Starts at the configured scale."""
        self._interval = config.growth_interval
        self._scale = torch.tensor(config.initial, device=device)
        self._num_finite = torch.zeros((), device=device)
        self.num_skipped = torch.zeros((), dtype=torch.float64, device=device)
        """Steps skipped so far, a scalar tensor."""
        self._one = torch.ones((), device=device)

    def factor(self, active: bool) -> Tensor:
        """Returns the factor on the loss: the scale while FP16 is in use, else 1; fp32 scalar."""
        return self._scale if active else self._one

    def update(self, found_nonfinite: Tensor) -> None:
        """Takes in whether the step's gradients overflowed (fp32 scalar, 0 or 1)."""
        overflow = found_nonfinite > 0
        self.num_skipped.add_(overflow)
        self._num_finite.copy_(torch.where(overflow, 0.0, self._num_finite + 1.0))
        grow = self._num_finite >= self._interval
        self._num_finite.copy_(torch.where(grow, 0.0, self._num_finite))
        factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
        self._scale.mul_(factor).clamp_(1.0, MAXIMUM)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the scale and its counters."""
        return {
            "scale": self._scale.clone(),
            "num_finite": self._num_finite.clone(),
            "num_skipped": self.num_skipped.clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        self._scale.copy_(state["scale"])
        self._num_finite.copy_(state["num_finite"])
        self.num_skipped.copy_(state["num_skipped"])
