"""The specification of a search, and the searched thresholds as numeric dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal

from triaccel_ray.config import ControlConfig, check_fields, knob
from triaccel_ray.service.runs.objective import ObjectiveName
from triaccel_ray.service.runs.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """Settings of one search."""

    base: RunSpec
    """Settings shared by all trials."""
    space: Literal["thresholds", "thresholds-absolute"] = "thresholds"
    """Search space: scaled to the variances of a short probe, or absolute."""
    optional: tuple[Literal["alpha", "tau_curv", "t_ctrl", "batch_steps"], ...] = knob((), option="also")
    """Settings to search besides tau_low, tau_high, rho_low and rho_high."""
    num_trials: int = knob(16, "[1, 100000]", option="trials")
    """Configurations to try."""
    objective: ObjectiveName = "score"
    """What to optimize among trials within the margin of AMP. metric is what the task is judged by, such as accuracy.
    pareto draws trials for metric, time and memory at once, and ranks them by score."""
    margin: float = knob(1.0, "[0, 100]")
    """How far a trial may fall behind AMP on validation samples: percentage points of accuracy, percent of other
    metrics."""
    seed: int = knob(0, "[0, 2147483647]")
    """Seed of the sampler and of every run."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Dimension:
    """One threshold."""

    name: str
    path: str
    """Dotted name of its field in `ControlConfig`."""
    form: str
    """Format specification for display."""
    option: str = ""
    """Its name in `triaccel_ray.search_spaces.thresholds.OPTIONAL`; empty if it is always searched."""

    def value(self, control: ControlConfig) -> Any:
        """Returns its value in `control`."""
        return attrgetter(self.path)(control)


_DIMENSIONS: Final = (
    Dimension("tau_low", "precision.tau_low", ".2e"),
    Dimension("tau_high", "precision.tau_high", ".2e"),
    Dimension("rho_low", "batch.rho_low", ".3f"),
    Dimension("rho_high", "batch.rho_high", ".3f"),
    Dimension("alpha", "curvature.alpha", ".2g", option="alpha"),
    Dimension("tau_curv", "curvature.tau_curv", ".3g", option="tau_curv"),
    Dimension("t_ctrl", "every_steps", ".0f", option="t_ctrl"),
    Dimension("step_up", "batch.step_up", ".0f", option="batch_steps"),
    Dimension("step_down", "batch.step_down", ".0f", option="batch_steps"),
)


def dimensions(optional: Sequence[str] = ()) -> list[Dimension]:
    """Returns the dimensions that are always searched, then those that are named in `optional`."""
    return [each for each in _DIMENSIONS if not each.option or each.option in optional]
