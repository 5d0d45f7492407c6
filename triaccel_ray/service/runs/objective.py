"""The objective of a search: one figure, maximized among configurations within a margin of AMP's metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

from triaccel_ray.config import check_fields, knob, require
from triaccel_ray.measure.score import quality
from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of a configuration after an epoch."""

    metric: float
    """What the task is judged by (`Goal`), on the validation samples."""
    seconds: float
    """Per epoch, mean of the last five."""
    peak_gb: float
    """Process peak on the device, 10^9 bytes."""
    score: float


ObjectiveName = Literal["score", "metric", "accuracy", "time", "memory", "pareto"]

_VALUES: Final[Mapping[ObjectiveName, Callable[[Figures, Goal], float]]] = {
    "score": lambda figures, goal: figures.score,
    "metric": lambda figures, goal: quality(figures.metric, goal),
    "accuracy": lambda figures, goal: quality(figures.metric, goal),  # the metric's name where that is what it is
    "time": lambda figures, goal: 1.0 / figures.seconds,
    "memory": lambda figures, goal: 1.0 / figures.peak_gb,
    "pareto": lambda figures, goal: figures.score,
}

_CHANCE: Final = 1.0
"""Points by which the metric on a few hundred samples differs from epoch to epoch."""


def grace_epochs(num_epochs: int) -> int:
    """Returns after how many epochs a trial may be stopped: half, two at least.

    Variances fall over the epochs and thresholds act late: what a quarter showed was up to 20 times off in the end.
    """
    return min(max(num_epochs // 2, 2), num_epochs)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A figure to maximise under the condition that the task's metric is within `margin` of the AMP baseline's.

    Without the condition the score could be won by a fast model that learned nothing. A point is a percentage point
    for metrics in percent, and one percent of AMP's figure for any other.
    """

    name: ObjectiveName = "score"
    """With `pareto` trials are drawn for metric, time and memory at once, whatever the margin, and
    ranked by the score under it."""
    margin: float = knob(1.0, "[0, 100]")
    """Points of the metric that may be given up."""
    reference: tuple[float, ...] = ()
    """The AMP baseline's metric on the validation samples after each epoch; empty: no condition."""
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        check_fields(self)
        rule = f"the task is judged by {self.goal.words}; write metric"
        require(self.name != "accuracy" or self.goal.name == "accuracy", "objective", self.name, rule)

    @classmethod
    def against(cls, amp: Sequence[Epoch], goal: Goal, *, name: ObjectiveName = "score", margin: float = 1.0) -> Self:
        """Returns the objective whose condition are the epochs of the AMP baseline.

        Raises:
            ValueError: one of them was not judged on validation samples.
        """
        reference = []
        for epoch in amp:
            if (figure := epoch.held_out(goal)) is None:
                raise ValueError(
                    f"epoch of the AMP baseline = {epoch.epoch}: was not judged on validation samples, so nothing can "
                    "be measured by it; run the baseline again"
                )
            reference.append(figure)
        return cls(name=name, margin=margin, reference=tuple(reference), goal=goal)

    @property
    def limit(self) -> float:
        """What is feasible at the last epoch: AMP's metric less the margin, or more it where little is wanted."""
        baseline, sign = self.reference[-1], -1.0 if self.goal.maximize else 1.0
        return baseline + sign * self.margin * self._point(baseline)

    @property
    def limit_text(self) -> str:
        """The limit for people."""
        return f"at {'least' if self.goal.maximize else 'most'} {self.goal.text(self.limit)}"

    @property
    def margin_text(self) -> str:
        """The margin for people."""
        return f"{self.margin:g} {'points' if self.goal.unit == '%' else 'percent'}"

    def shortfall(self, epoch: int, metric: float) -> float:
        """Returns the points missing to the baseline at the same epoch less the margin; 0 when feasible."""
        if not self.reference:
            return 0.0
        baseline = self.reference[min(epoch, len(self.reference)) - 1]
        lost = baseline - metric if self.goal.maximize else metric - baseline
        return max(lost / self._point(baseline) - self.margin, 0.0)

    def _point(self, baseline: float) -> float:
        return 1.0 if self.goal.unit == "%" else max(abs(baseline) / 100.0, 1e-12)

    def is_hopeless(self, epoch: int, figures: Figures) -> bool:
        """Returns whether the metric misses what is feasible by more than the margin once more.

        Less than that may be the chance of one epoch.
        """
        return self.name != "pareto" and self.shortfall(epoch, figures.metric) > max(self.margin, _CHANCE)

    def value(self, epoch: int, figures: Figures) -> float:
        """Returns what the search maximises: the figure, positive; or minus the shortfall, which is below every figure.

        So infeasible configurations are ordered too, by how much they lack, and early epochs can be compared.
        """
        shortfall = self.shortfall(epoch, figures.metric)
        return -shortfall if shortfall > 0.0 else _VALUES[self.name](figures, self.goal)
