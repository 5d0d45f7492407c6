"""Figures of one run, from its event log: an overview, each layer's precision, the memory plan, batch sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from triaccel_ray.config import BatchConfig
from triaccel_ray.decide.throughput import EFFICIENT_SHARE
from triaccel_ray.measure.memory import MIB
from triaccel_ray.measure.score import BYTES_PER_GB
from triaccel_ray.records.events import Epoch, Tick
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Plan, Precision, Storage
from triaccel_ray.records.signals import MemorySignal
from triaccel_ray.service.report import drawing
from triaccel_ray.service.report.drawing import (
    BLUE,
    GRAY,
    INK,
    NAVY,
    ORANGE,
    PRECISION_COLORS,
    RED,
    STORAGE_COLORS,
    caption,
    legend,
    mark_level,
    panel,
)
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import EVENTS, FIGURES

_LOG_FROM = 30.0
"""Ratio of largest to smallest loss above which the axis is logarithmic: a linear one would show a flat line."""
MAX_ROW_LABELS = 32
"""With more layers, only every second, third, ... one is labeled."""
_MAX_LABEL = 36
"""Longest label of a row; a longer name loses its start, for its end tells layers apart."""


def overview(
    epochs: Sequence[Epoch], ticks: Sequence[Tick], batch: BatchConfig, goal: Goal, *, subtitle: str = ""
) -> Figure:
    """Returns six panels over the epochs: loss, metric, precisions, batch size, memory, speed.

    A baseline has no ticks: its batch size and peak memory come from its epochs.
    """
    figure = drawing.new_figure(11.0, 7.5)
    grid = figure.subplots(3, 2)
    (loss, metric), (precisions, sizes), (memory, speed) = grid
    panel(loss, "Loss", subtitle, x_label="epoch", y_label="mean over the samples")
    panel(metric, f"Validation {goal.words}", " ", x_label="epoch", y_label=goal.axis_unit)
    panel(precisions, "Precision", x_label="epoch", y_label="percent of the layers")
    panel(sizes, "Batch size", x_label="epoch", y_label="samples a step")
    panel(memory, "Memory", x_label="epoch", y_label="GB of the process")
    panel(speed, "Speed", x_label="epoch", y_label="samples per second")
    plans = [tick.observation.plan for tick in ticks] + [tick.applied.plan for tick in ticks[-1:]]
    epoch_edges = [epochs[0].epoch - 1, *(epoch.epoch for epoch in epochs)]
    edges = _interval_edges(epochs, ticks) if ticks else epoch_edges
    _draw_loss(loss, epochs)
    _draw_metric(metric, epochs, goal)
    _draw_precisions(precisions, plans, edges)
    in_force = [plan.batch_size for plan in plans] or [epoch.batch_size for epoch in epochs]
    _draw_batch(sizes, in_force, [plan.micro_batch_size for plan in plans], edges)
    if ticks:
        _draw_memory(memory, [tick.observation.memory for tick in ticks], batch, edges[:-1])
    else:
        _draw_peaks(memory, [epoch.peak_bytes for epoch in epochs], edges)
    _draw_speed(speed, [epoch.images_per_second for epoch in epochs], epoch_edges)
    for axes in grid.flat:
        axes.set_xlim(0.0, epochs[-1].epoch)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    return figure


def step_edges(ticks: Sequence[Tick]) -> list[float]:
    """Returns the boundaries, in steps, of the intervals between ticks: one more than ticks, at least 1 step apart."""
    return _edges([tick.observation.step for tick in ticks], 1.0)


def _edges(ends: Sequence[float], narrowest: float) -> list[float]:
    """Returns `ends` with the start of the first interval in front.

    A log may begin late in a run, so the first interval is as wide as the second, and at least `narrowest`.
    """
    first = max(2 * ends[0] - ends[1], 0.0) if len(ends) > 1 else 0.0
    return list(accumulate([min(first, ends[0] - narrowest), *ends], max))


def _interval_edges(epochs: Sequence[Epoch], ticks: Sequence[Tick]) -> list[float]:
    """Returns the boundaries, in epochs, of the intervals between ticks and of the one after the last tick."""
    edges = _edges([tick.observation.epoch for tick in ticks], 0.0)
    return [*edges, max(edges[-1], epochs[-1].epoch)]


def _draw_loss(axes: Axes, epochs: Sequence[Epoch]) -> None:
    training = [(epoch.epoch, epoch.train_loss) for epoch in epochs]
    held_out = [(epoch.epoch, epoch.held_out_loss) for epoch in epochs if epoch.held_out_loss is not None]
    for losses, color, label in ((training, GRAY, "training"), (held_out, NAVY, "validation")):
        if losses:
            axes.plot(*zip(*losses, strict=True), color=color, linewidth=2.0, label=label, **_marker(epochs))
    values = [loss for _, loss in (*training, *held_out)]
    if 0.0 < _LOG_FROM * min(values) < max(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(drawing.PLAIN)
    legend(axes, loc="upper right")  # losses fall


def _draw_metric(axes: Axes, epochs: Sequence[Epoch], goal: Goal) -> None:
    seen = [(epoch.epoch, value) for epoch in epochs if (value := epoch.held_out(goal)) is not None]
    if not seen:
        caption(axes, "not evaluated before the end of the run")
        return
    axes.plot(*zip(*seen, strict=True), color=NAVY, linewidth=2.0, **_marker(epochs))
    mark_level(axes, seen[-1][1], goal.cell(seen[-1][1]), NAVY)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _draw_precisions(axes: Axes, plans: Sequence[Plan], edges: Sequence[float]) -> None:
    if not plans:
        caption(axes, "the same from the first step to the last")
        return
    below = np.zeros(len(plans))
    for level in reversed(_levels(plans)):
        counts = [list(plan.precision.values()).count(level) / len(plan.precision) for plan in plans]
        above, color = below + 100.0 * np.array(counts), drawing.PRECISION_COLORS[level]
        axes.stairs(above, edges, baseline=below, fill=True, color=color, label=level.name)
        below = above
    axes.set_ylim(0.0, 100.0)
    axes.set_axisbelow(False)
    legend(axes, ncols=4)


def _draw_batch(axes: Axes, sizes: Sequence[int], micro_sizes: Sequence[int], edges: Sequence[float]) -> None:
    """Draws the batch size, and the micro-batch size if it is known and smaller."""
    axes.stairs(sizes, edges, color=BLUE, linewidth=2.0, baseline=None)
    if micro_sizes and micro_sizes != sizes:
        style: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "linestyle": ":"}
        axes.stairs(micro_sizes, edges, baseline=None, label="at once on the device", **style)
        legend(axes)
    axes.set_ylim(0, 1.12 * max(sizes))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    mark_level(axes, sizes[-1], f"{sizes[-1]}", BLUE)


def _draw_peaks(axes: Axes, peak_bytes: Sequence[int], edges: Sequence[float]) -> None:
    peaks = np.array(peak_bytes) / BYTES_PER_GB
    axes.stairs(peaks, edges, fill=True, color=BLUE, alpha=0.14)
    axes.stairs(peaks, edges, baseline=None, color=BLUE, linewidth=2.0)
    axes.margins(y=0.15)


def _draw_memory(axes: Axes, memory: Sequence[MemorySignal], batch: BatchConfig, edges: Sequence[float]) -> None:
    """Draws the peak memory of each interval, with the limit and the band in which the batch rule keeps it."""
    _draw_peaks(axes, [signal.window_peak_bytes for signal in memory], edges)
    limits = np.array([signal.attainable_bytes for signal in memory]) / BYTES_PER_GB
    idle = np.array([signal.idle_bytes for signal in memory]) / BYTES_PER_GB
    high, low = f"rho_high {batch.rho_high:.0%}", f"rho_low {batch.rho_low:.0%}"
    for share, text, color in ((1.0, "limit", INK), (batch.rho_high, high, RED), (batch.rho_low, low, ORANGE)):
        level = idle + share * (limits - idle)  # rho counts above the idle memory, which no batch size changes
        axes.stairs(level, edges, baseline=None, color=color, linewidth=1.2, label=text)
    legend(axes, ncols=3)


def _draw_speed(axes: Axes, rates: Sequence[float], edges: Sequence[float]) -> None:
    axes.stairs(rates, edges, baseline=None, color=BLUE, linewidth=2.0)
    axes.set_ylim(0.0, 1.15 * max(rates))
    axes.yaxis.set_major_formatter(drawing.PLAIN)


def _marker(epochs: Sequence[Epoch]) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4.0} if len(epochs) <= 25 else {}


_FIGURE_NAMES = ("overview", "precision", "memory_plan", "batch_sizes")
"""Figures of a run, in the order of its page."""


def run_figures(run: RunRecord) -> list[Path]:
    """Draws the figures that the run has data for and returns their paths; redraws them only if its log is newer."""
    log, pictures = run.folder / EVENTS, run.folder / FIGURES
    drawn = [path for name in _FIGURE_NAMES if (path := pictures / f"{name}.png").exists()]
    if drawn and min(path.stat().st_mtime for path in drawn) >= log.stat().st_mtime:
        return drawn
    return [drawing.save(figure, pictures / f"{name}.png") for name, figure in draw_run(run).items()]


def draw_run(run: RunRecord) -> dict[str, Figure]:
    """Returns a run's figures by name, without those that it has no data for."""
    info = run.start.info
    parts = (info.get("task"), info.get("method"), f"seed {info['seed']}" if "seed" in info else None)
    subtitle = ", ".join(filter(None, parts))
    pictures = {}
    if run.epochs:
        pictures["overview"] = overview(
            run.epochs, run.ticks, run.start.control.batch, run.start.goal, subtitle=subtitle
        )
    if run.ticks:
        pictures["precision"] = precision_heatmap(run.ticks, subtitle=subtitle)
    if any(tick.observation.plan.storage and tick.observation.profile for tick in run.ticks):
        pictures["memory_plan"] = memory_plan(run.ticks, subtitle=subtitle)
    if run.ms_per_sample:
        pictures["batch_sizes"] = batch_sizes(run.ms_per_sample, run.efficient_batch_size, subtitle=subtitle)
    return pictures


def precision_heatmap(ticks: Sequence[Tick], *, subtitle: str = "") -> Figure:
    """Returns a heat map of each layer's precision over the steps: a row per layer, input at the top."""
    names = list(ticks[0].observation.plan.precision)
    # The plan observed at a tick is the one in force during the interval that the tick ends.
    ranks = np.array([[tick.observation.plan.precision[name].rank for name in names] for tick in ticks]).T
    figure, axes = _figure_of_rows(names, "Precision of each layer", subtitle, x_label="optimizer step")
    colors = ListedColormap([PRECISION_COLORS[level] for level in Precision])
    edges = step_edges(ticks), np.arange(len(names) + 1) - 0.5
    axes.pcolorfast(*edges, ranks, cmap=colors, vmin=-0.5, vmax=len(Precision) - 0.5)
    axes.grid(visible=False)
    levels = _levels([tick.observation.plan for tick in ticks])
    shares = [f"{level.name}  {100 * (ranks == level.rank).mean():.0f}%" for level in levels]
    handles = [Patch(color=PRECISION_COLORS[level], label=text) for level, text in zip(levels, shares, strict=True)]
    legend(axes, handles=handles, ncols=4)
    return figure


def _levels(plans: Sequence[Plan]) -> list[Precision]:
    """Returns the precisions to name: FP8, which few runs may use, only if a layer has it."""
    has_fp8 = any(Precision.FP8 in plan.precision.values() for plan in plans)
    return [level for level in Precision if has_fp8 or level is not Precision.FP8]


def memory_plan(ticks: Sequence[Tick], *, subtitle: str = "") -> Figure:
    """Returns a bar for each region of the model: what its backward pass needs, and where the last plan stores it."""
    storage = next(plan.storage for tick in reversed(ticks) if (plan := tick.observation.plan).storage)
    regions = next(each.regions for tick in reversed(ticks) if (each := tick.observation.profile))
    title, names = "What each region saves for its backward pass", [region.name for region in regions]
    figure, axes = _figure_of_rows(names, title, subtitle, x_label="MiB per micro-batch")
    stored = [storage.get(region.name, Storage.KEEP) for region in regions]
    kinds = [Storage.RECOMPUTE if kind.repeats else kind for kind in stored]
    saved = np.array([region.saved_bytes for region in regions]) / MIB
    kept = np.array([region.held_bytes(kind) for region, kind in zip(regions, stored, strict=True)]) / MIB
    axes.barh(range(len(regions)), kept, color=STORAGE_COLORS[Storage.KEEP])
    axes.barh(range(len(regions)), saved - kept, left=kept, color=[STORAGE_COLORS[kind] for kind in kinds])
    texts = {Storage.KEEP: "kept", Storage.RECOMPUTE: "recomputed", Storage.OFFLOAD: "offloaded"}
    freed = {kind: sum(saved[row] - kept[row] for row, each in enumerate(kinds) if each is kind) for kind in texts}
    held = {**freed, Storage.KEEP: kept.sum()}
    handles = [Patch(color=STORAGE_COLORS[kind], label=f"{texts[kind]}  {held[kind]:,.0f} MiB") for kind in texts]
    legend(axes, handles=handles, ncols=3)
    return figure


def batch_sizes(ms_per_sample: Mapping[int, float], efficient: int | None, *, subtitle: str = "") -> Figure:
    """Returns samples per second over batch size; marks the efficient size and the speed that it must reach."""
    rates = {size: 1e3 / ms for size, ms in sorted(ms_per_sample.items())}
    figure = drawing.new_figure(9.6, 4.2)
    axes = figure.subplots()
    panel(axes, "Speed of each batch size", subtitle, x_label="samples a step", y_label="samples per second")
    axes.plot(list(rates), list(rates.values()), color=NAVY, linewidth=2.0, marker="o", markersize=4.0)
    min_rate = EFFICIENT_SHARE * max(rates.values())
    axes.axhline(min_rate, color=GRAY, linewidth=1.1, linestyle=drawing.DASHED)
    mark_level(axes, min_rate, f"{EFFICIENT_SHARE:.0%}")
    if efficient is not None:
        point = efficient, rates[efficient]
        axes.plot(*point, "o", color=ORANGE, markersize=9.0)
        below: dict[str, Any] = {"xytext": (0, -18), "textcoords": "offset points", "ha": "center"}
        axes.annotate(str(efficient), point, fontsize=9.5, color=INK, **below)
    axes.set_ylim(bottom=0.0)
    axes.set_xlim(left=0.0)
    axes.yaxis.set_major_formatter(drawing.PLAIN)
    return figure


def _figure_of_rows(names: Sequence[str], title: str, subtitle: str, *, x_label: str) -> tuple[Figure, Axes]:
    """Returns a figure with rows of these names, from the top; with many, only every second, third, ... is labeled."""
    figure = drawing.new_figure(9.6, min(max(0.215 * len(names), 0.9), 7.0) + 1.5)
    axes = figure.subplots()
    panel(axes, title, subtitle, x_label=x_label)
    axes.set_ylim(len(names) - 0.5, -0.5)
    rows = range(0, len(names), math.ceil(len(names) / MAX_ROW_LABELS))
    labels = [name if len(name) <= _MAX_LABEL else f"…{name[1 - _MAX_LABEL :]}" for name in names]
    axes.set_yticks(rows, [labels[row] for row in rows])
    axes.tick_params(axis="y", length=0)
    return figure, axes
