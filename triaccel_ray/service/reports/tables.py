"""Tables of results as plain text cells, the same for terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triaccel_ray.service.reports.notes import sharing_note
from triaccel_ray.service.runs.objective import Figures, Objective
from triaccel_ray.service.runs.record import ONE_VIEW, RunRecord
from triaccel_ray.service.searches.dimensions import Dimension, dimensions
from triaccel_ray.service.searches.search import SearchRecord, ranked

VIEWS_NOTE = "accuracy: by the mean output over the views of each sample; by one view: by the sample as it is"
FIGURE_COLUMNS = ("accuracy %", "s/epoch", "peak GB", "score")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Header and rows of a table, and a note below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    spare: Sequence[str] = ()
    """Columns that a narrow terminal goes without, in this order."""

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        lines = [f"| {' | '.join(self.header)} |", "|" + "---|" * len(self.header)]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join([*lines, "", self.note, ""] if self.note else [*lines, ""])


def search_grid(record: SearchRecord) -> Grid:
    """Returns baselines and trials with thresholds and figures: finished trials best first, then stopped ones."""
    objective = record.objective
    scales = dimensions(record.spec.optional)
    baselines = [(name.upper(), run) for name, run in record.baselines.items() if name != "probe"]
    trials = [(run.name, run) for _, run in ranked(record)]
    rows = [_search_row(label, run, objective, scales) for label, run in (*baselines, *trials)]
    num_empty = len(scales) + 1 + len(FIGURE_COLUMNS)
    rows += [[run.name, run.status, *[""] * num_empty] for run in record.trials if run.figures is None]
    rows += [[name, "damaged", *[""] * num_empty] for name in record.damaged]
    notes = ["figures are those of the epoch named beside them"]
    if objective.reference:
        floor = objective.reference[-1] - objective.margin
        notes.append(
            f"maximised: {objective.name}, among trials of at least {floor:.2f} % (AMP {objective.reference[-1]:.2f} % "
            f"less {objective.margin:g} points); * below AMP's accuracy at the same epoch less the margin"
        )
    if any(run.status == "stopped" for run in record.trials):
        notes.append("stopped: pruned before its last epoch, hence ranked after all that finished")
    names = tuple(scale.name for scale in scales)
    header = ("run", "status", *names, "at epoch", *FIGURE_COLUMNS)
    return Grid(
        header=header,
        rows=rows,
        note="; ".join(filter(None, (*notes, sharing_note(record.spec.base)))),
        spare=("peak GB", "status", *names[::-1]),
    )


def run_grid(run: RunRecord) -> Grid:
    """Returns one run's epochs."""
    rows = [
        [
            str(epoch.epoch),
            f"{epoch.train_loss:.4f}",
            "" if epoch.held_out_accuracy is None else f"{epoch.held_out_accuracy:.2f}",
            f"{epoch.seconds:.3f}",
            f"{epoch.images_per_second:,.0f}",
            str(epoch.batch_size),
            f"{epoch.peak_bytes / 1e9:.3f}",
            "" if epoch.num_skipped is None else str(epoch.num_skipped),
            "" if epoch.score is None else f"{epoch.score:.2f}",
        ]
        for epoch in run.epochs
    ]
    header = ("epoch", "train loss", "accuracy %", "seconds", "images/s", "batch", "peak GB", "skipped", "score")
    return Grid(header=header, rows=rows)


def result_grid(results: Mapping[str, float]) -> Grid:
    """Returns a run's final figures."""
    names = {
        "accuracy": "accuracy %",
        "seconds_per_epoch": "s/epoch",
        "peak_gb": "process peak GB",
        "allocated_peak_gb": "allocator peak GB",
        "score": "score",
    }
    note = ""
    if ONE_VIEW in results:
        names[ONE_VIEW], note = "by one view %", VIEWS_NOTE
    cells = [f"{results[name]:.4g}" if name in results else "" for name in names]
    return Grid(header=list(names.values()), rows=[cells], note=note)


def _search_row(label: str, run: RunRecord, objective: Objective, scales: Sequence[Dimension]) -> list[str]:
    control, epochs = run.spec.control, run.epochs
    searched = run.spec.method == "triaccel"
    thresholds = [scale.text(scale.value(control)) if searched else "" for scale in scales]
    num_epochs = epochs[-1].epoch if epochs else 0
    cells = [""] * 4
    if run.figures is not None:
        short = run.spec.method == "triaccel" and objective.shortfall(num_epochs, run.figures.accuracy) > 0
        cells = _figure_cells(run.figures, mark=" *" if short else "")
    return [label, run.status, *thresholds, f"{num_epochs} of {run.spec.recipe.epochs}", *cells]


def _figure_cells(figures: Figures, *, mark: str) -> list[str]:
    return [
        f"{figures.accuracy:.2f}{mark}",
        f"{figures.seconds:.3f}",
        f"{figures.peak_gb:.3f}",
        f"{figures.score:.2f}",
    ]
