"""Report of a run: its epochs, its result, figures of the loop's decisions, and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import RUN_SETTINGS, repeat_command, settings_text
from triaccel_ray.service.report.batch_sizes import view_batch_sizes
from triaccel_ray.service.report.figures import run_figures
from triaccel_ray.service.report.provenance import TROUBLES, about, run_notes, trouble_lines, troubles
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import VIEWS_NOTE, Grid, joined, metric_headings, result_headings
from triaccel_ray.service.runs.methods import METHODS, TUNE_BATCH
from triaccel_ray.service.runs.record import ONE_VIEW, OWN_CODE, RunRecord

_TIME_NOTE = (
    "s/epoch: of a final run, the mean of the last five epochs; else the shortest under the last plan, on a CPU in "
    "processor time"
)


def view_run(run: RunRecord) -> View:
    """Returns the view of a run, its epochs and result, or its batch sizes; writes its figures and page."""
    if run.spec.method == TUNE_BATCH:
        return view_batch_sizes(run)
    epochs, results = run_grid(run), run.end.results if run.end else {}
    return View(
        folder=run.folder,
        shown=[
            epochs if epochs.rows else epochs.title,
            result_grid(results, run.start.goal) if results else "",
            "\n".join(run_notes(run)),
            trouble_lines(troubles({run.name: run})),
        ],
        rows=epochs.as_dicts(),
        page=write_run_page(run),
        command=_command(run),
        control=run.spec.method_control,
    )


def write_run_page(run: RunRecord) -> Path:
    """Draws the figures, writes the page into the run's folder and returns its path."""
    if run.spec.method == TUNE_BATCH:
        return view_batch_sizes(run).page
    spec, results = run.spec, run.end.results if run.end else {}
    is_own = spec.task == OWN_CODE  # of which only the control loop's settings are known
    facts = {"method": f"{spec.method}: {METHODS[spec.method]}", "status": run.status}
    facts |= {} if is_own else {"seed": str(spec.seed)}
    settings = settings_text(spec).splitlines(keepends=True)
    if is_own:
        settings = [line for line in settings if RUN_SETTINGS[line.split(" = ")[0]].path[0] == "control"]
    sections = (
        about(spec, [run], facts, _command(run)),
        Section(title="Result", table=result_grid(results, run.start.goal) if results else None),
        Section(title=TROUBLES, facts=troubles({run.name: run})),
        Section(title="What the loop did", text="\n".join(run_notes(run)), pictures=run_figures(run.folder)),
        Section(title="Epochs", table=run_grid(run)),
        Section(title="All settings", command="".join(settings), folded=True),
    )
    return write_page(run.folder, f"{run.name}: {spec.task}", sections)


def run_grid(run: RunRecord) -> Grid:
    """Returns the table of a run's epochs."""
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
    return Grid(
        header=header, rows=rows, title=f"{run.name}: {run.spec.task}, {METHODS[run.spec.method]}, {run.status}"
    )


def result_grid(results: Mapping[str, float], goal: Goal) -> Grid:
    """Returns the table of a run's final results."""
    headings = result_headings(results, goal)
    cells = [f"{results[name]:.4g}" if name in results else "" for name in headings]
    note = joined(_TIME_NOTE, VIEWS_NOTE if f"{ONE_VIEW}{goal.name}" in headings else "")
    return Grid(header=list(headings.values()), rows=[cells], title="result", note=note)


def _metric_cell(epoch: Epoch, name: str, goal: Goal) -> str:
    value = epoch.held_out(goal) if name == goal.name else epoch.held_out_metrics.get(name)
    if value is None:
        return ""
    return goal.cell(value) if name == goal.name else f"{value:.4g}"


def _command(run: RunRecord) -> str:
    """Returns the command that repeats the run; empty if a user's own code trained it."""
    return "" if run.spec.task == OWN_CODE else repeat_command("run", run.folder)
