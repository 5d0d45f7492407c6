"""Report of a run: its epochs or batch sizes, its result, figures of the loop's decisions, and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping

from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import repeat_command
from triaccel_ray.service.report.batch_sizes import batch_grid, command_at, recommendation
from triaccel_ray.service.report.figures import run_figures
from triaccel_ray.service.report.provenance import about, all_settings, run_notes, troubles
from triaccel_ray.service.report.report import View, with_page
from triaccel_ray.service.report.tables import VIEWS_NOTE, Grid, joined, metric_headings, result_headings
from triaccel_ray.service.runs.methods import METHODS, TUNE_BATCH
from triaccel_ray.service.runs.record import ONE_VIEW, OWN_CODE, RunRecord

_TIME_NOTE = (
    "s/epoch: of a final run, the mean of the last five epochs; else the shortest under the last plan, on a CPU in "
    "processor time"
)


def view_run(run: RunRecord) -> View:
    """Returns the view of a run, its epochs and result, or its batch sizes; writes its figures and page."""
    spec, results = run.spec, run.end.results if run.end else {}
    facts = {"method": f"{spec.method}: {METHODS[spec.method]}", "status": run.status, "seed": str(spec.seed)}
    if spec.task == OWN_CODE:
        command = repeat = facts["seed"] = ""
    else:
        command = repeat = repeat_command("tune-batch" if spec.method == TUNE_BATCH else "run", run.folder)
    if spec.method == TUNE_BATCH:
        command, rows = command_at(run), batch_grid(run)
        second: Grid | str = "\n".join(filter(None, (recommendation(run), command)))
    else:
        rows = run_grid(run)
        second = result_grid(results, run.start.goal) if results else ""
    return with_page(
        View(
            folder=run.folder,
            title=f"{run.name}: {spec.task}",
            parts=[rows, second, run_notes(run), troubles({run.name: run}), *run_figures(run)],
            details=[about(spec, [run], facts, repeat), all_settings(spec)],
            rows=rows.as_dicts(),
            command=command,
            control=None if spec.method == TUNE_BATCH else spec.method_control,
        )
    )


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
