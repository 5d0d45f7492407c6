"""Figures of one run, drawn from its event log: the control loop's decisions and their effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.measure.memory import MIB
from triaccel_ray.records.events import Epoch, Event, Start, Tick, read_events
from triaccel_ray.records.plan import Precision, Storage
from triaccel_ray.records.signals import RegionSignal
from triaccel_ray.service.report import drawing
from triaccel_ray.service.report.drawing import (
    GRAY,
    PALE,
    PRECISION_COLORS,
    RED,
    STORAGE_COLORS,
    legend,
    panel,
    shorten,
)
from triaccel_ray.service.report.overview import overview, step_edges
from triaccel_ray.service.storage.layout import EVENTS, FIGURES

PICTURES = ("overview", "precision", "memory_plan", "curvature_and_lr")
"""Names of a run's figures, in reading order."""

MOST_ROW_LABELS = 32
"""Largest number of layers that are all labeled; with more, only every second, third, ... one is."""


def run_figures(folder: Path) -> list[Path]:
    """Returns the paths of a run's figures; redraws them only if the event log in `folder` is newer."""
    log, pictures = folder / EVENTS, folder / FIGURES
    drawn = [path for name in PICTURES if (path := pictures / f"{name}.png").exists()]
    if drawn and min(path.stat().st_mtime for path in drawn) >= log.stat().st_mtime:
        return drawn
    return [drawing.save(figure, pictures / f"{name}.png") for name, figure in draw_run(read_events(log)).items()]


def draw_run(events: Iterable[Event]) -> dict[str, Figure]:
    """Returns a run's figures by name, without those that its events have no data for."""
    records = [event.record for event in events]
    start = next(record for record in records if isinstance(record, Start))
    ticks = [record for record in records if isinstance(record, Tick)]
    epochs = [record for record in records if isinstance(record, Epoch)]
    info = start.info
    parts = (info.get("task"), info.get("method"), f"seed {info['seed']}" if "seed" in info else None)
    subtitle = ", ".join(filter(None, parts))
    pictures = {}
    if epochs:
        pictures["overview"] = overview(epochs, ticks, start.control.batch, start.goal, subtitle=subtitle)
    if ticks:
        pictures["precision"] = precision_heatmap(ticks, subtitle=subtitle)
        if any(tick.observation.plan.storage and tick.observation.profile for tick in ticks):
            pictures["memory_plan"] = memory_plan(ticks, subtitle=subtitle)
        pictures["curvature_and_lr"] = curvature_and_lr(ticks, start.control.curvature, subtitle=subtitle)
    return pictures


def precision_heatmap(ticks: Sequence[Tick], *, subtitle: str = "") -> Figure:
    """Returns a heat map of each layer's precision over the steps: a row per layer, input at the top."""
    names = list(ticks[0].observation.plan.precision)
    levels = list(Precision)
    # The plan observed at a tick is the one in force during the interval that the tick ends.
    ranks = np.array([[tick.observation.plan.precision[name].rank for name in names] for tick in ticks]).T
    figure = drawing.new_figure(9.6, min(max(0.215 * len(names), 0.9), 7.0) + 1.5)
    axes = figure.subplots()
    panel(axes, "Precision of each layer", subtitle, x_label="optimizer step")
    colors = ListedColormap([PRECISION_COLORS[level] for level in levels])
    axes.pcolorfast(step_edges(ticks), np.arange(len(names) + 1) - 0.5, ranks, cmap=colors, vmin=-0.5, vmax=2.5)
    _label_rows(axes, names)
    axes.grid(visible=False)
    if len(names) <= MOST_ROW_LABELS:
        axes.hlines(np.arange(1, len(names)) - 0.5, *axes.get_xlim(), colors="white", linewidth=1.2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    shares = [f"{level.name}  {100 * (ranks == level.rank).mean():.0f}%" for level in levels]
    handles = [Patch(color=PRECISION_COLORS[level], label=text) for level, text in zip(levels, shares, strict=True)]
    legend(axes, handles=handles, ncols=3, columnspacing=1.6, handlelength=1.2, **drawing.ABOVE)
    return figure


def memory_plan(ticks: Sequence[Tick], *, subtitle: str = "") -> Figure:
    """Returns a bar for each region of the model: what its backward pass needs, and where the last plan stores it."""
    last = next(tick.observation for tick in reversed(ticks) if tick.observation.plan.storage)
    profile = next(tick.observation.profile for tick in reversed(ticks) if tick.observation.profile)
    regions, storage = profile.regions, last.plan.storage
    figure = drawing.new_figure(9.6, min(max(0.215 * len(regions), 0.9), 7.0) + 1.8)
    axes = figure.subplots()
    panel(axes, "What each region saves for its backward pass", subtitle, x_label="MiB per micro-batch")
    kinds = [storage.get(region.name, Storage.KEEP) for region in regions]
    saved = np.array([region.saved_bytes for region in regions]) / MIB
    kept = np.array([_kept_bytes(region, kind) for region, kind in zip(regions, kinds, strict=True)]) / MIB
    axes.barh(range(len(regions)), kept, color=STORAGE_COLORS[Storage.KEEP], height=0.8)
    colors = [STORAGE_COLORS[kind] for kind in kinds]
    axes.barh(range(len(regions)), saved - kept, left=kept, color=colors, height=0.8)
    _label_rows(axes, [region.name for region in regions])
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    freed = {kind: sum(saved[row] - kept[row] for row, each in enumerate(kinds) if each is kind) for kind in Storage}
    held = {**freed, Storage.KEEP: kept.sum()}
    texts = {Storage.KEEP: "kept", Storage.RECOMPUTE: "recomputed", Storage.OFFLOAD: "offloaded"}
    handles = [Patch(color=STORAGE_COLORS[kind], label=f"{texts[kind]}  {held[kind]:,.0f} MiB") for kind in Storage]
    legend(axes, handles=handles, ncols=3, columnspacing=1.6, handlelength=1.2, **drawing.ABOVE)
    return figure


def _kept_bytes(region: RegionSignal, kind: Storage) -> int:
    """Returns the bytes that a region holds on the device between its passes."""
    if kind is Storage.RECOMPUTE:
        return region.input_bytes
    return region.saved_bytes - (region.offloadable_bytes if kind is Storage.OFFLOAD else 0)


def _label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Labels the rows from the top; with many, only every second, third, ... one."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    every = math.ceil(len(names) / MOST_ROW_LABELS)
    rows = range(0, len(names), every)
    axes.set_yticks(rows, [shorten(names[row]) for row in rows], fontsize=8.5 if every == 1 else 7.5)
    axes.tick_params(axis="y", length=0)


def curvature_and_lr(ticks: Sequence[Tick], curvature: CurvatureConfig, *, subtitle: str = "") -> Figure:
    """Returns plots of each layer's largest eigenvalue and learning-rate scale; color encodes depth."""
    names = list(ticks[0].observation.plan.precision)
    measured = [tick for tick in ticks if any(signal.eigenvalues for signal in tick.observation.layers)]
    states = [tick.decision.state.layers for tick in measured]
    largest = np.array([[(layers[name].eigenvalues or (0.0,))[0] for layers in states] for name in names])
    # A log axis cannot show the zero or negative eigenvalue of a flat layer, or the infinite one of a diverged layer.
    drawn = np.where(np.isfinite(largest) & (largest > 0.0), largest, np.nan)
    if np.isnan(drawn).all():
        figure = drawing.new_figure(9.6, 2.2)
        axes = figure.subplots()
        panel(axes, "Curvature and learning rates", subtitle)
        drawing.caption(axes, "no curvature was measured in this run: all learning rates follow the schedule")
        return figure
    figure = drawing.new_figure(9.6, 6.4)
    upper, lower = figure.subplots(2, 1, sharex=True)
    panel(upper, "Largest curvature eigenvalue of each layer", subtitle, y_label="eigenvalue, smoothed")
    panel(lower, "Learning-rate scale of each layer", x_label="optimizer step", y_label="factor on the schedule")
    depth = Normalize(0, max(len(names) - 1, 1))
    edges, steps = step_edges(ticks), [tick.observation.step for tick in measured]
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.0} if len(measured) <= 30 else {}
    for row, name in enumerate(names):
        line: dict[str, Any] = {"color": drawing.DEPTH(depth(row)), "linewidth": 1.8 if len(names) <= 8 else 1.1}
        upper.plot(steps, drawn[row], **line, **marker)
        scales = [tick.observation.plan.lr_scale.get(name, 1.0) for tick in ticks]
        lower.stairs(scales, edges, baseline=None, **line)
    upper.set_yscale("log")
    upper.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    upper.yaxis.set_major_formatter(drawing.PLAIN)
    upper.yaxis.set_minor_formatter(NullFormatter())
    if curvature.tau_curv < 10.0 * np.nanmax(drawn):
        upper.axhline(curvature.tau_curv, color=RED, linewidth=1.2, linestyle=drawing.DASHED)
        drawing.mark_level(upper, curvature.tau_curv, "tau_curv", RED)
    lower.set_ylim(0.0, 1.05)
    lower.set_xlim(edges[0], edges[-1])
    bar = figure.colorbar(ScalarMappable(depth, drawing.DEPTH), ax=[upper, lower], pad=0.02, fraction=0.03, aspect=40)
    rows = np.unique(np.linspace(0, len(names) - 1, 5).round().astype(int)).tolist()
    bar.set_ticks(rows, labels=[shorten(names[row], 18) for row in rows], fontsize=8.5)
    bar.ax.invert_yaxis()
    bar.outline.set_visible(False)
    bar.ax.set_title("input", fontsize=8.5, color=GRAY, pad=7)
    bar.ax.set_xlabel("output", fontsize=8.5, color=GRAY, labelpad=6)
    return figure
