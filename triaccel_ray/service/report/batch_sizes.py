"""Report of `triaccel tune-batch`: the speed of each batch size, the efficient one, and the command that uses it."""

from __future__ import annotations

from collections import Counter

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator

from triaccel_ray.decide.throughput import EFFICIENT_SHARE
from triaccel_ray.records.events import Throughput
from triaccel_ray.service.cli.options import repeat_command
from triaccel_ray.service.report import drawing
from triaccel_ray.service.report.drawing import GRAY, NAVY, ORANGE, PLAIN, panel, save
from triaccel_ray.service.report.provenance import TROUBLES, about, run_notes, trouble_lines, troubles
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import STAR, Grid, joined
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import FIGURES
from triaccel_ray.service.units import counted


def view_batch_sizes(run: RunRecord) -> View:
    """Returns the view of the batch sizes that a run timed; draws the curve and writes the page."""
    grid, command = batch_grid(run), _command(run)
    sentence, notes, found = recommendation(run), "\n".join(run_notes(run)), troubles({run.name: run})
    pictures = [save(batch_curve(run), run.folder / FIGURES / "batch_sizes.png")] if _timed(run) else []
    facts = {"status": run.status, "seed": str(run.spec.seed)}
    sections = (
        about(run.spec, [run], facts, repeat_command("tune-batch", run.folder)),
        Section(title="Efficient batch size", text=sentence, command=command),
        Section(title="Speed of each batch size", text=notes, table=grid, pictures=pictures),
        Section(title=TROUBLES, facts=found),
    )
    return View(
        folder=run.folder,
        shown=[grid, notes, trouble_lines(found), "\n".join(filter(None, (sentence, command)))],
        rows=grid.as_dicts(),
        page=write_page(run.folder, f"{run.name}: batch sizes of {run.spec.task}", sections),
        command=command,
    )


def batch_grid(run: RunRecord) -> Grid:
    """Returns the table of batch sizes, in ascending order; a star marks the efficient one."""
    best = max((1e3 / ms for ms in _timed(run).values()), default=0.0)
    rows = []
    for each in sorted(run.throughputs, key=lambda each: each.batch_size):
        cells = [str(each.batch_size) + (STAR if each.batch_size == _efficient(run) else ""), "", "", ""]
        if each.step_ms is not None and each.ms_per_sample is not None:
            rate = 1e3 / each.ms_per_sample
            cells[1:] = f"{each.step_ms:.3f}", f"{rate:,.0f}", f"{100 * rate / best:.1f}"
        how = "does not fit" if each.step_ms is None else _plan_text(each)
        rows.append([*cells, f"{each.peak_bytes / 1e9:.3f}", how])
    most, asked = run.start.control.batch.maximum, run.spec.control.batch.maximum
    is_rising = _efficient(run) is not None and _efficient(run) == max(_timed(run))
    unfit = any(each.step_ms is None for each in run.throughputs)
    return Grid(
        header=("batch", "ms a step", "samples/s", "% of the best", "process peak GB", "how"),
        rows=rows,
        title=f"{run.name}: {run.spec.task}, {run.spec.control.precision.initial.value}, {run.status}",
        note=joined(
            f"*: the smallest with {EFFICIENT_SHARE:.0%} of the best samples/s" if _efficient(run) else "",
            "sizes above the one that does not fit were not tried" if unfit else "",
            f"sizes above {most} were not tried: there are {most} training samples" if most < asked else "",
            "no smaller size is efficient, so try a larger --batch-max" if is_rising and not unfit else "",
        ),
    )


def recommendation(run: RunRecord) -> str:
    """Returns a sentence with the efficient batch size, its plan and its learning rate; empty if none was found."""
    size = _efficient(run)
    if size is None or run.end is None:
        return ""
    batch, results = run.spec.control.batch, run.end.results
    plan = next(_plan_text(each) for each in run.throughputs if each.batch_size == size)
    share = results["samples_per_second"] / results["best_samples_per_second"]
    return (
        f"A batch of {size} is efficient: {share:.1%} of the best samples/s{f', in {plan}' if plan else ''}. "
        f"Its learning rate is {results['lr']:.4g} (lr_rule {batch.lr_rule}, from {run.spec.recipe.lr:.4g} at batch "
        f"{batch.start}). To train with it:"
    )


def batch_curve(run: RunRecord) -> Figure:
    """Returns samples per second over batch size, with the efficient size and the share of the best that it needs."""
    timed, efficient = _timed(run), _efficient(run)
    rates = {size: 1e3 / timed[size] for size in sorted(timed)}
    figure = drawing.new_figure(8.0, 4.6)
    axes = figure.subplots()
    panel(axes, "Speed of each batch size", run.spec.task, x_label="batch size", y_label="samples per second")
    axes.plot(list(rates), list(rates.values()), color=NAVY, marker="o", markersize=5.0, linewidth=1.8)
    if efficient is not None:
        level = EFFICIENT_SHARE * max(rates.values())
        axes.axhline(level, color=GRAY, linewidth=1.1, linestyle=drawing.DASHED)
        drawing.mark_level(axes, level, f"{EFFICIENT_SHARE:.0%}")
        axes.plot([efficient], [rates[efficient]], color=ORANGE, marker="o", markersize=10.0, linestyle="none")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rates), [str(size) for size in rates], rotation=45 if len(rates) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylim(bottom=0.0)
    return figure


def _timed(run: RunRecord) -> dict[int, float]:
    """Returns batch size -> milliseconds per sample of those that fit."""
    return {each.batch_size: ms for each in run.throughputs if (ms := each.ms_per_sample) is not None}


def _efficient(run: RunRecord) -> int | None:
    """Returns the efficient batch size; None if the run did not find it."""
    size = run.end.results.get("batch_size") if run.end else None
    return None if size is None else int(size)


def _plan_text(throughput: Throughput) -> str:
    """Returns what the plan does to fit the batch; empty if it does nothing."""
    parts = throughput.num_micro_batches
    counts = Counter(storage.value for storage in throughput.storage.values())
    regions = (f"{counted(count, 'region')} to {name}" for name, count in counts.items())
    return joined(f"{parts} micro-batches" if parts > 1 else "", *regions)


def _command(run: RunRecord) -> str:
    """Returns the command that trains at the efficient batch size with the run's other settings; empty without one."""
    size = _efficient(run)
    if size is None or run.end is None:
        return ""
    lr = run.end.results["lr"]
    return f"{repeat_command('run', run.folder)} --batch-size {size} --lr {lr:.4g} --adapt-batch off"
