"""The objective of a search: one figure, maximized among configurations within a margin of AMP's metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from triaccel_ray.config import check_fields, knob
from triaccel_ray.measure.score import quality
from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Measured figures of a configuration after an epoch."""

    metric: float
    """The task's metric (`Goal`) on the validation samples."""
    seconds: float
    """Seconds per epoch: the typical ones, or the mean of the last five epochs."""
    peak_gb: float
    """Process peak on the device, 10^9 bytes."""
    score: float


ObjectiveName = Literal["score", "metric", "time", "memory", "pareto"]

_VALUES: Final[Mapping[ObjectiveName, Callable[[Performance, Goal], float]]] = {
    "score": lambda performance, goal: performance.score,
    "metric": lambda performance, goal: quality(performance.metric, goal),
    "time": lambda performance, goal: 1.0 / performance.seconds,
    "memory": lambda performance, goal: 1.0 / performance.peak_gb,
    "pareto": lambda performance, goal: performance.score,
}

_CHANCE: Final = 1.0
"""Points by which the metric on a few hundred samples fluctuates from epoch to epoch."""


def grace_epochs(num_epochs: int) -> int:
    """Returns the number of epochs before a trial may be pruned: half of them, at least two.

    Variances fall over the epochs and thresholds act late: figures after a quarter of a run were up to 20 times off.
    """
    return min(max(num_epochs // 2, 2), num_epochs)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The figure to maximize, under the constraint that the task's metric is within `margin` of the AMP baseline's.

    Without this constraint, a fast model that learned nothing could have the best score. A point is a percentage point
    for metrics in percent, and one percent of AMP's figure for any other.
    """

    name: ObjectiveName = "score"
    """`pareto` samples trials for metric, time and memory at once, regardless of the margin, and ranks them by score
    within it."""
    margin: float = knob(1.0, "[0, 100]")
    """Points of the metric that a trial may lose against AMP."""
    reference: tuple[float, ...] = ()
    """The AMP baseline's metric on the validation samples after each epoch; empty: no constraint."""
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def against(cls, amp: Sequence[Epoch], goal: Goal, *, name: ObjectiveName = "score", margin: float = 1.0) -> Self:
        """Returns the objective that is constrained by the AMP baseline's metric after each epoch."""
        metrics = (epoch.held_out(goal) for epoch in amp)
        reference = tuple(metric for metric in metrics if metric is not None)  # of trials, that is each of them
        return cls(name=name, margin=margin, reference=reference, goal=goal)

    @property
    def limit(self) -> float:
        """Worst feasible metric at the last epoch: AMP's minus the margin, or plus it for a metric to be minimized."""
        baseline, sign = self.reference[-1], -1.0 if self.goal.maximize else 1.0
        return baseline + sign * self.margin * self._point(baseline)

    @property
    def limit_text(self) -> str:
        """The limit as text for a sentence."""
        return f"at {'least' if self.goal.maximize else 'most'} {self.goal.text(self.limit)}"

    @property
    def margin_text(self) -> str:
        """The margin as text with its unit."""
        point = "point" if self.margin == 1.0 else "points"
        return f"{self.margin:g} {point if self.goal.unit == '%' else 'percent'}"

    def shortfall(self, epoch: int, metric: float) -> float:
        """Returns by how many points the metric misses the baseline at that epoch less the margin; 0 if feasible."""
        if not self.reference:
            return 0.0
        baseline = self.reference[min(epoch, len(self.reference)) - 1]
        lost = baseline - metric if self.goal.maximize else metric - baseline
        return max(lost / self._point(baseline) - self.margin, 0.0)

    def _point(self, baseline: float) -> float:
        return 1.0 if self.goal.unit == "%" else max(abs(baseline) / 100.0, 1e-12)

    def is_hopeless(self, epoch: int, performance: Performance) -> bool:
        """Returns whether the shortfall exceeds both the margin and one point; never for `pareto`.

        A smaller shortfall may be the noise of one epoch.
        """
        return self.name != "pareto" and self.shortfall(epoch, performance.metric) > max(self.margin, _CHANCE)

    def value(self, epoch: int, performance: Performance) -> float:
        """Returns the value that the search maximizes: the figure (positive) if feasible, else minus the shortfall.

        So infeasible configurations rank below all others, ordered by shortfall, and early epochs can be compared.
        """
        shortfall = self.shortfall(epoch, performance.metric)
        return -shortfall if shortfall > 0.0 else _VALUES[self.name](performance, self.goal)
