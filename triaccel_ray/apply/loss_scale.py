"""One dynamic loss scale for the whole model, kept on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from triaccel_ray.config import LossScaleConfig
from triaccel_ray.kernels.step_end import LossScaleState
from triaccel_ray.records.plan import MINIMUM_LOSS_SCALE

MAXIMUM = 2.0**24
"""Largest loss scale: beyond it, long sums of the scaled loss approach the largest FP32 number."""
_SAVED = ("scale", "num_finite", "num_skipped", "num_skipped_in_row")


class LossScale:
    """Doubles after `growth_interval` finite steps in a row, halves at an overflow (Micikevicius et al. 2018).

    All state is in device scalars, which `triaccel_ray.kernels.step_end` updates without synchronizing with the host.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device) -> None:
        self.state = LossScaleState(
            scale=torch.tensor(config.initial, device=device),
            num_finite=torch.zeros((), device=device),
            num_skipped=torch.zeros((), dtype=torch.float64, device=device),
            num_skipped_in_row=torch.zeros((), dtype=torch.float64, device=device),
            growth_interval=config.growth_interval,
            minimum=MINIMUM_LOSS_SCALE,
            maximum=MAXIMUM,
        )
        self._one = torch.ones((), device=device)

    def factor(self, active: bool) -> Tensor:
        """Returns the factor on the loss: the scale while FP16 is in use, else 1; fp32 scalar."""
        return self.state.scale if active else self._one

    def read(self, active: bool) -> Tensor:
        """Returns the factor, the steps skipped so far, and those skipped in a row up to now: fp64 [3]."""
        state = self.state
        return torch.stack([self.factor(active).double(), state.num_skipped, state.num_skipped_in_row])

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the scale and its counters."""
        return {name: getattr(self.state, name).clone() for name in _SAVED}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned."""
        for name in _SAVED:
            getattr(self.state, name).copy_(state[name])
