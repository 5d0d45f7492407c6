"""Terminal output: results on standard output, progress and messages on standard error, tables that fit."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from triaccel_ray.service.report.tables import TextTable

_COMMANDS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""Control characters and escape sequences that a terminal would act on, except color codes."""


class SafeConsole(Console):
    """A console that prints text literally: neither markup nor terminal escape sequences take effect."""

    def __init__(self, **options: Any) -> None:
        """Takes the other options of a console."""
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text, with U+FFFD in place of each control character."""
        return super().render_str(_COMMANDS.sub("\ufffd", text), **options)


out = SafeConsole(width=None if sys.stdout.isatty() else 200)
"""Results: standard output."""
err = SafeConsole(stderr=True)
"""Progress and messages: standard error, so that results can be piped."""


def rich_table(text_table: TextTable, *, to: Console | None = None) -> Table:
    """Returns the table for a terminal; if it is too wide, whole columns are dropped and no word is cut."""
    terminal = to or out
    for num_left_out in range(len(text_table.droppable) + 1):
        left_out = text_table.droppable[:num_left_out]
        table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", caption_justify="left")
        for index, name in enumerate(text_table.header):
            if name not in left_out:
                is_right = index > 0 and text_table.has_numbers(index)
                table.add_column(name, justify="right" if is_right else "left", no_wrap=True)
        for row in text_table.rows:
            table.add_row(*(cell for name, cell in zip(text_table.header, row, strict=True) if name not in left_out))
        if terminal.measure(table, options=terminal.options.update_width(10_000)).maximum <= terminal.width:
            break
    notes = [
        text_table.note,
        f"too wide for this terminal, so left out: {', '.join(left_out)}; the page has them" if left_out else "",
    ]
    table.min_width = min(len(text_table.title), terminal.width)  # a title wraps at its table's width
    table.title, table.caption = text_table.title or None, "\n".join(filter(None, notes)) or None
    return table
