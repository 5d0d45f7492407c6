"""Pictures of one run, from its event log: what the control loop did, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator, NullFormatter

from triaccel_ray.config import BatchConfig, CurvatureConfig
from triaccel_ray.events import Epoch, Event, Start, Tick, read_events
from triaccel_ray.plan import FaultKind, Precision
from triaccel_ray.score import BYTES_PER_GB
from triaccel_ray.service.reports.figure_style import (
    AMBER,
    BLUE,
    DASHED,
    DEPTH,
    GREY,
    INK,
    NAVY,
    ORANGE,
    RED,
    SKY,
    legend,
    mark_level,
    new_figure,
    panel,
    save,
    say,
    shorten,
)

PRECISION_COLOURS = {Precision.FP16: AMBER, Precision.BF16: SKY, Precision.FP32: NAVY}
"""Darker as precision rises."""

PICTURES = ("precision", "batch_and_memory", "curvature_and_lr", "learning_curve")
"""What there is of a run, in the order in which it is looked at."""

MOST_ROW_LABELS = 32
"""Layers named one by one; of more, every second, third, ... is named."""


def save_run_figures(events: Iterable[Event], folder: Path) -> list[Path]:
    """Draws what the events have data for, as PNG files in `folder`, and returns their paths."""
    records = [event.record for event in events]
    start = next((record for record in records if isinstance(record, Start)), None)
    if start is None:
        return []
    ticks = [record for record in records if isinstance(record, Tick)]
    epochs = [record for record in records if isinstance(record, Epoch)]
    about = ", ".join(
        f"seed {value}" if name == "seed" else value
        for name in ("task", "method", "seed")
        if (value := start.info.get(name))
    )
    pictures: dict[str, Callable[[], Figure]] = {}
    if ticks:
        pictures["precision"] = partial(precision_heatmap, ticks, about=about)
        pictures["batch_and_memory"] = partial(batch_and_memory, ticks, start.control.batch, about=about)
        pictures["curvature_and_lr"] = partial(curvature_and_lr, ticks, start.control.curvature, about=about)
    if epochs:
        pictures["learning_curve"] = partial(learning_curve, epochs, about=about)
    paths = [folder / f"{name}.png" for name in pictures]
    for path, draw in zip(paths, pictures.values(), strict=True):
        save(draw(), path)
    return paths


def run_figures(log: Path, folder: Path) -> list[Path]:
    """Returns the paths of a run's pictures in `folder`, drawn again only where the event log is newer."""
    drawn = sorted(folder.glob("*.png"), key=lambda path: PICTURES.index(path.stem) if path.stem in PICTURES else 99)
    if drawn and min(path.stat().st_mtime for path in drawn) >= log.stat().st_mtime:
        return drawn
    return save_run_figures(read_events(log), folder)


def precision_heatmap(ticks: Sequence[Tick], *, about: str = "") -> Figure:
    """Returns the precision in which each layer computed, over the steps: a row per layer, input at the top."""
    names = list(ticks[0].observation.plan.precision)
    levels = list(Precision)
    # What was observed at a tick is the plan of the interval that it ends.
    ranks = np.array([[tick.observation.plan.precision[name].rank for name in names] for tick in ticks]).T
    figure = new_figure(9.6, min(max(0.215 * len(names), 0.9), 7.0) + 1.5)
    axes = figure.subplots()
    panel(axes, "Precision of each layer", about, x_label="optimizer step")
    colours = ListedColormap([PRECISION_COLOURS[level] for level in levels])
    axes.pcolorfast(_edges(ticks), np.arange(len(names) + 1) - 0.5, ranks, cmap=colours, vmin=-0.5, vmax=2.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    every = -(-len(names) // MOST_ROW_LABELS)
    rows = range(0, len(names), every)
    axes.set_yticks(rows, [shorten(names[row]) for row in rows], fontsize=8.5 if every == 1 else 7.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    if len(names) <= MOST_ROW_LABELS:
        axes.hlines(np.arange(1, len(names)) - 0.5, *axes.get_xlim(), colors="white", linewidth=1.2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shares = [f"{level.name}  {100 * (ranks == level.rank).mean():.0f}%" for level in levels]
    handles = [Patch(color=PRECISION_COLOURS[level], label=text) for level, text in zip(levels, shares, strict=True)]
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.4}
    legend(axes, handles=handles, ncols=3, columnspacing=1.6, handlelength=1.2, **above)
    return figure


def batch_and_memory(ticks: Sequence[Tick], batch: BatchConfig, *, about: str = "") -> Figure:
    """Returns the batch size, and below it the memory that it follows, with the band in which it stays."""
    figure = new_figure(9.6, 6.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    edges = _edges(ticks)
    panel(upper, "Batch size", about, y_label="samples a step")
    sizes = [tick.observation.plan.batch_size for tick in ticks]
    upper.stairs(sizes, edges, color=BLUE, linewidth=2.0, baseline=None)
    at_once = [tick.observation.plan.micro_batch_size for tick in ticks]
    if at_once != sizes:
        parts: dict[str, Any] = {"color": BLUE, "linewidth": 1.2, "linestyle": ":", "label": "at once on the device"}
        upper.stairs(at_once, edges, baseline=None, **parts)
    _mark_faults(upper, ticks)
    highest = max([*sizes, *(fault.batch_size for tick in ticks for fault in tick.observation.faults)])
    upper.set_ylim(0, 1.12 * highest)
    upper.yaxis.set_major_locator(MultipleLocator(batch.granularity * -(-highest // (6 * batch.granularity))))
    mark_level(upper, sizes[-1], f"{sizes[-1]}", BLUE)

    panel(lower, "Memory of the process on the device", x_label="optimizer step", y_label="GB")
    memory = [tick.observation.memory for tick in ticks]
    peaks = np.array([signal.window_peak_bytes for signal in memory]) / BYTES_PER_GB
    limits = np.array([signal.attainable_bytes for signal in memory]) / BYTES_PER_GB
    idle = np.array([signal.idle_bytes for signal in memory]) / BYTES_PER_GB
    lower.stairs(peaks, edges, fill=True, color=BLUE, alpha=0.14)
    lower.stairs(peaks, edges, baseline=None, color=BLUE, linewidth=2.0)
    # Shares count from what the idle process holds: no batch size changes that.
    for share, colour in ((1.0, INK), (batch.rho_high, RED), (batch.rho_low, ORANGE), (0.0, GREY)):
        style: Any = "-" if share == 1.0 else DASHED
        lower.stairs(idle + share * (limits - idle), edges, baseline=None, color=colour, linewidth=1.2, linestyle=style)
    for share, text, colour in _memory_labels(batch, has_idle=bool(idle.any())):
        mark_level(lower, idle[-1] + share * (limits[-1] - idle[-1]), text, colour)
    top, floor = max(limits.max(), peaks.max()), idle.min()
    # A runtime that dwarfs what batches take would flatten all there is to see.
    bottom = max(floor - 0.15 * (top - floor), 0.0) if floor > 0.5 * top else 0.0
    lower.set_ylim(bottom, top + 0.12 * (top - bottom))
    lower.set_xlim(edges[0], edges[-1])
    return figure


def _memory_labels(batch: BatchConfig, *, has_idle: bool) -> list[tuple[float, str, str]]:
    """Returns (share, text, colour) of the lines' labels; those of a narrow band, which would overlap, as one."""
    labels = [(1.0, "limit", INK), (0.0, "idle", GREY)] if has_idle else [(1.0, "limit", INK)]
    if batch.rho_high - batch.rho_low < 0.08:
        middle = (batch.rho_low + batch.rho_high) / 2
        return [*labels, (middle, f"rho {batch.rho_low:.0%} to {batch.rho_high:.0%}", RED)]
    return [
        *labels,
        (batch.rho_high, f"rho_high {batch.rho_high:.0%}", RED),
        (batch.rho_low, f"rho_low {batch.rho_low:.0%}", ORANGE),
    ]


def curvature_and_lr(ticks: Sequence[Tick], curvature: CurvatureConfig, *, about: str = "") -> Figure:
    """Returns each layer's largest eigenvalue and learning-rate scale; colours go from input to output."""
    names = list(ticks[0].observation.plan.precision)
    measured = [tick for tick in ticks if any(signal.eigenvalues for signal in tick.observation.layers)]
    largest = np.array([[_largest_eigenvalue(tick, name) for tick in measured] for name in names])
    # A flat layer's eigenvalue may be measured as zero or below, a diverged one's as infinite: no place on a log axis.
    drawn = np.isfinite(largest) & (largest > 0.0)
    if not drawn.any():
        figure = new_figure(9.6, 2.2)
        axes = figure.subplots()
        panel(axes, "Curvature and learning rates", about)
        say(axes, "no curvature was measured in this run: all learning rates follow the schedule")
        return figure
    figure = new_figure(9.6, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    panel(upper, "Largest curvature eigenvalue of each layer", about, y_label="eigenvalue, smoothed")
    panel(lower, "Learning-rate scale of each layer", x_label="optimizer step", y_label="factor on the schedule")
    depth = Normalize(0, max(len(names) - 1, 1))
    edges, steps = _edges(ticks), [tick.observation.step for tick in measured]
    width = 1.8 if len(names) <= 8 else 1.1
    marker: dict[str, Any] = {"marker": "o", "markersize": 2.0 * width} if len(measured) <= 30 else {}
    for row, name in enumerate(names):
        line: dict[str, Any] = {"color": DEPTH(depth(row)), "linewidth": width}
        upper.plot(steps, np.where(drawn[row], largest[row], np.nan), **line, **marker)
        scales = [tick.observation.plan.lr_scale.get(name, 1.0) for tick in ticks]
        lower.stairs(scales, edges, baseline=None, **line)
    upper.set_yscale("log")
    highest = largest[drawn].max()
    few = highest < 300.0 * largest[drawn].min()
    upper.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    upper.yaxis.set_minor_formatter(NullFormatter())
    if curvature.tau_curv < 10.0 * highest:
        upper.axhline(curvature.tau_curv, color=RED, linewidth=1.2, linestyle=DASHED)
        mark_level(upper, curvature.tau_curv, "tau_curv", RED)
    lower.set_ylim(0.0, 1.05)
    lower.set_xlim(edges[0], edges[-1])
    _depth_bar(figure, [upper, lower], names, depth)
    return figure


def learning_curve(epochs: Sequence[Epoch], *, about: str = "") -> Figure:
    """Returns loss and accuracy over the epochs."""
    figure = new_figure(9.6, 3.9)
    left, right = figure.subplots(1, 2)
    panel(left, "Loss", about, x_label="epoch", y_label="mean over the samples")
    panel(right, "Validation accuracy", " " if about else "", x_label="epoch", y_label="percent")
    numbers = [epoch.epoch for epoch in epochs]
    marker: dict[str, Any] = {"marker": "o", "markersize": 4.0} if len(epochs) <= 25 else {}
    left.plot(numbers, [epoch.train_loss for epoch in epochs], color=NAVY, linewidth=2.0, label="training", **marker)
    seen = [
        (epoch.epoch, epoch.held_out_accuracy, epoch.held_out_loss)
        for epoch in epochs
        if epoch.held_out_accuracy is not None and epoch.held_out_loss is not None
    ]
    if seen:
        at, accuracies, losses = zip(*seen, strict=True)
        left.plot(at, losses, color=ORANGE, linewidth=2.0, label="validation", **marker)
        right.plot(at, accuracies, color=ORANGE, linewidth=2.0, **marker)
        mark_level(right, accuracies[-1], f"{accuracies[-1]:.1f}", ORANGE)
        legend(left)
    else:
        legend(left)
        say(right, "not looked at before the end of the run")
    for axes in (left, right)[: 2 if seen else 1]:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.margins(x=0.03)
    return figure


def _edges(ticks: Sequence[Tick]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns the borders of the intervals that the ticks end, one more than ticks; each at least one step wide."""
    steps = [tick.observation.step for tick in ticks]
    first = 2 * steps[0] - steps[1] if len(steps) > 1 else 0
    edges = np.array([min(max(first, 0), steps[0] - 1), *steps], dtype=np.float64)
    return np.maximum.accumulate(edges)


def _largest_eigenvalue(tick: Tick, name: str) -> float:
    return (tick.decision.state.layers[name].eigenvalues or (0.0,))[0]


def _mark_faults(axes: Axes, ticks: Sequence[Tick]) -> None:
    """Marks what was survived: out of memory, as a CUDA graph alone too, and plans that could not be applied."""
    for kind, text, marker in (
        (FaultKind.OUT_OF_MEMORY, "out of memory", "v"),
        (FaultKind.CAPTURE_OUT_OF_MEMORY, "no memory to capture", "P"),
        (FaultKind.APPLY_FAILED, "plan not applied", "X"),
    ):
        places = [
            (fault.step, fault.batch_size or tick.observation.plan.batch_size)
            for tick in ticks
            for fault in tick.observation.faults
            if fault.kind is kind
        ]
        if places:
            look: dict[str, Any] = {"s": 52, "color": RED, "edgecolor": "white", "linewidth": 0.8, "zorder": 4}
            axes.scatter(*zip(*places, strict=True), marker=marker, label=text, **look)
    if axes.get_legend_handles_labels()[0]:
        legend(axes, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.2)


def _depth_bar(figure: Figure, panels: list[Axes], names: Sequence[str], depth: Normalize) -> None:
    bar = figure.colorbar(ScalarMappable(depth, DEPTH), ax=panels, pad=0.02, fraction=0.03, aspect=40)
    rows = sorted({round(place * (len(names) - 1)) for place in (0.0, 0.25, 0.5, 0.75, 1.0)})
    bar.set_ticks(rows, labels=[shorten(names[row], 18) for row in rows], fontsize=8.5, color=INK)
    bar.ax.invert_yaxis()
    bar.ax.tick_params(length=0)
    bar.outline.set_visible(False)
    bar.ax.set_title("input", fontsize=8.5, color=GREY, pad=7)
    bar.ax.set_xlabel("output", fontsize=8.5, color=GREY, labelpad=6)
