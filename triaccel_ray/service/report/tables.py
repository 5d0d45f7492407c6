"""Tables of results as plain text cells, the same for terminal, Markdown and HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import RESERVED, Goal
from triaccel_ray.service.report.notes import sharing_note
from triaccel_ray.service.runs.objective import Figures, Objective
from triaccel_ray.service.runs.record import ONE_VIEW, RunRecord
from triaccel_ray.service.search.dimensions import Dimension, dimensions
from triaccel_ray.service.search.search import SearchRecord, ranked

VIEWS_NOTE = "metrics: by the mean output over the views of each sample; by one view: by the sample as it is"
STAR = " *"
"""Marks the metric of a trial behind AMP by more than the margin."""
_NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d+)?(e[+-]?\d+)?|inf)")
FIGURE_COLUMNS = ("s/epoch", "peak GB", "score")
"""After the metric that the task is judged by."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Header and rows of a table, a title above it and a note below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    """For a terminal; a page and Markdown have headings of their own."""
    note: str = ""
    spare: Sequence[str] = ()
    """Columns that a narrow terminal goes without, in this order."""

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        lines = [f"| {' | '.join(self.header)} |", "|" + "---|" * len(self.header)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the rows by heading, numbers as such and empty cells as None.

        A mean with its standard deviation is two numbers, the second headed `±`; a star is left out.
        """
        return [_by_heading(zip(self.header, row, strict=True)) for row in self.rows]


def _by_heading(cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for heading, cell in cells:
        figure, is_mean, deviation = cell.removesuffix(STAR).partition(" ± ")
        row[heading] = _value(figure)
        if is_mean:
            row[f"{heading} ±"] = _value(deviation)
    return row


def _value(cell: str) -> str | int | float | None:
    if _NUMBER.fullmatch(cell) is None:
        return cell or None
    return int(text) if (text := cell.replace(",", "")).lstrip("+-").isdecimal() else float(text)


def metric_headings(names: Iterable[str], goal: Goal) -> dict[str, str]:
    """Returns column headings by name: of the goal, then of the other metrics among these names of results."""
    others = [name for name in names if name not in RESERVED and not name.startswith(ONE_VIEW)]
    return {goal.name: goal.heading, **{name: name.replace("_", " ") for name in others if name != goal.name}}


def search_grid(record: SearchRecord) -> Grid:
    """Returns baselines and trials with thresholds and figures: finished trials best first, then stopped ones."""
    objective = record.objective
    scales = dimensions(record.spec.optional)
    baselines = [(name.upper(), run) for name, run in record.baselines.items() if name != "probe"]
    trials = [(run.name, run) for _, run in ranked(record)]
    rows = [_search_row(label, run, objective, scales) for label, run in (*baselines, *trials)]
    num_empty = len(scales) + 2 + len(FIGURE_COLUMNS)
    rows += [[run.name, run.status, *[""] * num_empty] for run in record.trials if run.figures is None]
    rows += [[name, "damaged", *[""] * num_empty] for name in record.damaged]
    notes = ["figures are those of the epoch named beside them"]
    if objective.reference:
        amp = objective.goal.text(objective.reference[-1])
        notes.append(
            f"best: {objective.name}, among trials of {objective.limit_text} (AMP {amp}, margin "
            f"{objective.margin_text}); * behind AMP at the same epoch by more than the margin"
        )
    if any(run.status == "stopped" for run in record.trials):
        notes.append("stopped: pruned before its last epoch, hence ranked after all that finished")
    names = tuple(scale.name for scale in scales)
    header = ("run", "status", *names, "at epoch", objective.goal.heading, *FIGURE_COLUMNS)
    return Grid(
        header=header,
        rows=rows,
        note="; ".join(filter(None, (*notes, sharing_note(record.spec.base)))),
        spare=("peak GB", "status", *names[::-1]),
    )


def run_grid(run: RunRecord) -> Grid:
    """Returns one run's epochs."""
    goal = run.start.goal
    headings = metric_headings((name for epoch in run.epochs for name in epoch.held_out_metrics), goal)
    rows = [
        [
            str(epoch.epoch),
            f"{epoch.train_loss:.4f}",
            *(_metric_cell(epoch, name, goal) for name in headings),
            f"{epoch.seconds:.3f}",
            f"{epoch.images_per_second:,.0f}",
            str(epoch.batch_size),
            f"{epoch.peak_bytes / 1e9:.3f}",
            "" if epoch.num_skipped is None else str(epoch.num_skipped),
            "" if epoch.score is None else f"{epoch.score:.2f}",
        ]
        for epoch in run.epochs
    ]
    header = ("epoch", "train loss", *headings.values(), "seconds", "samples/s", "batch", "peak GB", "skipped", "score")
    return Grid(header=header, rows=rows)


def _metric_cell(epoch: Epoch, name: str, goal: Goal) -> str:
    if name == goal.name:
        value = epoch.held_out(goal)
        return "" if value is None else goal.cell(value)
    return f"{epoch.held_out_metrics[name]:.4g}" if name in epoch.held_out_metrics else ""


def result_grid(results: Mapping[str, float], goal: Goal) -> Grid:
    """Returns a run's final figures."""
    names = {
        **metric_headings(results, goal),
        "seconds_per_epoch": "s/epoch",
        "peak_gb": "process peak GB",
        "allocated_peak_gb": "allocator peak GB",
        "score": "score",
    }
    note, one_view = "", f"{ONE_VIEW}{goal.name}"
    if one_view in results:
        names[one_view], note = f"by one view {goal.unit}".rstrip(), VIEWS_NOTE
    cells = [f"{results[name]:.4g}" if name in results else "" for name in names]
    return Grid(header=list(names.values()), rows=[cells], note=note)


def _search_row(label: str, run: RunRecord, objective: Objective, scales: Sequence[Dimension]) -> list[str]:
    control, epochs = run.spec.control, run.epochs
    searched = run.spec.method == "triaccel"
    thresholds = [scale.text(scale.value(control)) if searched else "" for scale in scales]
    num_epochs = epochs[-1].epoch if epochs else 0
    cells = [""] * (1 + len(FIGURE_COLUMNS))
    if run.figures is not None:
        short = run.spec.method == "triaccel" and objective.shortfall(num_epochs, run.figures.metric) > 0
        cells = figure_cells(run.figures, objective.goal, mark=STAR if short else "")
    return [label, run.status, *thresholds, f"{num_epochs} of {run.spec.recipe.epochs}", *cells]


def figure_cells(figures: Figures, goal: Goal, *, mark: str = "") -> list[str]:
    """Returns the cells of the goal's column and FIGURE_COLUMNS."""
    return [
        f"{goal.cell(figures.metric)}{mark}",
        f"{figures.seconds:.3f}",
        f"{figures.peak_gb:.3f}",
        f"{figures.score:.2f}",
    ]
