"""The searched thresholds as numeric dimensions, for a search's table, plots and parameter importance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from triaccel_ray.config import ControlConfig


@dataclass(frozen=True)
class Dimension:
    """One threshold."""

    name: str
    value: Callable[[ControlConfig], float]
    form: str
    """Format specification for display."""
    log: bool = False
    """Whether its scale is logarithmic."""
    asked_as: str = ""
    """Its name in `triaccel_ray.search_spaces.thresholds.OPTIONAL`; empty if it is always searched."""

    def text(self, value: float) -> str:
        """Returns the value formatted for display."""
        return format(value, self.form)

    def position(self, control: ControlConfig) -> float:
        """Returns the threshold's position on this scale; NaN if it has none, such as zero on a logarithmic scale."""
        value = self.value(control)
        if self.log:
            value = math.log10(value) if value > 0.0 else math.nan
        return value if math.isfinite(value) else math.nan


_DIMENSIONS: Final = (
    Dimension("tau_low", lambda control: control.precision.tau_low, ".2e", log=True),
    Dimension("tau_high", lambda control: control.precision.tau_high, ".2e", log=True),
    Dimension("rho_low", lambda control: control.batch.rho_low, ".3f"),
    Dimension("rho_high", lambda control: control.batch.rho_high, ".3f"),
    Dimension("alpha", lambda control: control.curvature.alpha, ".2g", log=True, asked_as="alpha"),
    Dimension("tau_curv", lambda control: control.curvature.tau_curv, ".3g", log=True, asked_as="tau_curv"),
    Dimension("t_ctrl", lambda control: control.every_steps, ".0f", asked_as="t_ctrl"),
    Dimension("step_up", lambda control: control.batch.step_up, ".0f", asked_as="batch_steps"),
    Dimension("step_down", lambda control: control.batch.step_down, ".0f", asked_as="batch_steps"),
)


def dimensions(optional: Sequence[str] = ()) -> list[Dimension]:
    """Returns the dimensions that are always searched, then those that are named in `optional`."""
    return [each for each in _DIMENSIONS if not each.asked_as or each.asked_as in optional]
