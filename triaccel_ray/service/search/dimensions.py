"""The thresholds that a search looks for, as numbers: what its table, pictures and importance have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triaccel_ray.config import ControlConfig


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One threshold."""

    name: str
    value: Callable[[ControlConfig], float]
    form: str
    """Format specification, for people."""
    log: bool = False
    """Whether it lives on a logarithmic scale."""

    def text(self, value: float) -> str:
        """Returns the value for people."""
        return format(value, self.form)

    def position(self, control: ControlConfig) -> float:
        """Returns the place on the dimension's own scale; NaN where it has none, as zero on a logarithmic one."""
        value = self.value(control)
        if self.log:
            value = math.log10(value) if value > 0.0 else math.nan
        return value if math.isfinite(value) else math.nan

    def at(self, position: float) -> str:
        """Returns, for people, the value at a place on the scale."""
        return self.text(10.0**position if self.log else position)


_ALWAYS: Final = (
    Dimension(name="tau_low", value=lambda control: control.precision.tau_low, form=".2e", log=True),
    Dimension(name="tau_high", value=lambda control: control.precision.tau_high, form=".2e", log=True),
    Dimension(name="rho_low", value=lambda control: control.batch.rho_low, form=".3f"),
    Dimension(name="rho_high", value=lambda control: control.batch.rho_high, form=".3f"),
)
_OPTIONAL: Final[Mapping[str, tuple[Dimension, ...]]] = {
    "alpha": (Dimension(name="alpha", value=lambda control: control.curvature.alpha, form=".2g", log=True),),
    "tau_curv": (Dimension(name="tau_curv", value=lambda control: control.curvature.tau_curv, form=".3g", log=True),),
    "t_ctrl": (Dimension(name="t_ctrl", value=lambda control: control.every_steps, form=".0f"),),
    "batch_steps": (
        Dimension(name="step_up", value=lambda control: control.batch.step_up, form=".0f"),
        Dimension(name="step_down", value=lambda control: control.batch.step_down, form=".0f"),
    ),
}
"""By the names under which they are asked for (`triaccel_ray.search_spaces.thresholds.OPTIONAL`)."""


def dimensions(optional: Sequence[str] = ()) -> tuple[Dimension, ...]:
    """Returns what is always searched, then what was asked for besides."""
    return (*_ALWAYS, *(dimension for name in optional for dimension in _OPTIONAL[name]))
