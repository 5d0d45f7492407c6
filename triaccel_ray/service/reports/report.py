"""One self-contained page for a run, a search or a comparison: tables and pictures in a single HTML file."""

from __future__ import annotations

import base64
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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.wide { overflow-x: auto; }
pre { background: #8882; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; min-width: 36rem; background: white; border-radius: 4px; }
summary { cursor: pointer; padding: .3rem 0; } details { border-bottom: 1px solid #8884; }
"""


_POLICY: Final = (
    "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with text, a table, commands or pictures below it, in this order; each may be missing."""

    title: str
    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    command: str = ""
    pictures: Sequence[Path] = ()
    folded: bool = False
    """Whether a reader opens it by its title: what there is much of."""


def write_page(path: Path, title: str, sections: Sequence[Section]) -> Path:
    """Writes the page to `path` and returns it; pictures are embedded, so the file can be sent to anybody.

    The page forbids itself to load or run anything, whatever names and messages it shows.
    """
    body = "\n".join(_section(section) for section in sections)
    page = (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8>\n{_POLICY}\n"
        f"<meta name=viewport content='width=device-width'>\n"
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>\n{body}\n</html>\n"
    )
    write_atomically(path, page)
    return path


def _section(section: Section) -> str:
    title = html.escape(section.title)
    parts = [f"<details><summary>{title}</summary>" if section.folded else f"<h2>{title}</h2>"]
    if section.text:
        parts.append(f"<p>{html.escape(section.text)}</p>")
    if section.rows:
        parts.append(_table(section.header, section.rows))
    if section.command:
        parts.append(f"<pre>{html.escape(section.command)}</pre>")
    for picture in section.pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        name = html.escape(picture.stem)
        parts.append(f"<p class=wide><img alt='{name}' src='data:image/png;base64,{data}'></p>")
    if section.folded:
        parts.append("</details>")
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{head}</tr>\n{body}</table></div>"
