"""One picture that tells a run: what it learned, what the loop changed, what memory and time that took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from triaccel_ray.config import BatchConfig
from triaccel_ray.measure.score import BYTES_PER_GB
from triaccel_ray.records.events import Epoch, Tick
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import FaultKind, Plan, Precision
from triaccel_ray.service.report.figure_style import (
    BLUE,
    DASHED,
    GREY,
    INK,
    LOG_FROM,
    NAVY,
    ORANGE,
    PRECISION_COLOURS,
    RED,
    legend,
    mark_level,
    new_figure,
    panel,
    say,
)

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

_ABOVE: Final[dict[str, Any]] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
"""Where legends stand: above the axes, beside the title, never on data."""


def overview(
    epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig, goal: Goal, *, about: str = ""
) -> Figure:
    """Returns eight panels: loss, metric, precisions, batch size, memory, samples per second, and time twice.

    All but the last run over epochs; that one shows the metric over seconds of training. A baseline has no ticks: its
    batch size and peak come from its epochs.
    """
    figure = new_figure(11.0, 10.0)
    grid = figure.subplots(4, 2)
    for axes in grid.flat[1:7]:
        axes.sharex(grid[0, 0])
    _draw_loss(grid[0, 0], epochs, about)
    numbers = [float(epoch.epoch) for epoch in epochs]
    x_label = "epoch"
    _draw_metric(grid[0, 1], epochs, numbers, goal, x_label)
    _draw_precisions(grid[1, 0], epochs, ticks)
    _draw_batch(grid[1, 1], epochs, ticks, batch)
    _draw_memory(grid[2, 0], epochs, ticks, batch)
    _draw_by_epoch(grid[2, 1], epochs, [epoch.images_per_second for epoch in epochs], "Speed", "samples per second")
    _draw_seconds(grid[3, 0], epochs, ticks)
    elapsed = np.cumsum([epoch.seconds for epoch in epochs]).tolist()
    _draw_metric(grid[3, 1], epochs, elapsed, goal, "seconds of training")
    for axes in grid.flat[:7]:
        axes.set_xlabel(x_label, fontsize=9.5, color=GREY)
    grid[0, 0].set_xlim(0.0, epochs[-1].epoch)
    grid[0, 0].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


def step_edges(ticks: Sequence[Tick]) -> Floats:
    """Returns the borders of the intervals that the ticks end, one more than ticks; each at least one step wide."""
    return _edges([tick.observation.step for tick in ticks], 1.0)


def _edges(ends: Sequence[float], narrowest: float) -> Floats:
    first = 2 * ends[0] - ends[1] if len(ends) > 1 else 0.0
    edges = np.array([min(max(first, 0.0), ends[0] - narrowest), *ends], dtype=np.float64)
    return np.maximum.accumulate(edges)


def _epoch_edges(ticks: Sequence[Tick]) -> Floats:
    return _edges([tick.observation.epoch for tick in ticks], 0.0)


def _plans(ticks: Sequence[Tick]) -> list[Plan]:
    """Returns the plan of the interval that each tick ends, then the plan in force after the last tick."""
    return [*(tick.observation.plan for tick in ticks), *(tick.applied.plan for tick in ticks[-1:])]


def _plan_edges(ticks: Sequence[Tick], epochs: Sequence[Epoch]) -> Floats:
    edges = _epoch_edges(ticks)
    return np.array([*edges, max(edges[-1], float(epochs[-1].epoch))])


def _draw_loss(axes: Axes, epochs: Sequence[Epoch], about: str) -> None:
    panel(axes, "Loss", about, y_label="mean over the samples")
    numbers = [epoch.epoch for epoch in epochs]
    training = [epoch.train_loss for epoch in epochs]
    axes.plot(numbers, training, color=GREY, linewidth=2.0, label="training", **_marker(epochs))
    seen = [(epoch.epoch, epoch.held_out_loss) for epoch in epochs if epoch.held_out_loss is not None]
    if seen:
        axes.plot(*zip(*seen, strict=True), color=NAVY, linewidth=2.0, label="validation", **_marker(epochs))
    losses = [*training, *(loss for _, loss in seen)]
    if min(losses) > 0.0 and max(losses) > LOG_FROM * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    legend(axes, loc="upper right")  # losses fall


def _draw_metric(axes: Axes, epochs: Sequence[Epoch], at: Sequence[float], goal: Goal, x_label: str) -> None:
    is_over_epochs = x_label == "epoch"
    title = f"Validation {goal.words}" + ("" if is_over_epochs else " over time")
    panel(axes, title, " " if is_over_epochs else "", x_label=x_label, y_label=goal.axis_unit)
    seen = [
        (place, value) for place, epoch in zip(at, epochs, strict=True) if (value := epoch.held_out(goal)) is not None
    ]
    if not seen:
        say(axes, "not looked at before the end of the run")
        return
    axes.plot(*zip(*seen, strict=True), color=NAVY, linewidth=2.0, **_marker(epochs))
    mark_level(axes, seen[-1][1], f"{seen[-1][1]:.1f}" if goal.unit == "%" else goal.cell(seen[-1][1]), NAVY)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if not is_over_epochs:
        axes.set_xlim(left=0.0)


def _draw_precisions(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick]) -> None:
    panel(axes, "Precision", y_label="percent of the layers")
    if not ticks:
        say(axes, "the same from the first step to the last")
        return
    plans = [list(plan.precision.values()) for plan in _plans(ticks)]
    edges, below = _plan_edges(ticks, epochs), np.zeros(len(plans))
    for level in reversed(Precision):
        shares = np.array([100.0 * plan.count(level) / len(plan) for plan in plans])
        axes.stairs(below + shares, edges, baseline=below, fill=True, color=PRECISION_COLOURS[level], label=level.name)
        below = below + shares
    axes.set_ylim(0.0, 100.0)
    axes.set_axisbelow(False)
    legend(axes, ncols=3, columnspacing=1.4, handlelength=1.2, **_ABOVE)


def _draw_batch(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig) -> None:
    """Draws the batch size; beside it what is computed at once where that is less."""
    panel(axes, "Batch size", y_label="samples a step")
    sizes = [plan.batch_size for plan in _plans(ticks)] or [epoch.batch_size for epoch in epochs]
    edges = _plan_edges(ticks, epochs) if ticks else _whole(epochs)
    axes.stairs(sizes, edges, color=BLUE, linewidth=2.0, baseline=None)
    at_once = [plan.micro_batch_size for plan in _plans(ticks)] or sizes
    if at_once != sizes:
        parts: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "linestyle": ":", "label": "at once on the device"}
        axes.stairs(at_once, edges, baseline=None, **parts)
    _mark_faults(axes, ticks)
    highest = max([*sizes, *(fault.batch_size for tick in ticks for fault in tick.observation.faults)])
    axes.set_ylim(0, 1.12 * highest)
    axes.yaxis.set_major_locator(MultipleLocator(batch.granularity * -(-highest // (5 * batch.granularity))))
    mark_level(axes, sizes[-1], f"{sizes[-1]}", BLUE)


def _draw_memory(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig) -> None:
    """Draws the memory that the batch follows, with its limit and the band in which the loop keeps it."""
    panel(axes, "Memory of the process on the device", y_label="GB")
    if not ticks:
        _draw_peaks(axes, [epoch.peak_bytes / BYTES_PER_GB for epoch in epochs], _whole(epochs))
        axes.margins(y=0.15)
        return
    memory = [tick.observation.memory for tick in ticks]
    edges = _epoch_edges(ticks)
    peaks = np.array([signal.window_peak_bytes for signal in memory]) / BYTES_PER_GB
    limits = np.array([signal.attainable_bytes for signal in memory]) / BYTES_PER_GB
    idle = np.array([signal.idle_bytes for signal in memory]) / BYTES_PER_GB
    _draw_peaks(axes, peaks, edges)
    # Shares count from what the idle process holds: no batch size changes that.
    for share, colour in ((1.0, INK), (batch.rho_high, RED), (batch.rho_low, ORANGE), (0.0, GREY)):
        style: Any = "-" if share == 1.0 else DASHED
        axes.stairs(idle + share * (limits - idle), edges, baseline=None, color=colour, linewidth=1.2, linestyle=style)
    for share, text, colour in _memory_labels(batch, has_idle=bool(idle.any())):
        mark_level(axes, idle[-1] + share * (limits[-1] - idle[-1]), text, colour)
    top, floor = max(limits.max(), peaks.max()), min(idle.min(), peaks.min())
    # A runtime that dwarfs what batches take would flatten all there is to see.
    bottom = max(floor - 0.15 * (top - floor), 0.0) if floor > 0.5 * top else 0.0
    axes.set_ylim(bottom, top + 0.12 * (top - bottom))


def _draw_peaks(axes: Axes, peaks: Sequence[float] | Floats, edges: Floats) -> None:
    axes.stairs(peaks, edges, fill=True, color=BLUE, alpha=0.14)
    axes.stairs(peaks, edges, baseline=None, color=BLUE, linewidth=2.0)


def _memory_labels(batch: BatchConfig, *, has_idle: bool) -> list[tuple[float, str, str]]:
    """Returns (share, text, colour) of the lines' labels; those of a narrow band, which would overlap, as one."""
    limit = (1.06, "limit", INK)  # above its line, clear of rho_high
    labels = [limit, (0.0, "idle", GREY)] if has_idle else [limit]
    if batch.rho_high - batch.rho_low < 0.12:
        middle = (batch.rho_low + batch.rho_high) / 2
        return [*labels, (middle, f"rho {batch.rho_low:.0%} to {batch.rho_high:.0%}", RED)]
    return [
        *labels,
        (batch.rho_high, f"rho_high {batch.rho_high:.0%}", RED),
        (batch.rho_low, f"rho_low {batch.rho_low:.0%}", ORANGE),
    ]


def _draw_by_epoch(axes: Axes, epochs: Sequence[Epoch], values: Sequence[float], title: str, y_label: str) -> None:
    panel(axes, title, y_label=y_label)
    axes.stairs(values, _whole(epochs), baseline=None, color=BLUE, linewidth=2.0)
    axes.set_ylim(0.0, 1.15 * max(values))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_seconds(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick]) -> None:
    """Draws the seconds of each epoch, and how many of them changing plans took."""
    _draw_by_epoch(axes, epochs, [epoch.seconds for epoch in epochs], "Time", "seconds per epoch")
    spent = np.zeros(len(epochs))
    starts = _whole(epochs)[:-1]
    for tick in ticks:
        spent[max(int(np.searchsorted(starts, tick.observation.epoch, side="left")) - 1, 0)] += tick.applied.adapt_ms
    if spent.any():
        adapting: dict[str, Any] = {"fill": True, "color": ORANGE, "alpha": 0.7, "label": "of which adapting"}
        axes.stairs(spent / 1e3, _whole(epochs), **adapting)
        legend(axes, **_ABOVE)


def _whole(epochs: Sequence[Epoch]) -> Floats:
    """Returns the borders of the epochs."""
    return np.array([epochs[0].epoch - 1, *(epoch.epoch for epoch in epochs)], dtype=np.float64)


def _marker(epochs: Sequence[Epoch]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4.0} if len(epochs) <= 25 else {}


def _mark_faults(axes: Axes, ticks: Sequence[Tick]) -> None:
    """Marks what was survived: out of memory, as a CUDA graph alone too, and plans that could not be applied."""
    for kind, text, marker in (
        (FaultKind.OUT_OF_MEMORY, "out of memory", "v"),
        (FaultKind.CAPTURE_OUT_OF_MEMORY, "no memory to capture", "P"),
        (FaultKind.APPLY_FAILED, "plan not applied", "X"),
    ):
        places = [
            (tick.observation.epoch, fault.batch_size or tick.observation.plan.batch_size)
            for tick in ticks
            for fault in tick.observation.faults
            if fault.kind is kind
        ]
        if places:
            look: dict[str, Any] = {"s": 52, "color": RED, "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
            axes.scatter(*zip(*places, strict=True), marker=marker, label=text, clip_on=False, **look)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, ncols=2, **_ABOVE)
