"""The figure that compares runs: the metric against time and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from matplotlib.figure import Figure

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.drawing import DASHED, GRAY, INK, mark_level, new_figure, panel
from triaccel_ray.service.runs.objective import Figures


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
    below: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(*figure.axes[0].get_legend_handles_labels(), ncols=6, **below)
    return figure


def front(points: Sequence[Figures], cost: Callable[[Figures], float], goal: Goal) -> list[Figures]:
    """Returns the Pareto front by rising cost: points for which no other has a better metric at no more cost."""
    sign = 1.0 if goal.maximize else -1.0
    best: list[Figures] = []
    for point in sorted(points, key=lambda each: (cost(each), -sign * each.metric)):
        if not best or sign * point.metric > sign * best[-1].metric:
            best.append(point)
    return best
