"""Progress on standard error: a live table on a terminal, otherwise one line per epoch or result."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.live import Live
from rich.table import Table

from triaccel_ray.measure.score import ACCURACY
from triaccel_ray.records.events import End, Epoch, Interruption, LogError, Start, Throughput, Tick, parse_event
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import figures_of
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.units import format_bytes

MAX_LINES = 100
"""Epochs of a run that are printed one by one; of longer runs every second, third, ... epoch is printed."""
MAX_ROWS = 15
"""Runs shown in the table: running ones first, then the best."""
_STATE_RANKS = {"running": 0, "starting": 1, "finished": 2}
"""State -> rank in the table; other states come last, since the score of a pruned trial is an early one."""
HEADER = ("epoch", "samples/s", "batch", "memory", "layers", "loss", "held out", "score")


@dataclass
class _Run:
    """The last records of one run."""

    start: Start | None = None
    epoch: Epoch | None = None
    throughput: Throughput | None = None
    end: End | None = None
    tick_line: bytes = b""
    """Last tick as text, parsed only when shown: ticks are many, and each names every layer."""

    @property
    def tick(self) -> Tick | None:
        with contextlib.suppress(LogError):  # none yet, or damaged, which the report shows
            record = parse_event(self.tick_line, "the last tick").record
            return record if isinstance(record, Tick) else None
        return None

    @property
    def state(self) -> str:
        if self.end is not None:
            return self.end.status
        return "starting" if self.start is None else "running"

    def setting(self, name: str) -> int:
        """Returns an integer parameter from the start record of the run; 0 if it is unknown."""
        value = self.start.parameters.get(name) if self.start is not None else None
        return value if isinstance(value, int) else 0

    def figures(self, goal: Goal) -> Figures | None:
        """Returns the final figures, or those of the last epoch; None if the run was not evaluated yet."""
        epochs = [] if self.epoch is None else [self.epoch]
        return figures_of(epochs, goal, {} if self.end is None else self.end.results)

    def cells(self, goal: Goal) -> list[str]:
        """Returns the texts below HEADER, from the last tick or the last epoch, whichever is newer."""
        epoch, tick, figures = self.epoch, self.tick, self.figures(goal)
        done, rate, batch, used_bytes = 0.0, 0.0, 0, 0
        if epoch is not None:
            done, rate, batch, used_bytes = epoch.epoch, epoch.images_per_second, epoch.batch_size, epoch.peak_bytes
        if tick is not None and tick.observation.epoch > done:
            seen = tick.observation
            done, batch, used_bytes = seen.epoch, tick.decision.plan.batch_size, seen.memory.window_peak_bytes
            rate = 1e3 * seen.plan.batch_size / seen.step_ms if seen.step_ms else rate
        if self.throughput is not None:
            ms, batch, used_bytes = (
                self.throughput.ms_per_sample,
                self.throughput.batch_size,
                self.throughput.peak_bytes,
            )
            rate = 1e3 / ms if ms else 0.0
        limit_bytes = self.setting("memory_limit_bytes")
        memory = format_bytes(used_bytes)
        if limit_bytes:
            memory += f" of {format_bytes(limit_bytes)}"
        levels = Counter(tick.decision.plan.precision.values()) if tick is not None else {}
        return [
            f"{done:.1f}/{self.setting('recipe.epochs')}" if done else "",
            f"{rate:,.0f}" if rate else "",
            str(batch or ""),
            memory if used_bytes else "",
            " ".join(f"{levels[level]} {level.value}" for level in Precision if level in levels),
            "" if epoch is None else f"{epoch.train_loss:.4f}",
            "" if figures is None else goal.named(figures.metric),
            "" if figures is None else f"{figures.score:.2f}",
        ]


class Progress:
    """Shows the progress of runs from their event logs, wherever they train; the runs do not depend on it."""

    def __init__(
        self,
        title: str,
        folder: Path,
        names: Iterable[str] = (),
        *,
        goal: Goal = ACCURACY,
        each_epoch: bool = False,
        num_trials: int = 0,
    ) -> None:
        """Follows the runs `names` below `folder`, one folder per run; without names, all runs there.

        Without a terminal, each run prints a line at its end, and with `each_epoch` one per epoch. `num_trials` is the
        expected number of runs; 0 if it is unknown.
        """
        self._title, self._folder, self._names = title, folder, tuple(names)
        self._goal, self._each_epoch, self._num_trials = goal, each_epoch, num_trials
        self._runs = {name: _Run() for name in self._names}
        self._tails: dict[Path, LogTail] = {}
        self._seen: set[int] = set()
        self._last_reason = ""
        self._err = console.err
        self._live: Live | None = None
        if self._err.is_terminal:
            self._live = Live(console=self._err, get_renderable=self._table, auto_refresh=False, transient=True)
        self._has_begun, self._stopping = False, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Shows the title at once and starts following; records already in the logs are not printed."""
        self._read()
        self._has_begun = True
        self._print_line(self._title)
        try:
            if self._live is not None:
                self._live.start(refresh=True)
            self._thread.start()
        except BaseException:  # Ctrl-C: `__exit__` is not called
            if self._live is not None:
                self._live.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Reads the logs to their ends and removes the table."""
        self._stopping.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _follow(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(1.0)
            self._read()
            if self._live is not None:
                self._live.refresh()

    def _read(self) -> None:
        paths = [self._folder / name / EVENTS for name in self._names] or sorted(self._folder.glob(f"*/{EVENTS}"))
        for path in paths:
            tail = self._tails.setdefault(path, LogTail(path))
            with contextlib.suppress(LogError):  # the report shows that a log is damaged
                for lines in tail.blocks():
                    for line in lines:
                        self._process_line(path.parent.name, line)

    def _process_line(self, name: str, line: bytes) -> None:
        run = self._runs.setdefault(name, _Run())
        if b'"kind":"tick"' in line:
            run.tick_line = line
            return
        record = parse_event(line, name).record
        run.end = None  # any record after an end means that the run was resumed
        match record:
            case Start():
                run.start = record
            case Epoch():
                run.epoch = record
            case Throughput():
                run.throughput = record
            case End():
                run.end, run.throughput = record, None  # the size timed last is not the result
        key = hash((name, line))
        is_known = key in self._seen  # a truncated log is read again
        self._seen.add(key)
        if is_known or not self._has_begun:
            return
        if isinstance(record, Interruption):
            self._print_line(f"{name}: {record.message}")
        elif isinstance(record, Throughput):
            self._print_line(self._row_as_text(run))
        elif isinstance(record, Epoch) and self._each_epoch:
            num_epochs = run.setting("recipe.epochs")
            interval = max(math.ceil(num_epochs / MAX_LINES), 1)
            if record.epoch in (1, num_epochs) or record.epoch % interval == 0:
                self._print_line(self._row_as_text(run))
        elif isinstance(record, End):
            self._print_end(name, record, run)

    def _print_end(self, name: str, end: End, run: _Run) -> None:
        counter = f"{self._num_ended}/{self._num_trials} " if self._num_trials else ""
        text = self._row_as_text(run)
        if end.status == "failed":
            reason = end.message.partition("\n")[0]
            text = "likewise" if reason == self._last_reason else reason
            self._last_reason = reason
        self._print_line(f"{counter}{name} {end.status}: {text}".removesuffix(": "))

    def _print_line(self, line: str) -> None:
        if self._live is None:
            self._err.print(line, soft_wrap=True)

    def _row_as_text(self, run: _Run) -> str:
        """Returns the run's row of the table, as one line."""
        return ", ".join(f"{name} {text}" for name, text in zip(HEADER, run.cells(self._goal), strict=True) if text)

    @property
    def _num_ended(self) -> int:
        return sum(run.end is not None for run in self._runs.values())

    def _table(self) -> Table:
        num_runs = self._num_trials or len(self._runs)
        runs = list(self._runs.items())
        if len(runs) > MAX_ROWS:
            runs.sort(key=self._rank)
        grid = Grid(
            header=("run", "state", *HEADER),
            rows=[(name, run.state, *run.cells(self._goal)) for name, run in runs[:MAX_ROWS]],
            title=self._title,
            note=f"{self._num_ended} of {num_runs} done" if num_runs > 1 else "",
            spare=("layers", "loss", "samples/s", "batch", "memory"),
        )
        return rich_table(grid, to=self._err)

    def _rank(self, item: tuple[str, _Run]) -> tuple[int, float, str]:
        name, run = item
        figures = run.figures(self._goal)
        return _STATE_RANKS.get(run.state, 3), 0.0 if figures is None else -figures.score, name
