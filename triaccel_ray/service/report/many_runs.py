"""Figures that compare runs: learning curves, and the metric against time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from triaccel_ray.records.events import Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.drawing import DASHED, GRAY, INK, PLAIN, mark_level, new_figure, panel, scale_losses
from triaccel_ray.service.runs.objective import Figures


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The learning curve of one run, and its style."""

    label: str
    """Curves with the same label share one legend entry."""
    color: str
    epochs: Sequence[Epoch]
    """At least one."""
    width: float = 1.8
    opacity: float = 0.8
    pruned: bool = False
    """Whether the curve ends with a cross."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that share a label and a style."""

    label: str
    points: Sequence[Figures]
    look: Mapping[str, Any]
    """Options of `Axes.errorbar`."""
    spread: Figures | None = None
    """Standard deviations, drawn as error bars; None draws none."""
    is_front: bool = False
    """Whether to draw only the Pareto front of each panel, joined by a line."""


def learning_curves(curves: Sequence[Curve], goal: Goal, *, subtitle: str = "") -> Figure:
    """Returns four panels: metric or loss by epoch and by seconds, seconds per epoch, and samples per second.

    The goal's metric is drawn if every run has it on validation samples, otherwise the training loss. Later curves lie
    on top.
    """
    has_metric = all(epoch.held_out(goal) is not None for curve in curves for epoch in curve.epochs)
    title, unit = "Training loss", "mean over the samples"
    if has_metric:
        title, unit = f"Validation {goal.words}", goal.axis_unit
    figure = new_figure(11.0, 7.4)
    by_epoch, by_seconds, time, speed = figure.subplots(2, 2).flat
    panel(by_epoch, f"{title} over epochs", subtitle, x_label="epoch", y_label=unit)
    panel(by_seconds, f"{title} over time", " " if subtitle else "", x_label="seconds of training", y_label=unit)
    panel(time, "Time", x_label="epoch", y_label="seconds per epoch")
    panel(speed, "Speed", x_label="epoch", y_label="samples per second")
    for curve in curves:
        numbers, seconds = [epoch.epoch for epoch in curve.epochs], [epoch.seconds for epoch in curve.epochs]
        progress = [epoch.held_out(goal) if has_metric else epoch.train_loss for epoch in curve.epochs]
        look: dict[str, Any] = {"color": curve.color, "linewidth": curve.width, "alpha": curve.opacity}
        if len(numbers) <= 12:  # a single epoch would be invisible as a line
            look |= {"marker": "o", "markersize": 3.0}
        for axes, x, y in (
            (by_epoch, numbers, progress),
            (by_seconds, np.cumsum(seconds).tolist(), progress),
            (time, numbers, seconds),
            (speed, numbers, [epoch.images_per_second for epoch in curve.epochs]),
        ):
            axes.plot(x, y, label=curve.label, **look)
            if curve.pruned:
                axes.plot(x[-1:], y[-1:], linestyle="none", marker="x", markersize=6.5, color=curve.color)
    if not has_metric:
        for axes in (by_epoch, by_seconds):
            scale_losses(axes, [epoch.train_loss for curve in curves for epoch in curve.epochs])
    for axes in (by_epoch, time, speed):
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    by_seconds.set_xlim(left=0.0)
    for axes in (time, speed):
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(PLAIN)
    _legend_below(figure)
    return figure


def metric_against_cost(
    series: Sequence[Series], goal: Goal, *, limit: float | None = None, subtitle: str = "", samples: str = ""
) -> Figure:
    """Returns two panels: the goal's metric on `samples` against seconds per epoch, and against peak memory.

    `limit` is the worst metric that is still feasible, drawn as a horizontal line.
    """
    figure = new_figure(11.0, 4.8)
    left, right = figure.subplots(1, 2, sharey=True)
    words, y_label = goal.words.capitalize(), f"{samples} {goal.axis}".lstrip()
    panel(left, f"{words} against time", subtitle, x_label="seconds per epoch", y_label=y_label)
    panel(right, f"{words} against memory", " " if subtitle else "", x_label="peak memory of the process, GB")
    costs: dict[Any, Callable[[Figures], float]] = {left: attrgetter("seconds"), right: attrgetter("peak_gb")}
    for axes, cost in costs.items():
        if limit is not None:
            axes.axhline(limit, color=GRAY, linewidth=1.1, linestyle=DASHED)
        for each in series:
            points = front(each.points, cost, goal) if each.is_front else each.points
            bars = {} if each.spread is None else {"xerr": cost(each.spread), "yerr": each.spread.metric}
            look = {"linestyle": "none", "elinewidth": 1.0, "capsize": 2.0, "label": each.label, **bars, **each.look}
            axes.errorbar([cost(point) for point in points], [point.metric for point in points], **look)
        axes.margins(0.1)
    if limit is not None:
        mark_level(right, limit, "margin")
    _legend_below(figure)
    return figure


def front(points: Sequence[Figures], cost: Callable[[Figures], float], goal: Goal) -> list[Figures]:
    """Returns the Pareto front by rising cost: points for which no other has a better metric at no more cost."""
    sign = 1.0 if goal.maximize else -1.0
    best: list[Figures] = []
    for point in sorted(points, key=lambda each: (cost(each), -sign * each.metric)):
        if not best or sign * point.metric > sign * best[-1].metric:
            best.append(point)
    return best


def _legend_below(figure: Figure) -> None:
    """Adds one legend below all panels, with each label once, in drawing order."""
    named: dict[str, Any] = {}
    for handle, name in zip(*figure.axes[0].get_legend_handles_labels(), strict=True):
        named.setdefault(name, handle)
    below: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(named.values(), named.keys(), ncols=6, **below)
