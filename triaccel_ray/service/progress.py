"""Progress on standard error: a live table on a terminal, a line for each epoch or result elsewhere."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.table import Table

from triaccel_ray.measure.score import ACCURACY, BYTES_PER_GB
from triaccel_ray.records.events import End, Epoch, Interruption, LogError, Record, Start, Tick, parse_event
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.units import format_bytes

MAX_LINES = 100
"""Epochs of a run that get a line; of more, every second, third, ... one does."""
MAX_ROWS = 15
"""Runs in the table: those under way first, then the best."""


@dataclass
class _Run:
    """The last records of one run."""

    start: Start | None = None
    epoch: Epoch | None = None
    end: End | None = None
    tick_line: bytes = b""
    """Read once it is shown: there are many, and each names every layer."""

    def take(self, record: Record) -> None:
        self.start = record if isinstance(record, Start) else self.start
        self.epoch = record if isinstance(record, Epoch) else self.epoch
        self.end = record if isinstance(record, End) else None  # whatever follows an end means that the run goes on

    @property
    def tick(self) -> Tick | None:
        with contextlib.suppress(LogError):  # none yet, or it is damaged, of which the report tells
            record = parse_event(self.tick_line, "the last tick").record
            return record if isinstance(record, Tick) else None
        return None

    @property
    def state(self) -> str:
        return self.end.status if self.end is not None else "starting" if self.start is None else "running"

    def setting(self, name: str) -> int:
        """Returns one of the numbers that the run was begun with; 0 where it is not known."""
        value = self.start.parameters.get(name) if self.start is not None else None
        return value if isinstance(value, int) else 0

    def memory(self, used_bytes: int) -> str:
        limit_bytes = self.setting("memory_limit_bytes")
        return format_bytes(used_bytes) + (f" of {format_bytes(limit_bytes)}" if limit_bytes else "")

    def judged(self, goal: Goal) -> float | None:
        return None if self.epoch is None else self.epoch.held_out(goal)

    def results(self, goal: Goal) -> str:
        """Returns the run's figures in one line: final ones, or those of its last epoch; empty where it has none."""
        last, judged = self.epoch, self.judged(goal)
        figures = self.end.results if self.end is not None else {}
        if "score" not in figures:
            if last is None or judged is None:
                return ""
            seconds, peak_gb = last.typical_seconds or last.seconds, last.peak_bytes / BYTES_PER_GB
            figures = {"score": last.score or 0.0, goal.name: judged, "seconds_per_epoch": seconds, "peak_gb": peak_gb}
        return (
            f"score {figures['score']:.4g}, {goal.named(figures[goal.name])}, "
            f"{figures['seconds_per_epoch']:.3g} s/epoch, {figures['peak_gb']:.4g} GB"
        )


class Progress:
    """What the logs of runs say, while these train anywhere: a terminal has no part in what trains them."""

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
        """Follows the runs of these names below `folder`, one folder a run; without names, all there.

        Without a terminal a run has a line at its end, and with `each_epoch` one for every epoch. `num_trials` is how
        many runs there will be, where that is known.
        """
        self._title, self._folder, self._names = title, folder, tuple(names)
        self._goal, self._each_epoch, self._num_trials = goal, each_epoch, num_trials
        self._runs = {name: _Run() for name in self._names}
        self._tails: dict[Path, LogTail] = {}
        self._said: set[int] = set()
        self._last_reason = ""
        self._err = console.err
        self._live: Live | None = None
        if self._err.is_terminal:
            self._live = Live(console=self._err, get_renderable=self._table, auto_refresh=False, transient=True)
        self._has_begun, self._stopping = False, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Shows the title at once, and starts following; what the logs hold already is not said again."""
        self._read()
        self._has_begun = True
        if self._live is None:
            self._say(self._title)
        else:
            self._live.start(refresh=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reads the logs to their ends, and takes the table away."""
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
            with contextlib.suppress(LogError):  # of a damaged log the report tells
                for lines in tail.blocks():
                    for line in lines:
                        self._take(path.parent.name, line)

    def _take(self, name: str, line: bytes) -> None:
        run = self._runs.setdefault(name, _Run())
        if b'"kind":"tick"' in line:
            run.tick_line = line
            return
        record, is_known = parse_event(line, name).record, hash(line) in self._said
        run.take(record)
        self._said.add(hash(line))
        if is_known or not self._has_begun:  # a log that was cut back is read once more
            return
        if isinstance(record, Interruption):
            self._say(f"{name}: {record.message}")
        elif isinstance(record, Epoch) and self._each_epoch:
            self._say_epoch(record, run)
        elif isinstance(record, End):
            self._say_end(name, record, run)

    def _say(self, line: str) -> None:
        if self._live is None:
            self._err.print(line, soft_wrap=True)

    def _say_epoch(self, epoch: Epoch, run: _Run) -> None:
        num_epochs, judged = run.setting("recipe.epochs"), run.judged(self._goal)
        if epoch.epoch not in (1, num_epochs) and epoch.epoch % max(math.ceil(num_epochs / MAX_LINES), 1):
            return
        parts = [
            f"epoch {epoch.epoch}" + (f"/{num_epochs}" if num_epochs else ""),
            f"loss {epoch.train_loss:.4f}",
            "" if judged is None else self._goal.named(judged),
            f"batch {epoch.batch_size}",
            _precisions(run.tick),
            run.memory(epoch.peak_bytes),
            f"{epoch.seconds:.3g} s",
        ]
        self._say(", ".join(filter(None, parts)))

    def _say_end(self, name: str, end: End, run: _Run) -> None:
        number = f"{self._num_ended}/{self._num_trials} " if self._num_trials else ""
        if end.status == "failed":
            reason = end.message.partition("\n")[0]
            self._say(f"{number}{name} failed: {'likewise' if reason == self._last_reason else reason}")
            self._last_reason = reason
        elif not self._each_epoch:
            when = f" after epoch {run.epoch.epoch}" if end.status == "stopped" and run.epoch is not None else ""
            self._say(f"{number}{name} {end.status}{when}: {run.results(self._goal)}".removesuffix(": "))

    @property
    def _num_ended(self) -> int:
        return sum(run.end is not None for run in self._runs.values())

    def _table(self) -> Table:
        num_runs = self._num_trials or len(self._runs)
        runs = list(self._runs.items())
        if len(runs) > MAX_ROWS:
            places = {"running": 0, "starting": 1, "finished": 2}  # a pruned trial's score is an early one
            runs.sort(key=lambda pair: (places.get(pair[1].state, 3), -_score(pair[1]), pair[0]))
        grid = Grid(
            header=("run", "state", "epoch", "samples/s", "batch", "memory", "layers", "validation", "score"),
            rows=[(name, run.state, *self._cells(run)) for name, run in runs[:MAX_ROWS]],
            title=self._title,
            note=f"{self._num_ended} of {num_runs} done" if num_runs > 1 else "",
            spare=("layers", "samples/s", "batch", "memory"),
        )
        return rich_table(grid, to=self._err)

    def _cells(self, run: _Run) -> list[str]:
        """Returns what the last tick says, where there is one, else the last epoch; nothing before the start."""
        if run.start is None:
            return [""] * 7
        tick, epoch = run.tick, run.epoch
        done, rate, batch, used_bytes = 0.0, 0.0, 0, 0
        if epoch is not None:
            done, rate, batch, used_bytes = epoch.epoch, epoch.images_per_second, epoch.batch_size, epoch.peak_bytes
        if tick is not None:
            seen = tick.observation
            done, batch = max(done, seen.epoch), tick.decision.plan.batch_size
            used_bytes = seen.memory.window_peak_bytes
            rate = 1e3 * seen.plan.batch_size / seen.step_ms if seen.step_ms else rate
        judged = run.judged(self._goal)
        return [
            f"{done:.1f}/{run.setting('recipe.epochs')}",
            f"{rate:,.0f}" if rate else "",
            str(batch or ""),
            run.memory(used_bytes) if used_bytes else "",
            _precisions(tick),
            "" if judged is None else self._goal.text(judged),
            f"{_score(run):.2f}" if _score(run) else "",
        ]


def _score(run: _Run) -> float:
    return (run.epoch.score or 0.0) if run.epoch is not None else 0.0


def _precisions(tick: Tick | None) -> str:
    """Returns how many layers compute in which precision."""
    levels = Counter(tick.decision.plan.precision.values()) if tick is not None else {}
    return " ".join(f"{levels[level]} {level.value}" for level in Precision if level in levels)
