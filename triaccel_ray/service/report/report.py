"""Views of results: the text and tables that a terminal shows, and one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from triaccel_ray.config import ControlConfig
from triaccel_ray.search_spaces.tuned import TunedThresholds
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.storage.layout import write_atomically

REPORT: Final = "report.html"

_HEAD: Final = """<!doctype html>
<html lang=en><meta charset=utf-8>
<meta name=viewport content='width=device-width'>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.notice { border-left: 4px solid #D98200; background: #D9820018; padding: .6rem .9rem; }
.sortable th { cursor: pointer; } .sortable th:hover { text-decoration: underline; }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.facts th { font-weight: 600; } .facts td { white-space: normal; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
pre { background: #8882; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; min-width: 36rem; background: white; border-radius: 4px; }
summary { cursor: pointer; padding: .3rem 0; } details { border-bottom: 1px solid #8884; }
</style>
"""

_SCRIPT: Final = """
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.rows[0].cells];
  const key = (row, column) => {
    const text = row.cells[column].textContent.replace(/[,<]/g, "").trim(), number = parseFloat(text);
    return {text, number, rank: text === "" ? 2 : Number.isNaN(number) ? 1 : 0};
  };
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    heads.forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const rows = [...table.rows].slice(1).map(row => [key(row, column), row]);
    rows.sort(([a], [b]) => a.rank - b.rank
      || sign * (a.rank === 0 ? a.number - b.number : a.text.localeCompare(b.text)));
    rows.forEach(([, row]) => row.parentNode.append(row));
  }));
}
"""
"""Sorts a table by the column whose heading the user clicks: numbers first, empty cells last."""

_HASH: Final = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY: Final = (
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_HASH}'\">\n"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading followed by notice, facts, text, table, command and pictures, in this order; each is optional.

    A section without content is not rendered.
    """

    title: str = ""
    notice: str = ""
    """Text that is highlighted."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text, rendered as a two-column table."""
    text: str = ""
    table: Grid | None = None
    command: str = ""
    pictures: Sequence[Path] = ()
    folded: bool = False
    """Whether the section is collapsed until the reader clicks its title; for long content."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The report of a run, search or comparison."""

    folder: Path
    shown: Sequence[str | Grid]
    """Texts and tables for a terminal, in order, separated by empty lines; empty texts are left out."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of the main table, by heading: a run's epochs, a search's trials, a comparison's methods."""
    page: Path
    """Path of the HTML page, which is already written."""
    command: str = ""
    """Recommended training command; empty if there is none."""
    control: ControlConfig | None = None
    """Configuration to train with: a run's own, a search's with its best thresholds, or a comparison's."""
    best: TunedThresholds | None = None
    """Best thresholds of a search; None if it has not found any, and for a run or comparison."""


def show(view: View, to: Console | None = None) -> None:
    """Prints the view to a terminal, by default standard output."""
    terminal = to or console.out
    for part in view.shown:
        if isinstance(part, Grid):
            terminal.print(rich_table(part, to=terminal), "", sep="\n")
        elif part:
            terminal.print(part, "", sep="\n", soft_wrap=True)
    terminal.print(f"page: {view.page}", soft_wrap=True)


def write_page(folder: Path, title: str, sections: Iterable[Section]) -> Path:
    """Writes the HTML page into `folder` and returns its path; pictures are embedded, so the file can be shared.

    A content security policy keeps the page from loading anything, and from running any script but its table sorter.
    """
    body = "\n".join(filter(None, map(_section, sections)))
    path = folder / REPORT
    head = f"{_HEAD}{_POLICY}<title>{escape(title)}</title>\n<h1>{escape(title)}</h1>"
    write_atomically(path, f"{head}\n{body}\n<script>{_SCRIPT}</script>\n</html>\n")
    return path


def _section(section: Section) -> str:
    body, title = "\n".join(_parts(section)), escape(section.title)
    if section.folded and body:
        return f"<details><summary>{title}</summary>\n{body}\n</details>"
    return f"<h2>{title}</h2>\n{body}" if title and body else body


def _parts(section: Section) -> Iterator[str]:
    if section.notice:
        yield f"<p class=notice>{_lines(section.notice)}</p>"
    if section.facts:
        rows = (f"<tr><th>{escape(name)}</th><td>{_lines(said)}</td></tr>" for name, said in section.facts.items())
        yield "\n".join(["<div class=wide><table class=facts>", *rows, "</table></div>"])
    if section.text:
        yield f"<p>{_lines(section.text)}</p>"
    if section.table is not None and section.table.rows:
        yield _table(section.table)
    if section.command:
        yield f"<pre>{escape(section.command)}</pre>"
    for picture in section.pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        yield f"<p class=wide><img alt='{escape(picture.stem)}' src='data:image/png;base64,{data}'></p>"


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in grid.header)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in grid.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    note = f"\n<p>{_lines(grid.note)}</p>" if grid.note else ""
    kind = " class=sortable" if len(grid.rows) > 1 else ""
    return f"<div class=wide><table{kind}><tr>{head}</tr>\n{body}</table></div>{note}"


def _lines(text: str) -> str:
    return escape(text).replace("\n", "<br>\n")
