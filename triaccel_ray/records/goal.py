"""The metric on held-out samples by which runs are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOSS: Final = "loss"
RESERVED: Final = frozenset(
    {
        LOSS,
        "score",
        "seconds_per_epoch",
        "peak_gb",
        "allocated_peak_gb",
        "idle_gb",
        "limit_gb",
        "epochs",
        "training_seconds",
        "joules",
        "seconds_to_target",
        "joules_to_target",
    }
)
"""Names that results and MLflow already use for other values."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The metric on held-out samples by which runs of a task are compared."""

    name: str = "accuracy"
    maximize: bool = True
    unit: str = "%"
    """`%` for percent of the samples, in [0, 100]; empty for a plain number."""

    @property
    def words(self) -> str:
        """The name in plain words."""
        return self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """The heading of a table column: name and unit."""
        return f"{self.words} {self.unit}".rstrip()

    @property
    def axis_unit(self) -> str:
        """Axis label for a plot whose title names the metric: the unit, and whether less is better."""
        unit = "percent" if self.unit == "%" else self.unit
        return ", ".join(filter(None, (unit, "" if self.maximize else "less is better")))

    @property
    def axis(self) -> str:
        """Axis label for a plot: the name, the unit, and whether less is better."""
        return ", ".join(filter(None, (self.words, self.axis_unit)))

    def is_reached(self, value: float, target: float) -> bool:
        """Returns whether the value is the target or better; NaN never is."""
        return value >= target if self.maximize else value <= target

    def cell(self, value: float) -> str:
        """Returns the value as text for a table cell."""
        return f"{value:.2f}" if self.unit == "%" else f"{value:.4g}"

    def text(self, value: float) -> str:
        """Returns the value with its unit, as text for a sentence."""
        return f"{self.cell(value)} {self.unit or self.words}"

    def named(self, value: float) -> str:
        """Returns the name followed by the value and its unit."""
        return f"{self.words} {self.cell(value)} {self.unit}".rstrip()
