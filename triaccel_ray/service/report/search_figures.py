"""Pictures of a whole search: where its trials lie among the thresholds, and which threshold mattered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from triaccel_ray.service.report.figure_style import BLUE, GREY, INK, NAVY, TRIALS, legend, new_figure, panel
from triaccel_ray.service.report.importance import Importance
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.search import SearchRecord, ranked

NUM_TICKS: Final = 5
"""Values named on each axis."""

_FIGURE_AXES: Final[Sequence[tuple[str, Callable[[Figures], float], str]]] = (
    ("s/epoch", lambda figures: figures.seconds, ".3g"),
    ("peak GB", lambda figures: figures.peak_gb, ".3g"),
    ("score", lambda figures: figures.score, ".3g"),
)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One axis of the parallel coordinates."""

    name: str
    positions: Sequence[float]
    """Finite; one per trial."""
    text: Callable[[float], str]
    """What a position is called."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """How one trial is drawn."""

    rank: float
    """In [0, 1]: 0 the worst of the search, 1 the best."""
    feasible: bool
    best: bool = False


def parallel_coordinates(scales: Sequence[Scale], lines: Sequence[Line], *, about: str = "") -> Figure:
    """Returns a line per trial through an upright axis per quantity, better trials darker.

    Trials below the margin are dashed and grey; the best one is drawn on top.
    """
    figure = new_figure(11.0, 4.7)
    axes = figure.subplots()
    panel(axes, "Trials across thresholds and figures", about)
    heights = np.array([_heights(scale.positions) for scale in scales]).T
    places = np.arange(len(scales))
    order = sorted(range(len(lines)), key=lambda index: (lines[index].best, lines[index].feasible, lines[index].rank))
    for index in order:
        axes.plot(places, heights[index], solid_capstyle="round", **_look(lines[index]))
    for place, scale in zip(places, scales, strict=True):
        _upright(axes, float(place), scale)
    axes.set_xticks(places, [scale.name for scale in scales], fontsize=10, fontweight="bold", color=INK)
    axes.tick_params(axis="x", length=0, pad=10)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_xlim(-0.15, len(scales) - 0.45)  # room for the last axis's numbers
    axes.set_ylim(-0.04, 1.04)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for label, line in (
        ("best trial", Line(rank=1.0, feasible=True, best=True)),
        ("better", Line(rank=1.0, feasible=True)),
        ("worse", Line(rank=0.0, feasible=True)),
        ("beyond the margin", Line(rank=0.0, feasible=False)),
    ):
        axes.plot([], [], label=label, **_look(line))
    legend(axes, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderaxespad=0.2)
    return figure


def coordinates(record: SearchRecord, best: RunRecord | None) -> tuple[list[Scale], list[Line]]:
    """Returns axes and lines for all trials with figures, those left out that have no place on a scale."""
    scales = dimensions(record.spec.optional)
    objective = record.objective
    trials = [
        (value, run, run.figures)
        for value, run in ranked(record)
        if run.figures is not None and all(math.isfinite(scale.position(run.spec.control)) for scale in scales)
    ]
    axes = [
        Scale(
            name=scale.name,
            positions=[scale.position(run.spec.control) for _, run, _ in trials],
            text=scale.at,
        )
        for scale in scales
    ]
    goal = objective.goal
    heading, form = (f"{goal.words}, %", ".1f") if goal.unit == "%" else (goal.words, ".4g")
    judged = [figures.metric for _, _, figures in trials]
    axes.append(Scale(name=heading, positions=judged, text=partial(_formatted, form)))
    for name, value_of, form in _FIGURE_AXES:
        text = partial(_formatted, form)
        axes.append(Scale(name=name, positions=[value_of(figures) for _, _, figures in trials], text=text))
    values = sorted(value for value, _, _ in trials)
    lines = [
        Line(
            rank=values.index(value) / max(len(values) - 1, 1),
            feasible=objective.shortfall(run.epochs[-1].epoch, figures.metric) == 0.0,
            best=best is not None and run.name == best.name,
        )
        for value, run, figures in trials
    ]
    return axes, lines


def importance_bars(found: Importance, *, about: str = "") -> Figure:
    """Returns a bar per threshold: the share of the differences between trials that it explains, and its interval."""
    names = list(found.shares)
    figure = new_figure(9.6, 1.7 + 0.36 * len(names))
    axes = figure.subplots()
    panel(axes, "Importance of each threshold", about, x_label="share of the differences between trials, percent")
    rows = np.arange(len(names))
    shares = 100.0 * np.array([found.shares[name] for name in names])
    low, high = (100.0 * np.array([found.intervals[name][end] for name in names]) for end in (0, 1))
    whiskers: dict[str, Any] = {"ecolor": INK, "capsize": 3.0, "error_kw": {"linewidth": 1.2}}
    errors = np.maximum([shares - low, high - shares], 0.0)
    axes.barh(rows, shares, height=0.62, xerr=errors, color=BLUE, **whiskers)
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9.5, "color": INK}
    for row, share, end in zip(rows, shares, np.maximum(high, shares), strict=True):
        axes.annotate(f"{share:.0f}%", (end, row), (7, 0), **beside)
    axes.set_yticks(rows, names, fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.12 * max(high.max(), shares.max()))
    axes.grid(visible=False)
    return figure


def _formatted(form: str, value: float) -> str:
    return format(value, form)


def _heights(positions: Sequence[float]) -> list[float]:
    """Returns the positions on a scale from 0 to 1; all in the middle where they are the same."""
    low, high = min(positions), max(positions)
    return [0.5 if high == low else (position - low) / (high - low) for position in positions]


def _look(line: Line) -> dict[str, Any]:
    if line.best:
        return {"color": NAVY, "linewidth": 2.8, "zorder": 3}
    if not line.feasible:
        return {"color": GREY, "linewidth": 1.0, "linestyle": (0, (4, 3)), "alpha": 0.65, "zorder": 1}
    return {"color": TRIALS(line.rank), "linewidth": 1.4, "alpha": 0.9, "zorder": 2}


def _upright(axes: Axes, place: float, scale: Scale) -> None:
    """Draws one axis with its numbers, which stay readable where lines cross them."""
    axes.plot([place, place], [0.0, 1.0], color=INK, linewidth=1.0, zorder=4)
    low, high = min(scale.positions), max(scale.positions)
    shares = np.linspace(0.0, 1.0, NUM_TICKS) if high > low else [0.5]
    written: set[str] = set()
    for share in shares:
        text = scale.text(low + float(share) * (high - low))
        if text in written:  # whole numbers, or a narrow range
            continue
        written.add(text)
        number = axes.annotate(
            text, (place, share), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK, zorder=5
        )
        number.set_path_effects([withStroke(linewidth=2.6, foreground="white")])
