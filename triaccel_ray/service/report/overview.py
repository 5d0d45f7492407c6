"""One picture that tells a run: what it learned, what the loop changed, what memory and time that took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator

from triaccel_ray.config import BatchConfig
from triaccel_ray.measure.score import BYTES_PER_GB
from triaccel_ray.records.events import Epoch, Tick
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import FaultKind, Plan, Precision
from triaccel_ray.service.report.drawing import (
    ABOVE,
    BLUE,
    DASHED,
    GREY,
    INK,
    NAVY,
    ORANGE,
    PLAIN,
    PRECISION_COLOURS,
    RED,
    legend,
    mark_level,
    new_figure,
    panel,
    say,
    scale_losses,
)

Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

_FAULTS = (
    (FaultKind.OUT_OF_MEMORY, "out of memory", "v"),
    (FaultKind.CAPTURE_OUT_OF_MEMORY, "no memory to capture", "P"),
    (FaultKind.APPLY_FAILED, "plan not applied", "X"),
)
"""What was survived, what it is called and its marker."""


def overview(
    epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig, goal: Goal, *, about: str = ""
) -> Figure:
    """Returns eight panels: loss, metric, precisions, batch size, memory, samples per second, and time twice.

    All but the last run over epochs; that one shows the metric over seconds of training. A baseline has no ticks: its
    batch size and peak come from its epochs.
    """
    figure = new_figure(11.0, 10.0)
    grid = figure.subplots(4, 2)
    numbers = [float(epoch.epoch) for epoch in epochs]
    elapsed = np.cumsum([epoch.seconds for epoch in epochs]).tolist()
    _draw_loss(grid[0, 0], epochs, about)
    panel(grid[0, 1], f"Validation {goal.words}", " ", y_label=goal.axis_unit)
    _draw_metric(grid[0, 1], epochs, numbers, goal)
    _draw_precisions(grid[1, 0], epochs, ticks)
    _draw_batch(grid[1, 1], epochs, ticks, batch)
    _draw_memory(grid[2, 0], epochs, ticks, batch)
    _draw_by_epoch(grid[2, 1], epochs, [epoch.images_per_second for epoch in epochs], "Speed", "samples per second")
    _draw_seconds(grid[3, 0], epochs, ticks)
    panel(grid[3, 1], f"Validation {goal.words} over time", x_label="seconds of training", y_label=goal.axis_unit)
    _draw_metric(grid[3, 1], epochs, elapsed, goal)
    grid[3, 1].set_xlim(left=0.0)
    for axes in grid.flat[:7]:
        axes.set_xlabel("epoch", fontsize=9.5, color=GREY)
        axes.set_xlim(0.0, epochs[-1].epoch)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


def step_edges(ticks: Sequence[Tick]) -> Floats:
    """Returns the borders of the intervals that the ticks end, one more than ticks; each at least one step wide."""
    return _edges([tick.observation.step for tick in ticks], 1.0)


def _epoch_edges(ticks: Sequence[Tick]) -> Floats:
    return _edges([tick.observation.epoch for tick in ticks], 0.0)


def _edges(ends: Sequence[float], narrowest: float) -> Floats:
    first = 2 * ends[0] - ends[1] if len(ends) > 1 else 0.0
    edges = np.array([min(max(first, 0.0), ends[0] - narrowest), *ends], dtype=np.float64)
    return np.maximum.accumulate(edges)


def _whole(epochs: Sequence[Epoch]) -> Floats:
    """Returns the borders of the epochs."""
    return np.array([epochs[0].epoch - 1, *(epoch.epoch for epoch in epochs)], dtype=np.float64)


def _plans(ticks: Sequence[Tick], epochs: Sequence[Epoch]) -> tuple[list[Plan], Floats]:
    """Returns the plan of the interval that each tick ends and the one after the last tick, and their borders."""
    if not ticks:
        return [], _whole(epochs)
    edges = _epoch_edges(ticks)
    plans = [*(tick.observation.plan for tick in ticks), ticks[-1].applied.plan]
    return plans, np.array([*edges, max(edges[-1], float(epochs[-1].epoch))])


def _draw_loss(axes: Axes, epochs: Sequence[Epoch], about: str) -> None:
    panel(axes, "Loss", about, y_label="mean over the samples")
    training = [(epoch.epoch, epoch.train_loss) for epoch in epochs]
    held_out = [(epoch.epoch, epoch.held_out_loss) for epoch in epochs if epoch.held_out_loss is not None]
    for losses, colour, label in ((training, GREY, "training"), (held_out, NAVY, "validation")):
        if losses:
            axes.plot(*zip(*losses, strict=True), color=colour, linewidth=2.0, label=label, **_marker(epochs))
    scale_losses(axes, [loss for _, loss in (*training, *held_out)])
    legend(axes, loc="upper right")  # losses fall


def _draw_metric(axes: Axes, epochs: Sequence[Epoch], at: Sequence[float], goal: Goal) -> None:
    values = [epoch.held_out(goal) for epoch in epochs]
    seen = [(place, value) for place, value in zip(at, values, strict=True) if value is not None]
    if not seen:
        say(axes, "not looked at before the end of the run")
        return
    axes.plot(*zip(*seen, strict=True), color=NAVY, linewidth=2.0, **_marker(epochs))
    mark_level(axes, seen[-1][1], f"{seen[-1][1]:.1f}" if goal.unit == "%" else goal.cell(seen[-1][1]), NAVY)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _draw_precisions(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick]) -> None:
    panel(axes, "Precision", y_label="percent of the layers")
    if not ticks:
        say(axes, "the same from the first step to the last")
        return
    plans, edges = _plans(ticks, epochs)
    below = np.zeros(len(plans))
    for level in reversed(Precision):
        counts = [list(plan.precision.values()).count(level) / len(plan.precision) for plan in plans]
        above = below + 100.0 * np.array(counts)
        axes.stairs(above, edges, baseline=below, fill=True, color=PRECISION_COLOURS[level], label=level.name)
        below = above
    axes.set_ylim(0.0, 100.0)
    axes.set_axisbelow(False)
    legend(axes, ncols=3, columnspacing=1.4, handlelength=1.2, **ABOVE)


def _draw_batch(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig) -> None:
    """Draws the batch size, beside it what is computed at once where that is less, and what was survived."""
    panel(axes, "Batch size", y_label="samples a step")
    plans, edges = _plans(ticks, epochs)
    sizes = [plan.batch_size for plan in plans] or [epoch.batch_size for epoch in epochs]
    axes.stairs(sizes, edges, color=BLUE, linewidth=2.0, baseline=None)
    at_once = [plan.micro_batch_size for plan in plans] or sizes
    if at_once != sizes:
        parts: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "linestyle": ":", "label": "at once on the device"}
        axes.stairs(at_once, edges, baseline=None, **parts)
    faults = [(tick, fault) for tick in ticks for fault in tick.observation.faults]
    look: dict[str, Any] = {"s": 52, "color": RED, "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
    for kind, text, marker in _FAULTS:
        of_kind = [(tick.observation, fault) for tick, fault in faults if fault.kind is kind]
        places = [(seen.epoch, fault.batch_size or seen.plan.batch_size) for seen, fault in of_kind]
        if places:
            axes.scatter(*zip(*places, strict=True), marker=marker, label=text, clip_on=False, **look)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, ncols=2, **ABOVE)
    highest = max([*sizes, *(fault.batch_size for _, fault in faults)])
    axes.set_ylim(0, 1.12 * highest)
    axes.yaxis.set_major_locator(MultipleLocator(batch.granularity * -(-highest // (5 * batch.granularity))))
    mark_level(axes, sizes[-1], f"{sizes[-1]}", BLUE)


def _draw_memory(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig) -> None:
    """Draws the memory that the batch follows, with its limit and the band in which the loop keeps it."""
    panel(axes, "Memory of the process on the device", y_label="GB")
    memory = [tick.observation.memory for tick in ticks]
    in_bytes = [signal.window_peak_bytes for signal in memory] or [epoch.peak_bytes for epoch in epochs]
    peaks, edges = np.array(in_bytes) / BYTES_PER_GB, _epoch_edges(ticks) if ticks else _whole(epochs)
    axes.stairs(peaks, edges, fill=True, color=BLUE, alpha=0.14)
    axes.stairs(peaks, edges, baseline=None, color=BLUE, linewidth=2.0)
    if not ticks:
        axes.margins(y=0.15)
        return
    limits = np.array([signal.attainable_bytes for signal in memory]) / BYTES_PER_GB
    idle = np.array([signal.idle_bytes for signal in memory]) / BYTES_PER_GB
    # Shares count from what the idle process holds: no batch size changes that.
    lines = {"limit": (1.0, INK), "rho_high": (batch.rho_high, RED), "rho_low": (batch.rho_low, ORANGE)}
    if idle.any():
        lines["idle"] = (0.0, GREY)
    for name, (share, colour) in lines.items():
        style: Any = "-" if name == "limit" else DASHED
        axes.stairs(idle + share * (limits - idle), edges, baseline=None, color=colour, linewidth=1.2, linestyle=style)
        text = f"{name} {share:.0%}" if name.startswith("rho") else name
        if name == "rho_low" and batch.rho_high - batch.rho_low < 0.12:
            continue  # its text would lie on that of rho_high
        above = 1.06 if name == "limit" else share  # clear of rho_high
        mark_level(axes, idle[-1] + above * (limits[-1] - idle[-1]), text, colour)
    top, floor = max(limits.max(), peaks.max()), min(idle.min(), peaks.min())
    # A runtime that dwarfs what batches take would flatten all there is to see.
    bottom = max(floor - 0.15 * (top - floor), 0.0) if floor > 0.5 * top else 0.0
    axes.set_ylim(bottom, top + 0.12 * (top - bottom))


def _draw_by_epoch(axes: Axes, epochs: Sequence[Epoch], values: Sequence[float], title: str, y_label: str) -> None:
    panel(axes, title, y_label=y_label)
    axes.stairs(values, _whole(epochs), baseline=None, color=BLUE, linewidth=2.0)
    axes.set_ylim(0.0, 1.15 * max(values))
    axes.yaxis.set_major_formatter(PLAIN)


def _draw_seconds(axes: Axes, epochs: Sequence[Epoch], ticks: Sequence[Tick]) -> None:
    """Draws the seconds of each epoch, and how many of them changing plans took."""
    _draw_by_epoch(axes, epochs, [epoch.seconds for epoch in epochs], "Time", "seconds per epoch")
    ends = [tick.observation.epoch for tick in ticks]
    spent, _ = np.histogram(
        np.ceil(ends) - 0.5, _whole(epochs), weights=[tick.applied.adapt_ms / 1e3 for tick in ticks]
    )
    if spent.any():
        adapting: dict[str, Any] = {"fill": True, "color": ORANGE, "alpha": 0.7, "label": "of which adapting"}
        axes.stairs(spent, _whole(epochs), **adapting)
        legend(axes, **ABOVE)


def _marker(epochs: Sequence[Epoch]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4.0} if len(epochs) <= 25 else {}
