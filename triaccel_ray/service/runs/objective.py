"""What a search maximises: one of the figures, among configurations that learn as well as the AMP baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from triaccel_ray.config import require, require_number
from triaccel_ray.events import Epoch


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of a configuration after an epoch."""

    accuracy: float
    """Percent of the validation samples."""
    seconds: float
    """Per epoch, mean of the last five."""
    peak_gb: float
    """Process peak on the device, 10^9 bytes."""
    score: float


_VALUES: Final[Mapping[str, Callable[[Figures], float]]] = {
    "score": lambda figures: figures.score,
    "accuracy": lambda figures: figures.accuracy,
    "time": lambda figures: 1.0 / figures.seconds,
    "memory": lambda figures: 1.0 / figures.peak_gb,
}

_CHANCE: Final = 1.0
"""Percentage points by which accuracies of a few hundred samples differ from epoch to epoch."""

OBJECTIVES: Final = (*_VALUES, "pareto")
"""Names on the command line."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A figure to maximise under the condition that accuracy is within `margin` of the AMP baseline's.

    Without the condition the score could be won by a fast model that learned nothing.
    """

    name: str = "score"
    """One of OBJECTIVES; with `pareto` trials are drawn for accuracy, time and memory at once, whatever the margin, and
    ranked by the score under it."""
    margin: float = 1.0
    """Percentage points of validation accuracy that may be given up; >= 0."""
    reference: tuple[float, ...] = ()
    """Validation accuracy of the AMP baseline after each epoch, in percent; empty: no condition."""

    def __post_init__(self) -> None:
        require(self.name in OBJECTIVES, "objective", self.name, f"must be one of {', '.join(OBJECTIVES)}")
        require_number("margin", self.margin, "must lie in [0, 100] percentage points", low=0.0, high=100.0)

    @classmethod
    def against(cls, amp: Sequence[Epoch], *, name: str = "score", margin: float = 1.0) -> Self:
        """Returns the objective whose condition are the epochs of the AMP baseline.

        Raises:
            ValueError: one of them was not judged on validation samples.
        """
        accuracies = [epoch.held_out_accuracy for epoch in amp]
        for epoch, accuracy in zip(amp, accuracies, strict=True):
            rule = "was not judged on validation samples, so nothing can be measured by it; run the baseline again"
            require(accuracy is not None, "epoch of the AMP baseline", epoch.epoch, rule)
        return cls(name=name, margin=margin, reference=tuple(each for each in accuracies if each is not None))

    def shortfall(self, epoch: int, accuracy: float) -> float:
        """Returns the percentage points missing to the baseline at the same epoch less the margin; 0 when feasible."""
        if not self.reference:
            return 0.0
        baseline = self.reference[min(epoch, len(self.reference)) - 1]
        return max(baseline - self.margin - accuracy, 0.0)

    def is_hopeless(self, epoch: int, figures: Figures) -> bool:
        """Returns whether the accuracy lies below what is feasible by more than the margin once more.

        Less than that may be the chance of one epoch.
        """
        return self.name != "pareto" and self.shortfall(epoch, figures.accuracy) > max(self.margin, _CHANCE)

    def value(self, epoch: int, figures: Figures) -> float:
        """Returns what the search maximises: the figure, positive; or minus the shortfall, which is below every figure.

        So infeasible configurations are ordered too, by how much they lack, and early epochs can be compared.
        """
        shortfall = self.shortfall(epoch, figures.accuracy)
        if shortfall > 0.0:
            return -shortfall
        return _VALUES["score" if self.name == "pareto" else self.name](figures)
