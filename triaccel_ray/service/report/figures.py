"""Figures of one run, drawn from its event log: an overview, and the precision of each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.report import drawing
from triaccel_ray.service.report.drawing import PRECISION_COLORS, legend, panel, shorten
from triaccel_ray.service.report.overview import overview, step_edges
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import EVENTS, FIGURES

MOST_ROW_LABELS = 32
"""With more layers, only every second, third, ... one is labeled."""


def run_figures(run: RunRecord) -> list[Path]:
    """Draws the figures that the run has data for and returns their paths; redraws them only if its log is newer."""
    log, pictures = run.folder / EVENTS, run.folder / FIGURES
    drawn = [path for name in ("overview", "precision") if (path := pictures / f"{name}.png").exists()]
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
    axes.set_ylim(len(names) - 0.5, -0.5)
    rows = range(0, len(names), math.ceil(len(names) / MOST_ROW_LABELS))
    axes.set_yticks(rows, [shorten(names[row]) for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    shares = [f"{level.name}  {100 * (ranks == level.rank).mean():.0f}%" for level in levels]
    handles = [Patch(color=PRECISION_COLORS[level], label=text) for level, text in zip(levels, shares, strict=True)]
    legend(axes, handles=handles, ncols=3, columnspacing=1.6, handlelength=1.2, **drawing.ABOVE)
    return figure
