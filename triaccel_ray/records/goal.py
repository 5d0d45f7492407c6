"""The figure on held-out samples that runs are compared by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOSS: Final = "loss"
RESERVED: Final = frozenset(
    {LOSS, "score", "seconds_per_epoch", "peak_gb", "allocated_peak_gb", "idle_gb", "limit_gb", "epochs"}
)
"""What results and MLflow have under these names already."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The figure on held-out samples that runs of a task are compared by."""

    name: str = "accuracy"
    maximize: bool = True
    unit: str = "%"
    """`%` for percent of the samples, in [0, 100]; empty for a plain number."""

    @property
    def words(self) -> str:
        """The name for people."""
        return self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """The name for a table's column."""
        return f"{self.words} {self.unit}".rstrip()

    @property
    def axis_unit(self) -> str:
        """The unit for an axis of a picture whose title names the figure, and that less is better where it is."""
        unit = "percent" if self.unit == "%" else self.unit
        return ", ".join(filter(None, (unit, "" if self.maximize else "less is better")))

    @property
    def axis(self) -> str:
        """The name for an axis of a picture, with the unit."""
        return ", ".join(filter(None, (self.words, self.axis_unit)))

    def cell(self, value: float) -> str:
        """Returns the value for a table."""
        return f"{value:.2f}" if self.unit == "%" else f"{value:.4g}"

    def text(self, value: float) -> str:
        """Returns the value with its unit, for a sentence."""
        return f"{self.cell(value)} {self.unit or self.words}"

    def named(self, value: float) -> str:
        """Returns the value behind its name."""
        return f"{self.words} {self.cell(value)} {self.unit}".rstrip()
