"""One self-contained page for a run, a search or a comparison: tables and pictures in a single HTML file."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triaccel_ray.service.storage.layout import write_atomically

REPORT: Final = "report.html"

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.notice { border-left: 4px solid #D98200; background: #D9820018; padding: .6rem .9rem; }
.about th { font-weight: 600; } .about td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.sortable th { cursor: pointer; } .sortable th:hover { text-decoration: underline; }
th[aria-sort=ascending]::after { content: " \\2191"; } th[aria-sort=descending]::after { content: " \\2193"; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
table.sentences th, table.sentences td { text-align: left; }
table.sentences td:last-child { white-space: normal; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
pre { background: #8882; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; min-width: 36rem; background: white; border-radius: 4px; }
summary { cursor: pointer; padding: .3rem 0; } details { border-bottom: 1px solid #8884; }
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
"""Sorts a table by the column whose heading is clicked: numbers first, empty cells last."""

_HASH: Final = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY: Final = (
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    f"script-src 'sha256-{_HASH}'\">"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with text, a table, commands or pictures below it, in this order; each may be missing."""

    title: str = ""
    text: str = ""
    notice: str = ""
    """Text that must not be overlooked, above everything else."""
    about: Sequence[tuple[str, str]] = ()
    """Names and values, one below the other."""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    command: str = ""
    pictures: Sequence[Path] = ()
    folded: bool = False
    """Whether a reader opens it by its title: what there is much of."""

    has_sentences: bool = False
    """Whether cells of the table hold sentences, which wrap and begin at the left."""

    @property
    def lines(self) -> list[str]:
        """The rows of three cells, who, what and why, as sentences for a terminal."""
        return [f"{who} {what}: {why}" for who, what, why in self.rows]


def write_page(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Writes the page to `path` and returns it; pictures are embedded, so the file can be sent to anybody.

    The page loads nothing, and runs nothing but the script that sorts its tables, whatever it shows.
    """
    body = "\n".join(_section(section) for section in sections)
    page = (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8>\n{_POLICY}\n"
        f"<meta name=viewport content='width=device-width'>\n"
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{body}\n"
        f"<script>{_SCRIPT}</script>\n</html>\n"
    )
    write_atomically(path, page)
    return path


def _section(section: Section) -> str:
    title = html.escape(section.title)
    heading = f"<h2>{title}</h2>" if title else ""
    parts = [f"<details><summary>{title}</summary>" if section.folded else heading]
    if section.notice:
        parts.append(f"<p class=notice>{_lines(section.notice)}</p>")
    if section.about:
        rows = "\n".join(f"<tr><th>{html.escape(k)}</th><td>{_lines(v)}</td></tr>" for k, v in section.about)
        parts.append(f"<div class=wide><table class=about>{rows}</table></div>")
    if section.text:
        parts.append(f"<p>{_lines(section.text)}</p>")
    if section.rows:
        parts.append(_table(section))
    if section.command:
        parts.append(f"<pre>{html.escape(section.command)}</pre>")
    for picture in section.pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        name = html.escape(picture.stem)
        parts.append(f"<p class=wide><img alt='{name}' src='data:image/png;base64,{data}'></p>")
    if section.folded:
        parts.append("</details>")
    return "\n".join(parts)


def _table(section: Section) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in section.header)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in section.rows)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    kinds = ["sortable"] * (len(section.rows) > 1) + ["sentences"] * section.has_sentences
    kind = f" class='{' '.join(kinds)}'" if kinds else ""
    return f"<div class=wide><table{kind}><tr>{head}</tr>\n{body}</table></div>"


def _lines(text: str) -> str:
    return html.escape(text).replace("\n", "<br>\n")
