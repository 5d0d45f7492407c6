"""Shared style of all figures: a palette safe for color blindness, light axes, left-aligned titles.

Only Matplotlib's object interface is used. Without pyplot and its global state, a thread of the driver can draw.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from triaccel_ray.records.plan import Precision

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
"""After Okabe and Ito (2008); navy, sky and amber also differ in lightness."""

METHOD_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "fp32": ("s", RED),
    "amp": ("D", ORANGE),
    "amp-best": ("X", BROWN),
    "engine-amp": ("^", AMBER),
    "fixed": ("P", GRAY),
    "dynamic-batch": ("v", SKY),
    "dynamic-precision": ("<", BLUE),
    "dynamic-both": ("*", GREEN),
    "triaccel": ("o", NAVY),
    "paper": ("h", PURPLE),
}
"""Method -> marker and color, the same in every figure."""

PRECISION_COLORS: Final = {Precision.FP16: AMBER, Precision.BF16: SKY, Precision.FP32: NAVY}
"""Higher precisions are darker."""

DASHED: Final = (0, (5, 3))
ABOVE: Final[dict[str, Any]] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.2}
"""Legend position: above the axes, beside the title, so that it never covers data."""
PLAIN: Final = FuncFormatter(lambda value, _: f"{value:,.10g}")
"""Tick formatter that writes numbers without exponents."""
_LOG_FROM: Final = 30.0
"""Ratio of largest to smallest loss above which the axis is logarithmic: a linear one would show a flat line."""


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty white figure of this size in inches, with constrained layout so that nothing overlaps."""
    layout = ConstrainedLayoutEngine(w_pad=0.10, h_pad=0.08)
    return Figure(figsize=(width, height), dpi=120, facecolor="white", layout=layout)


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure as PNG and returns its path. The write is atomic; a symbolic link at `path` is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
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
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#B8C0C8")
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def caption(axes: Axes, text: str) -> None:
    """Writes a sentence in the middle of axes that have no data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=10.5, color=GRAY)
    axes.set_axis_off()


def mark_level(axes: Axes, value: float, text: str, color: str = GRAY) -> None:
    """Labels a horizontal line at the right edge of the axes."""
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axes.annotate(text, (1.0, value), (6, 0), va="center", fontsize=8.5, color=color, annotation_clip=False, **beside)


def legend(axes: Axes, **options: Any) -> None:
    """Adds a legend without a frame."""
    axes.legend(**{"frameon": False, "fontsize": 9, "labelcolor": INK, **options})


def scale_losses(axes: Axes, losses: Sequence[float]) -> None:
    """Makes the y axis logarithmic if the losses span a large range."""
    if min(losses) > 0.0 and max(losses) > _LOG_FROM * min(losses):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)


def shorten(name: str, longest: int = 24) -> str:
    """Returns a layer's name in at most `longest` characters. The middle is cut, since names differ at their ends."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
