"""Shared style of all figures, and the figure that compares runs: the metric against time and memory.

The palette is safe for color blindness. Only Matplotlib's object interface is used: without pyplot and its global
state, a thread of the driver can draw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from triaccel_ray.records.durable import partial_path
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision, Storage
from triaccel_ray.service.runs.objective import Performance

INK: Final = "#1F2933"
GRAY: Final = "#6B7785"
PALE: Final = "#E4E8EC"
NAVY: Final = "#17365D"
BLUE: Final = "#0072B2"
SKY: Final = "#6DB3E3"
AMBER: Final = "#F2C45A"
ORANGE: Final = "#D98200"
RED: Final = "#C8442B"
GREEN: Final = "#00876C"
PURPLE: Final = "#9A4D8E"
BROWN: Final = "#7A5230"
PINK: Final = "#CC79A7"
"""After Okabe and Ito (2008); navy, sky and amber also differ in lightness."""

METHOD_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "fp32": ("s", RED),
    "amp": ("D", ORANGE),
    "amp-best": ("X", BROWN),
    "engine-fp32": ("p", PINK),
    "engine-amp": ("^", AMBER),
    "fixed": ("P", GRAY),
    "dynamic-batch": ("v", SKY),
    "dynamic-precision": ("<", BLUE),
    "dynamic-both": ("*", GREEN),
    "triaccel": ("o", NAVY),
    "paper": ("h", PURPLE),
}
"""Method -> marker and color, the same in every figure."""

PRECISION_COLORS: Final = {Precision.FP8: PINK, Precision.FP16: AMBER, Precision.BF16: SKY, Precision.FP32: NAVY}
"""Higher precisions are darker, except FP8, which stands apart."""
STORAGE_COLORS: Final = {Storage.KEEP: NAVY, Storage.RECOMPUTE: AMBER, Storage.OFFLOAD: SKY}

DASHED: Final = (0, (5, 3))
_LEGEND: Final[dict[str, Any]] = {"frameon": False, "fontsize": 9, "labelcolor": INK}
PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,.10g}")
"""Tick formatter that writes numbers without exponents."""


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty white figure of this size in inches, with constrained layout so that nothing overlaps."""
    layout = ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.08)
    return Figure(figsize=(width, height), dpi=120, facecolor="white", layout=layout)


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure as PNG and returns its path. The write is atomic; a symbolic link at `path` is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path.parent)  # beside the folder of pictures, which MLflow gets whole
    figure.savefig(partial, format="png")
    return partial.replace(path)


def panel(axes: Axes, title: str, subtitle: str = "", *, x_label: str = "", y_label: str = "") -> None:
    """Sets the title, labels and style of the axes."""
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=24 if subtitle else 10)
    if subtitle:
        above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
        axes.annotate(subtitle, (0.0, 1.0), (0, 9), fontsize=9, color=GRAY, **above)
    axes.set_xlabel(x_label, fontsize=9.5, color=GRAY)
    axes.set_ylabel(y_label, fontsize=9.5, color=GRAY)
    axes.tick_params(which="both", labelsize=9, colors=GRAY, labelcolor=INK, length=3, width=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#B8C0C8")
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def caption(axes: Axes, text: str) -> None:
    """Writes a sentence in the middle of axes that have no data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10.5, color=GRAY)
    axes.set_axis_off()


def mark_level(axes: Axes, value: float, text: str, color: str = GRAY) -> None:
    """Labels a horizontal line at the right edge of the axes."""
    axes.text(1.02, value, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=color)


def legend(axes: Axes, **options: Any) -> None:
    """Adds a legend, by default above the axes, beside the title, so that it never covers data."""
    position: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
    axes.legend(**{**_LEGEND, **position, "columnspacing": 1.4, "handlelength": 1.2, **options})


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that share a label and a style."""

    label: str
    points: Sequence[Performance]
    look: Mapping[str, Any]
    """Options of `Axes.errorbar`."""
    spread: Performance | None = None
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
    costs: dict[Any, Callable[[Performance], float]] = {left: attrgetter("seconds"), right: attrgetter("peak_gb")}
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
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6, **_LEGEND)
    return figure


def front(points: Sequence[Performance], cost: Callable[[Performance], float], goal: Goal) -> list[Performance]:
    """Returns the Pareto front by rising cost: points for which no other has a better metric at no more cost."""
    sign = 1.0 if goal.maximize else -1.0
    best: list[Performance] = []
    for point in sorted(points, key=lambda each: (cost(each), -sign * each.metric)):
        if not best or sign * point.metric > sign * best[-1].metric:
            best.append(point)
    return best
