"""Report of a run: its epochs or batch sizes, its result, figures of the loop's decisions, and the HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from triaccel_ray.decide.throughput import EFFICIENT_SHARE
from triaccel_ray.records.events import Epoch, Throughput
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import command_for
from triaccel_ray.service.report.figures import run_figures
from triaccel_ray.service.report.provenance import about, run_notes, troubles
from triaccel_ray.service.report.report import View, with_page
from triaccel_ray.service.report.tables import (
    STAR,
    VIEWS_NOTE,
    TextTable,
    joined,
    lines,
    metric_headings,
    result_headings,
)
from triaccel_ray.service.runs.record import ONE_VIEW, OWN_CODE, RunRecord
from triaccel_ray.service.runs.spec import METHODS, TUNE_BATCH
from triaccel_ray.service.units import counted


def batch_table(run: RunRecord) -> TextTable:
    """Returns the table of batch sizes, in ascending order; a star marks the efficient one."""
    best = max((1e3 / ms for ms in run.ms_per_sample.values()), default=0.0)
    rows = []
    for each in sorted(run.throughputs, key=lambda each: each.batch_size):
        cells = [str(each.batch_size) + (STAR if each.batch_size == run.efficient_batch_size else ""), "", "", ""]
        if each.step_ms is not None and each.ms_per_sample is not None:
            rate = 1e3 / each.ms_per_sample
            cells[1:] = f"{each.step_ms:.3f}", f"{rate:,.0f}", f"{100 * rate / best:.1f}"
        how = "does not fit" if each.step_ms is None else _plan_text(each)
        rows.append([*cells, f"{each.peak_bytes / 1e9:.3f}", how])
    largest, asked = run.start.control.batch.maximum, run.spec.control.batch.maximum
    is_rising = run.efficient_batch_size is not None and run.efficient_batch_size == max(run.ms_per_sample)
    unfit = any(each.step_ms is None for each in run.throughputs)
    return TextTable(
        header=("batch", "ms a step", "samples/s", "% of the best", "process peak GB", "how"),
        rows=rows,
        title=f"{run.name}: {run.spec.task}, {run.spec.control.precision.initial.value}, {run.status}",
        note=lines(
            f"*: the smallest with {EFFICIENT_SHARE:.0%} of the best samples/s" if run.efficient_batch_size else "",
            "sizes above the one that does not fit were not tried" if unfit else "",
            f"sizes above {largest} were not tried: there are {largest} training samples" if largest < asked else "",
            "no smaller size is efficient, so try a larger --batch-max" if is_rising and not unfit else "",
        ),
    )


def recommendation(run: RunRecord) -> tuple[str, str]:
    """Returns a sentence with the efficient batch size and its learning rate, and a command to train at that size.

    The command has the run's other settings. Both are empty if no size was found.
    """
    size = run.efficient_batch_size
    if size is None or run.end is None:
        return "", ""
    batch, lr = run.spec.control.batch, f"{run.end.results['lr']:.4g}"
    rule = f"lr_rule {batch.lr_rule}, from {run.spec.recipe.lr:.4g} at batch {batch.start}"
    command = f"{command_for('run --from', run.folder)} --batch-size {size} --lr {lr} --adapt-batch off"
    return f"A batch of {size} is efficient. Its learning rate is {lr} ({rule}). To train with it:", command


def _plan_text(throughput: Throughput) -> str:
    """Returns what the plan does to fit the batch; empty if it does nothing."""
    parts = throughput.num_micro_batches
    counts = Counter("recompute in part" if each.is_selective else each.value for each in throughput.storage.values())
    regions = (f"{counted(count, 'region')} to {name}" for name, count in counts.items())
    return joined(f"{parts} micro-batches" if parts > 1 else "", *regions)


_TIME_NOTE = (
    "s/epoch: of a final run, the mean of the last five epochs; else the shortest under the last plan, on a CPU in "
    "processor time"
)


def view_run(run: RunRecord) -> View:
    """Returns the view of a run, its epochs and result, or its batch sizes; writes its figures and page."""
    spec, results, is_tuning = run.spec, run.end.results if run.end else {}, run.spec.method == TUNE_BATCH
    repeat = command_for("tune-batch --from" if is_tuning else "run --from", run.folder)
    command = repeat = "" if spec.task == OWN_CODE else repeat
    if is_tuning:
        (sentence, command), rows = recommendation(run), batch_table(run)
        second: TextTable | str = lines(sentence, command)
    else:
        rows = run_table(run)
        second = result_table(results, run.start.goal) if results else ""
    return with_page(
        View(
            folder=run.folder,
            title=f"{run.name}: {spec.task}",
            parts=[rows, second, lines(*run_notes(run)), troubles({run.name: run}), *run_figures(run)],
            details=[about(spec, [run], {}, repeat)],
            rows=rows.as_dicts(),
            command=command,
            control=None if is_tuning else spec.method_control,
        )
    )


def run_table(run: RunRecord) -> TextTable:
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
    return TextTable(
        header=header, rows=rows, title=f"{run.name}: {run.spec.task}, {METHODS[run.spec.method]}, {run.status}"
    )


def result_table(results: Mapping[str, float], goal: Goal) -> TextTable:
    """Returns the table of a run's final results."""
    headings = result_headings(results, goal)
    cells = [f"{results[name]:.4g}" if name in results else "" for name in headings]
    note = lines(_TIME_NOTE, VIEWS_NOTE if f"{ONE_VIEW}{goal.name}" in headings else "")
    return TextTable(header=list(headings.values()), rows=[cells], title="result", note=note)


def _metric_cell(epoch: Epoch, name: str, goal: Goal) -> str:
    value = epoch.held_out(goal) if name == goal.name else epoch.held_out_metrics.get(name)
    if value is None:
        return ""
    return goal.cell(value) if name == goal.name else f"{value:.4g}"
