"""Learning curves of many runs beside each other: metric or loss over epochs and seconds, and time by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.figure_style import INK, LOG_FROM, new_figure, panel


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run, and how it is drawn."""

    label: str
    """Runs of the same label have one entry in the legend."""
    colour: str
    epochs: Sequence[Epoch]
    """At least one."""
    width: float = 1.8
    opacity: float = 1.0
    pruned: bool = False
    """Whether a cross ends the curve."""


def learning_curves(curves: Sequence[Curve], goal: Goal, *, about: str = "") -> Figure:
    """Returns four panels: what was learned over epochs and over seconds, seconds and samples per second by epoch.

    The goal's metric is drawn where every run was judged on validation samples, the training loss elsewhere. The curves
    given last lie on top.
    """
    judged = all(epoch.held_out(goal) is not None for curve in curves for epoch in curve.epochs)
    title, unit = "Training loss", "mean over the samples"
    if judged:
        title, unit = f"Validation {goal.words}", goal.axis_unit
    figure = new_figure(11.0, 7.4)
    (by_epoch, by_seconds), (time, speed) = figure.subplots(2, 2)
    panel(by_epoch, f"{title} over epochs", about, x_label="epoch", y_label=unit)
    panel(by_seconds, f"{title} over time", " " if about else "", x_label="seconds of training", y_label=unit)
    panel(time, "Time", x_label="epoch", y_label="seconds per epoch")
    panel(speed, "Speed", x_label="epoch", y_label="samples per second")
    for curve in curves:
        numbers = [epoch.epoch for epoch in curve.epochs]
        learned = [(epoch.held_out(goal) if judged else epoch.train_loss) or 0.0 for epoch in curve.epochs]
        _draw(by_epoch, curve, numbers, learned)
        _draw(by_seconds, curve, np.cumsum([epoch.seconds for epoch in curve.epochs]).tolist(), learned)
        _draw(time, curve, numbers, [epoch.seconds for epoch in curve.epochs])
        _draw(speed, curve, numbers, [epoch.images_per_second for epoch in curve.epochs])
    losses = [epoch.train_loss for curve in curves for epoch in curve.epochs]
    if not judged and min(losses) > 0.0 and max(losses) > LOG_FROM * min(losses):
        for axes in (by_epoch, by_seconds):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for axes in (by_epoch, time, speed):
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    by_seconds.set_xlim(left=0.0)
    for axes in (time, speed):
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    handles, labels = by_epoch.get_legend_handles_labels()
    first = {label: handle for handle, label in zip(reversed(handles), reversed(labels), strict=True)}
    below: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(list(first.values())[::-1], list(first)[::-1], ncols=6, **below)
    return figure


def _draw(axes: Axes, curve: Curve, at: Sequence[float], values: Sequence[float]) -> None:
    look: dict[str, Any] = {"color": curve.colour, "linewidth": curve.width, "alpha": curve.opacity}
    # One epoch is a point, which a line does not show.
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.0} if len(at) <= 12 else {}
    axes.plot(at, values, label=curve.label, **look, **marker)
    if curve.pruned:
        axes.plot(at[-1:], values[-1:], linestyle="none", marker="x", markersize=6.5, color=curve.colour)
