"""Tables of results with cells of plain text, shared by terminal and HTML page."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triaccel_ray.records.goal import RESERVED, Goal
from triaccel_ray.service.runs.record import JOULES, ONE_VIEW

VIEWS_NOTE = "metrics: by the mean output over the views of each sample; by one view: by the sample as it is"
RESULT_HEADINGS: Mapping[str, str] = {
    "seconds_per_epoch": "s/epoch",
    "peak_gb": "process peak GB",
    "allocated_peak_gb": "allocator peak GB",
    "score": "score",
}
"""Result -> column heading; these columns follow those of the task's metrics."""
COST_HEADINGS: Mapping[str, str] = {"training_seconds": "whole run s", JOULES: "whole run J"}
"""Result -> column heading, for what the whole training takes; only where measured."""
TO_TARGET: Mapping[str, str] = {"seconds_to_target": "s to target", "joules_to_target": "J to target"}
"""Result -> column heading, for what training takes until it reaches a target; only where one is given."""
STAR = " *"
"""Suffix that marks the metric of a trial behind AMP by more than the margin, and the name of a chosen trial."""
_NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d+)?(e[+-]?\d+)?|inf)")


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Header and rows of a table, a title above it and a note below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    droppable: Sequence[str] = ()
    """Columns that a narrow terminal drops, the first one first."""

    def has_numbers(self, index: int) -> bool:
        """Returns whether all cells of a column that are not empty are numbers, and there are some."""
        found = [value for row in self.rows for _, value in _values((row[index],), ("",)) if value is not None]
        return bool(found) and not any(isinstance(value, str) for value in found)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows as dictionaries by heading, with numbers parsed and empty cells as None.

        A mean with its standard deviation gives two entries, the second with ` ±` after its heading. Stars are dropped.
        """
        return [dict(_values(row, self.header)) for row in self.rows]


def _values(row: Sequence[str], header: Sequence[str]) -> Iterator[tuple[str, str | int | float | None]]:
    for heading, cell in zip(header, row, strict=True):
        figure, is_mean, deviation = cell.removesuffix(STAR).partition(" ± ")
        yield heading, _value(figure)
        if is_mean:
            yield f"{heading} ±", _value(deviation)


def _value(cell: str) -> str | int | float | None:
    if _NUMBER.fullmatch(cell) is None:
        return cell or None
    text = cell.replace(",", "")
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def joined(*texts: str) -> str:
    """Returns the texts joined by semicolons, without empty ones."""
    return "; ".join(filter(None, texts))


def lines(*texts: str) -> str:
    """Returns the texts on a line each, without empty ones."""
    return "\n".join(filter(None, texts))


def metric_headings(names: Iterable[str], goal: Goal) -> dict[str, str]:
    """Returns column headings by name: the goal's, then those of the other metrics among the result names `names`."""
    others = [name for name in names if name not in RESERVED and not name.startswith(ONE_VIEW)]
    return {goal.name: goal.heading, **{name: name.replace("_", " ") for name in others if name != goal.name}}


def result_headings(names: Collection[str], goal: Goal, *, prefix: str = "") -> dict[str, str]:
    """Returns column headings by name: metrics with `prefix` in front, RESULT_HEADINGS, those of `names` alone."""
    metrics = {name: f"{prefix}{text}" for name, text in metric_headings(names, goal).items()}
    one_view = f"{ONE_VIEW}{goal.name}"
    views = {one_view: f"by one view {goal.unit}".rstrip()} if one_view in names else {}
    optional = {name: text for name, text in {**COST_HEADINGS, **TO_TARGET}.items() if name in names}
    return {**metrics, **RESULT_HEADINGS, **views, **optional}
