"""Views of results: what a terminal shows, and one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Console

from triaccel_ray.config import ControlConfig
from triaccel_ray.search_spaces.tuned import TunedThresholds
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import TextTable
from triaccel_ray.service.storage.layout import REPORT, write_atomically

Part: TypeAlias = str | TextTable | Path
"""A text, a table, or the path of a picture."""
_HEAD: Final = """<!doctype html>
<html lang=en><meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
div { overflow-x: auto; } p { white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
img { max-width: 100%; min-width: 36rem; background: white; border-radius: 4px; }
</style>
"""
"""The policy keeps a page from loading anything, and from running any script."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The report of a run, search or comparison."""

    folder: Path
    title: str
    """Heading of the page."""
    parts: Sequence[Part]
    """What terminal and page show, in order; a terminal leaves pictures out, and empty texts and tables are no part."""
    details: Sequence[Part] = ()
    """What the page alone shows below."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of the main table, by heading: a run's epochs, a search's trials, a comparison's methods."""
    command: str = ""
    """Recommended training command; empty if there is none."""
    control: ControlConfig | None = None
    """Configuration to train with: a run's own, a search's with its best thresholds, or a comparison's."""
    best: TunedThresholds | None = None
    """Best thresholds of a search; None if it has not found any, and for a run or comparison."""

    @property
    def page(self) -> Path:
        """Path of the HTML page."""
        return self.folder / REPORT


def show(view: View, to: Console | None = None) -> None:
    """Prints the view to a terminal, by default standard output."""
    terminal = to or console.out
    for part in view.parts:
        if isinstance(part, TextTable):
            terminal.print(rich_table(part, to=terminal), "", sep="\n")
        elif part and isinstance(part, str):
            terminal.print(part, "", sep="\n", soft_wrap=True)
    terminal.print(f"page: {view.page}", soft_wrap=True)


def with_page(view: View) -> View:
    """Writes the HTML page of a view and returns the view; pictures are embedded, so the file can be shared."""
    title = escape(view.title)
    body = "\n".join(_html(part) for part in (*view.parts, *view.details) if part)
    write_atomically(view.page, f"{_HEAD}<title>{title}</title>\n<h1>{title}</h1>\n{body}\n</html>\n")
    return view


def _html(part: Part) -> str:
    if isinstance(part, Path):
        data = base64.b64encode(part.read_bytes()).decode()
        return f"<div><img alt='{escape(part.stem)}' src='data:image/png;base64,{data}'></div>"
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in part.header)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in part.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<div><table><tr>{head}</tr>\n{body}</table></div>" if part.rows else ""
    return f"<h2>{escape(part.title)}</h2>\n{table}\n<p>{escape(part.note)}</p>"
