"""Report of `triaccel tune-batch`: the speed of each batch size, the efficient one, and the command that uses it."""

from __future__ import annotations

from collections import Counter

from triaccel_ray.decide.throughput import EFFICIENT_SHARE
from triaccel_ray.records.events import Throughput
from triaccel_ray.service.cli.options import repeat_command
from triaccel_ray.service.report.tables import STAR, Grid, joined
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.units import counted


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


def command_at(run: RunRecord) -> str:
    """Returns the command that trains at the efficient batch size with the run's other settings; empty without one."""
    size = _efficient(run)
    if size is None or run.end is None:
        return ""
    lr = run.end.results["lr"]
    return f"{repeat_command('run', run.folder)} --batch-size {size} --lr {lr:.4g} --adapt-batch off"
