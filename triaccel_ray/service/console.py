"""What a person sees in the terminal: progress while work goes on, tables when it is done."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triaccel_ray.events import End, Epoch, LogError, parse_event
from triaccel_ray.score import BYTES_PER_GB
from triaccel_ray.service.reports.tables import Grid
from triaccel_ray.service.runs.runs import Glance
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.units import format_bytes

_COMMANDS = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")
"""What a terminal takes for orders rather than text, colours left out."""


class SafeConsole(Console):
    """Shows names and messages as they are: nothing in them is markup, nor an order to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns the text, with a replacement character in place of each order."""
        return super().render_str(_COMMANDS.sub("\ufffd", text), **options)


out = SafeConsole(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200)
"""Results: standard output."""
err = SafeConsole(highlight=False, markup=False, emoji=False, stderr=True)
"""Progress and messages: standard error, so that results can be piped."""


class Progress:
    """A live table on standard error; nothing at all where that is not a terminal."""

    def __init__(self, title: str) -> None:
        """Begins empty."""
        self._title = title
        self._live = Live(console=err, refresh_per_second=4, transient=True) if err.is_terminal else None

    def __enter__(self) -> Self:
        """Starts showing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the table away again."""
        if self._live is not None:
            self._live.stop()

    def show(self, table: Table) -> None:
        """Replaces what is shown."""
        if self._live is not None:
            table.title = self._title
            self._live.update(table)


class RunProgress(Progress):
    """Epochs, images per second, batch size, memory against the limit and precisions of a set of runs."""

    def __init__(self, title: str, names: Iterable[str] = ()) -> None:
        """Lists the runs of these names as waiting; others are added when something is known of them."""
        super().__init__(title)
        self._glances: dict[str, Glance] = {name: Glance(name=name) for name in names}

    def update(self, glance: Glance) -> None:
        """Takes in what is newly known of one run."""
        before = self._glances.get(glance.name, glance)
        self._glances[glance.name] = Glance(
            name=glance.name,
            status=glance.status or before.status,
            last=glance.last or before.last,
            results=glance.results or before.results,
            error=glance.error or before.error,
        )
        self.show(self._table())

    def _table(self) -> Table:
        table = _plain_table("run", "epoch", "", "images/s", "batch", "memory", "layers", "val. acc.")
        for name, glance in self._glances.items():
            status = glance.status
            if glance.error is not None:
                table.add_row(name, Text("failed", style="red"), *[""] * 6)
            elif status is None:
                table.add_row(name, "waiting", *[""] * 6)
            else:
                num_epochs = status.num_epochs
                done = num_epochs if glance.results is not None else status.epoch
                table.add_row(
                    name,
                    f"{done:.1f}/{num_epochs}",
                    _bar(done / max(num_epochs, 1)),
                    f"{status.images_per_second:,.0f}",
                    str(status.batch_size),
                    f"{format_bytes(status.used_bytes)} of {format_bytes(status.limit_bytes)}",
                    _precisions(status.layers_per_precision),
                    "" if status.accuracy is None else f"{status.accuracy:.2f} %",
                )
        return table


class TrialProgress(Progress):
    """The trials of a search, read from their logs: whatever schedules them, a terminal has no part in it."""

    def __init__(self, title: str, num_trials: int, folder: Path) -> None:
        """Follows the logs below `folder`, one folder a trial."""
        super().__init__(title)
        self._num_trials, self._folder = num_trials, folder
        self._tails: dict[Path, LogTail] = {}
        self._last: dict[str, Epoch] = {}
        self._states: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trial-progress", daemon=True)

    def __enter__(self) -> Self:
        """Starts following, where there is a terminal."""
        super().__enter__()
        if self._live is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops following, and takes the table away."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        super().__exit__(kind, error, trace)

    def _follow(self) -> None:
        while not self._stopping.wait(1.0):
            for path in self._folder.glob(f"*/{EVENTS}"):
                tail = self._tails.setdefault(path, LogTail(path))
                with contextlib.suppress(LogError):  # of a damaged log the report tells
                    for lines in tail.blocks():
                        for line in lines:
                            self._take(path.parent.name, line)
            self.show(self._table())

    def _take(self, name: str, line: bytes) -> None:
        self._states.setdefault(name, "running")
        if b'"kind":"epoch"' not in line and b'"kind":"end"' not in line:
            return
        record = parse_event(line, name).record
        if isinstance(record, Epoch):
            self._last[name], self._states[name] = record, "running"
        elif isinstance(record, End):
            self._states[name] = record.status

    def _table(self) -> Table:
        table = _plain_table("trial", "state", "epoch", "accuracy %", "seconds", "batch", "peak GB", "score")
        # Running trials always, of the others the best that fit a small screen; a pruned one's score is an early one.
        places = {"running": 0, "finished": 1}
        order = sorted(self._states, key=lambda name: (places.get(self._states[name], 2), -self._score(name), name))
        for name in order[:15]:
            last = self._last.get(name)
            cells = [""] * 6
            if last is not None:
                accuracy = "" if last.held_out_accuracy is None else f"{last.held_out_accuracy:.2f}"
                cells = [str(last.epoch), accuracy, f"{last.seconds:.2f}", str(last.batch_size)]
                cells += [f"{last.peak_bytes / BYTES_PER_GB:.3f}", f"{last.score or 0.0:.2f}"]
            table.add_row(name, self._states[name], *cells)
        ended = sum(state != "running" for state in self._states.values())
        table.caption = f"{ended} of {self._num_trials} trials done"
        return table

    def _score(self, name: str) -> float:
        last = self._last.get(name)
        return (last.score or 0.0) if last is not None else 0.0


def rich_table(grid: Grid, *, title: str = "") -> Table:
    """Returns the grid for the terminal; what is too wide for it loses whole columns, not the ends of words."""
    for num_left_out in range(len(grid.spare) + 1):
        left_out = grid.spare[:num_left_out]
        table = _plain_table(*(name for name in grid.header if name not in left_out))
        for row in grid.rows:
            table.add_row(*(cell for name, cell in zip(grid.header, row, strict=True) if name not in left_out))
        if out.measure(table, options=out.options.update_width(10_000)).maximum <= out.width:
            break
    notes = [grid.note, f"left out for want of width: {', '.join(left_out)}; the page has them" if left_out else ""]
    table.min_width = min(len(title), out.width)  # a title wraps at its table's width
    table.title, table.caption = title or None, "\n".join(filter(None, notes)) or None
    return table


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def _precisions(counts: Mapping[str, int]) -> str:
    return " ".join(f"{count} {name}" for name, count in counts.items() if count)


def _bar(share: float, width: int = 12) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
