"""What a search found: the metric against time and memory, and the trials that no other one beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.figure_style import (
    BLUE,
    DASHED,
    GREY,
    INK,
    METHOD_LOOKS,
    NAVY,
    mark_level,
    new_figure,
    panel,
)

BASELINES: Final = {"fp32": "FP32", "amp": "AMP"}
"""Methods that trials are compared with, and their names."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one trial, or one baseline, came to."""

    label: str
    method: str
    """`fp32` and `amp` are the baselines."""
    metric: float
    """What the task is judged by."""
    seconds: float
    """Per epoch."""
    peak_gb: float
    """Memory of the process at its peak, 10^9 bytes."""
    score: float
    feasible: bool = True
    """Whether the metric is within the margin."""
    pruned: bool = False
    """Whether the trial was stopped before its last epoch: its figures are those of the epoch that it reached."""


def pareto_indices(costs: Sequence[Sequence[float]]) -> list[int]:
    """Returns the positions, ascending, of the points that no other one dominates.

    A point dominates another when no coordinate is larger and one is smaller; give what is to be large with a minus
    sign. Equal points do not dominate each other.
    """
    front: list[int] = []
    # A point can only be dominated by one that comes before it in lexicographic order, hence by one of the front.
    for index in sorted(range(len(costs)), key=lambda i: tuple(costs[i])):
        if not any(_dominates(costs[other], costs[index]) for other in front):
            front.append(index)
    return sorted(front)


def pareto_front(outcomes: Sequence[Outcome], goal: Goal, *, limit: float | None = None, about: str = "") -> Figure:
    """Returns the goal's metric against seconds per epoch and against peak memory, two panels.

    The finished trials that no other one beats in a panel's two quantities are joined. `limit` is the metric of a trial
    that is barely feasible.
    """
    figure = new_figure(11.0, 4.7)
    left, right = figure.subplots(1, 2, sharey=True)
    words = goal.words.capitalize()
    panel(left, f"{words} against time", about, x_label="seconds per epoch", y_label=goal.axis)
    panel(right, f"{words} against memory", " " if about else "", x_label="peak memory, GB")
    _draw_panel(left, outcomes, lambda outcome: outcome.seconds, goal, limit)
    _draw_panel(right, outcomes, lambda outcome: outcome.peak_gb, goal, limit)
    if limit is not None:
        mark_level(right, limit, "margin")
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def _draw_panel(
    axes: Axes, outcomes: Sequence[Outcome], cost: Callable[[Outcome], float], goal: Goal, limit: float | None
) -> None:
    trials = [outcome for outcome in outcomes if outcome.method not in BASELINES]
    good = [outcome for outcome in trials if outcome.feasible and not outcome.pruned]
    poor = [outcome for outcome in trials if not outcome.feasible and not outcome.pruned]
    pruned = [outcome for outcome in trials if outcome.pruned]
    if limit is not None:
        axes.axhline(limit, color=GREY, linewidth=1.1, linestyle=DASHED)
    if pruned:
        cross: dict[str, Any] = {"marker": "x", "color": GREY, "linewidth": 1.2}
        axes.scatter(*_places(pruned, cost), s=34, label="stopped early (pruned), at its last epoch", **cross)
    if poor:
        hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": "#9AA5B1", "linewidth": 1.1}
        axes.scatter(*_places(poor, cost), s=34, label="trial beyond the margin", **hollow)
    if good:
        axes.scatter(*_places(good, cost), s=42, color=BLUE, alpha=0.55, linewidth=0, label="trial")
        sign = -1.0 if goal.maximize else 1.0
        indices = pareto_indices([(cost(outcome), sign * outcome.metric) for outcome in good])
        front = sorted((good[index] for index in indices), key=cost)
        line: dict[str, Any] = {
            "color": NAVY,
            "linewidth": 1.6,
            "marker": "o",
            "markersize": 6.5,
            "drawstyle": "steps-post",
        }
        axes.plot(*_places(front, cost), label="beaten by no other trial", **line)
        best = max(good, key=lambda outcome: outcome.score)
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": NAVY, "linewidth": 1.6}
        axes.scatter(*_places([best], cost), s=190, label=f"best score {best.score:.3g}: {best.label}", **ring)
    for method, name in BASELINES.items():
        marker, colour = METHOD_LOOKS[method]
        same = [outcome for outcome in outcomes if outcome.method == method]
        if same:
            look: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 1.0, "zorder": 4}
            axes.scatter(*_places(same, cost), s=76, marker=marker, label=name, **look)
            place = (cost(same[0]), same[0].metric)
            style: dict[str, Any] = {"fontsize": 9.5, "fontweight": "bold", "color": colour, "ha": "center"}
            text = axes.annotate(name, place, (0, 8), textcoords="offset points", zorder=5, **style)
            text.set_path_effects([withStroke(linewidth=3.0, foreground="white")])
    axes.margins(0.09)
    finished = [outcome.metric for outcome in outcomes if not outcome.pruned]
    if pruned and finished:  # a trial that was stopped after an epoch would flatten what is to be told apart
        shown = [*finished, *([] if limit is None else [limit])]
        low, high = min(shown), max(shown)
        room = 1.5 * max(high - low, 1.0 if goal.unit == "%" else 0.01 * abs(high))
        if goal.maximize:
            axes.set_ylim(bottom=max(axes.get_ylim()[0], low - room))
        else:
            axes.set_ylim(top=min(axes.get_ylim()[1], high + room))


def _places(outcomes: Sequence[Outcome], cost: Callable[[Outcome], float]) -> tuple[list[float], list[float]]:
    return [cost(outcome) for outcome in outcomes], [outcome.metric for outcome in outcomes]


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return tuple(one) != tuple(other) and all(a <= b for a, b in zip(one, other, strict=True))
