"""Pictures of a comparison: the metric against what it cost, and the score, each with the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from triaccel_ray.measure.score import quality_text
from triaccel_ray.service.compare.comparison import MethodResults
from triaccel_ray.service.report.comparison_tables import label
from triaccel_ray.service.report.figure_style import GREY, INK, METHOD_LOOKS, new_figure, panel, save


def save_comparison_figures(results: Sequence[MethodResults], folder: Path, *, about: str = "") -> list[Path]:
    """Draws the methods that have results as PNG files in `folder` and returns their paths; none without any."""
    drawn = [each for each in results if each.num_runs]
    if not drawn:
        return []
    pictures = {
        f"{drawn[0].goal.name}_against_cost": metric_against_cost(drawn, about=about),
        "score": score_bars(drawn, about=about),
    }
    for name, figure in pictures.items():
        save(figure, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]


def metric_against_cost(results: Sequence[MethodResults], *, about: str = "") -> Figure:
    """Returns the test metric against seconds per epoch and against peak memory; bars are standard deviations."""
    figure = new_figure(11.0, 4.9)
    left, right = figure.subplots(1, 2, sharey=True)
    goal = results[0].goal
    words = goal.words.capitalize()
    panel(left, f"{words} against time", about, x_label="seconds per epoch", y_label=f"test {goal.axis}")
    panel(right, f"{words} against memory", " " if about else "", x_label="peak memory of the process, GB")
    for axes, cost in ((left, "seconds_per_epoch"), (right, "peak_gb")):
        for each in results:
            _draw_method(axes, each, cost)
        axes.margins(0.1)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False, fontsize=9, labelcolor=INK)
    return figure


def score_bars(results: Sequence[MethodResults], *, about: str = "") -> Figure:
    """Returns the score of every method, the first at the top; bars are standard deviations."""
    figure = new_figure(9.6, 1.5 + 0.42 * len(results))
    axes = figure.subplots()
    panel(axes, f"Score: {quality_text(results[0].goal)} / (seconds per epoch x process peak GB)", about)
    places = range(len(results))
    means, deviations = [each.mean("score") for each in results], [_spread(each, "score") for each in results]
    whiskers: dict[str, Any] = {"ecolor": INK, "capsize": 3.0, "error_kw": {"linewidth": 1.2}}
    colours = [METHOD_LOOKS.get(each.method, ("o", GREY))[1] for each in results]
    axes.barh(places, means, xerr=deviations, height=0.62, color=colours, **whiskers)
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9.5, "color": INK}
    for place, mean, deviation in zip(places, means, deviations, strict=True):
        axes.annotate(f"{mean:.4g}", (mean + deviation, place), (7, 0), **beside)
    axes.set_yticks(places, [label(each.method) for each in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.set_xlim(0.0, 1.12 * max(mean + deviation for mean, deviation in zip(means, deviations, strict=True)))
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    return figure


def _draw_method(axes: Axes, results: MethodResults, cost: str) -> None:
    marker, colour = METHOD_LOOKS.get(results.method, ("o", GREY))
    look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 9.0}
    bars: dict[str, Any] = {"linestyle": "none", "elinewidth": 1.0, "capsize": 2.0, "label": label(results.method)}
    axes.errorbar(
        results.mean(cost),
        results.mean(results.goal.name),
        xerr=_spread(results, cost),
        yerr=_spread(results, results.goal.name),
        **look,
        **bars,
    )


def _spread(results: MethodResults, figure: str) -> float:
    """Returns the standard deviation; zero for a single run, which has none to show."""
    deviation = results.deviation(figure)
    return 0.0 if math.isnan(deviation) else deviation
