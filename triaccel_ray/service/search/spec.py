"""The specification of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from triaccel_ray.config import check_fields, knob
from triaccel_ray.service.runs.objective import Objective, ObjectiveName
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
        Objective(name=self.objective, margin=self.margin, goal=self.base.goal)
