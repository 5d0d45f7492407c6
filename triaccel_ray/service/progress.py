"""Progress on standard error: a live table on a terminal, a line for each epoch or result elsewhere."""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from triaccel_ray.measure.score import ACCURACY, BYTES_PER_GB
from triaccel_ray.records.events import End, Epoch, Interruption, LogError, Record, Start, Tick, parse_event
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service import console
from triaccel_ray.service.console import plain_table
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.units import format_bytes

MAX_LINES = 100
"""Epochs of a run that get a line; of more, every second, third, ... one does."""


class Progress(ABC):
    """A live table under a title on a terminal; elsewhere the title, and lines."""

    def __init__(self, title: str) -> None:
        """Begins empty."""
        self._title, self._err = title, console.err
        self._live = Live(console=self._err, refresh_per_second=4, transient=True) if self._err.is_terminal else None

    def __enter__(self) -> Self:
        """Shows the title at once."""
        if self._live is not None:
            self._live.start()
            self._refresh()
        else:
            self.say(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the table away again."""
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Shows a line where there is no terminal."""
        if self._live is None:
            self._err.print(line, soft_wrap=True)

    def _refresh(self) -> None:
        if self._live is not None:
            table = self._table()
            table.title = self._title
            self._live.update(table, refresh=True)

    @abstractmethod
    def _table(self) -> Table: ...


class LogProgress(Progress):
    """What the logs of runs say, while these train anywhere: a terminal has no part in what trains them."""

    def __init__(self, title: str, folder: Path, names: Iterable[str] = ()) -> None:
        """Follows the logs of the runs of these names below `folder`, one folder a run; without names, all there."""
        super().__init__(title)
        self._folder, self._names = folder, tuple(names)
        self._tails: dict[Path, LogTail] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Starts following."""
        super().__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reads the logs to their ends, and takes the table away."""
        self._stopping.set()
        self._thread.join()
        super().__exit__(kind, error, trace)

    def _follow(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(1.0)
            self._read()
            self._refresh()

    def _read(self) -> None:
        paths = [self._folder / name / EVENTS for name in self._names] or sorted(self._folder.glob(f"*/{EVENTS}"))
        for path in paths:
            tail = self._tails.setdefault(path, LogTail(path))
            with contextlib.suppress(LogError):  # of a damaged log the report tells
                for lines in tail.blocks():
                    for line in lines:
                        self._take(path.parent.name, line)

    @abstractmethod
    def _take(self, name: str, line: bytes) -> None: ...


@dataclass
class _Known:
    """The last records of one run."""

    start: Start | None = None
    epoch: Epoch | None = None
    end: End | None = None
    tick_line: bytes = b""
    """Read once it is shown: there are many, and each names every layer."""

    def take(self, record: Record) -> None:
        """Takes in a record; whatever follows an end means that the run goes on."""
        self.end = None
        if isinstance(record, Start):
            self.start = record
        elif isinstance(record, Epoch):
            self.epoch = record
        elif isinstance(record, End):
            self.end = record

    @property
    def tick(self) -> Tick | None:
        """The last one; None before there is one."""
        with contextlib.suppress(LogError):  # likewise none where it is damaged, of which the report tells
            record = parse_event(self.tick_line, "the last tick").record
            return record if isinstance(record, Tick) else None
        return None

    def setting(self, name: str) -> int:
        """Returns one of the numbers that the run was begun with; 0 where it is not known."""
        value = self.start.parameters.get(name) if self.start is not None else None
        return value if isinstance(value, int) else 0

    @property
    def num_epochs(self) -> int:
        """How many there are to be."""
        return self.setting("recipe.epochs")

    @property
    def limit(self) -> str:
        """The memory that the run may take, for people."""
        limit_bytes = self.setting("memory_limit_bytes")
        return f" of {format_bytes(limit_bytes)}" if limit_bytes else ""

    @property
    def precisions(self) -> str:
        """How many layers compute in which precision, as far as ticks have told."""
        tick = self.tick
        levels = Counter(tick.decision.plan.precision.values()) if tick is not None else {}
        return " ".join(f"{levels[level]} {level.value}" for level in Precision if level in levels)


class RunProgress(LogProgress):
    """Epochs, samples per second, batch size, memory against the limit and precisions of a set of runs."""

    def __init__(
        self,
        title: str,
        folder: Path,
        names: Iterable[str] = (),
        *,
        goal: Goal = ACCURACY,
        each_epoch: bool = False,
    ) -> None:
        """Lists the runs of these names as waiting, or all that there are below `folder`.

        Without a terminal a run has a line at its end, and with `each_epoch` one for every epoch.
        """
        super().__init__(title, folder, names)
        self._runs = {name: _Known() for name in self._names}
        self._goal, self._each_epoch = goal, each_epoch
        self._said: set[int] = set()
        self._is_new = False
        self._last_reason = ""

    def __enter__(self) -> Self:
        """Starts following; what the logs hold already is not said again."""
        self._read()
        self._is_new = True
        return super().__enter__()

    def _take(self, name: str, line: bytes) -> None:
        known = self._runs.setdefault(name, _Known())
        if b'"kind":"tick"' in line:
            known.tick_line = line
            return
        record, is_known = parse_event(line, name).record, hash(line) in self._said
        known.take(record)
        self._said.add(hash(line))
        if is_known or not self._is_new:  # a log that was cut back is read once more
            return
        if isinstance(record, Interruption):
            self.say(f"{name}: {record.message}")
        elif isinstance(record, Epoch) and self._each_epoch:
            self._say_epoch(record, known)
        elif isinstance(record, End) and record.status == "failed":
            reason = record.message.partition("\n")[0]
            self.say(f"{name} failed: {'likewise' if reason == self._last_reason else reason}")
            self._last_reason = reason
        elif isinstance(record, End) and record.status == "finished" and not self._each_epoch:
            self.say(f"{name} finished: {_figures(record.results, self._goal)}")

    def _say_epoch(self, epoch: Epoch, known: _Known) -> None:
        num_epochs, judged = known.num_epochs, epoch.held_out(self._goal)
        if epoch.epoch not in (1, num_epochs) and epoch.epoch % max(math.ceil(num_epochs / MAX_LINES), 1):
            return
        parts = [
            f"epoch {epoch.epoch}" + (f"/{num_epochs}" if num_epochs else ""),
            f"loss {epoch.train_loss:.4f}",
            *([] if judged is None else [self._goal.named(judged)]),
            f"batch {epoch.batch_size}",
            *([known.precisions] if known.precisions else []),
            format_bytes(epoch.peak_bytes) + known.limit,
            f"{epoch.seconds:.3g} s",
        ]
        self.say(", ".join(parts))

    def _table(self) -> Table:
        table = plain_table("run", "epoch", "", "samples/s", "batch", "memory", "layers", "validation")
        for name, known in self._runs.items():
            tick, epoch = known.tick, known.epoch
            if known.end is not None and known.end.status == "failed":
                table.add_row(name, Text("failed", style="red"), *[""] * 6)
                continue
            if known.start is None:
                table.add_row(name, "starting", *[""] * 6)
                continue
            done = max(0 if tick is None else tick.observation.epoch, 0 if epoch is None else epoch.epoch)
            rate, batch, used_bytes = 0.0, 0, 0
            if epoch is not None:
                rate, batch, used_bytes = epoch.images_per_second, epoch.batch_size, epoch.peak_bytes
            if tick is not None:
                seen = tick.observation
                batch, used_bytes = tick.decision.plan.batch_size, seen.memory.window_peak_bytes
                rate = 1e3 * seen.plan.batch_size / seen.step_ms if seen.step_ms else rate
            judged = None if epoch is None else epoch.held_out(self._goal)
            table.add_row(
                name,
                f"{done:.1f}/{known.num_epochs}",
                _bar(done / max(known.num_epochs, 1)),
                f"{rate:,.0f}" if rate else "",
                str(batch or ""),
                f"{format_bytes(used_bytes)}{known.limit}" if used_bytes else "",
                known.precisions,
                "" if judged is None else self._goal.text(judged),
            )
        return table


class TrialProgress(LogProgress):
    """The trials of a search."""

    def __init__(self, title: str, num_trials: int, folder: Path, objective: Objective) -> None:
        """Follows the logs below `folder`, one folder a trial, judged by `objective`."""
        super().__init__(title, folder)
        self._num_trials, self._objective = num_trials, objective
        self._last: dict[str, Epoch] = {}
        self._states: dict[str, str] = {}

    def _take(self, name: str, line: bytes) -> None:
        self._states.setdefault(name, "running")
        if b'"kind":"epoch"' not in line and b'"kind":"end"' not in line:
            return
        record = parse_event(line, name).record
        if isinstance(record, Epoch):
            self._last[name], self._states[name] = record, "running"
        elif isinstance(record, End):
            self._states[name] = record.status
            self.say(f"{self._num_ended}/{self._num_trials} {name} {self._outcome(name, record)}")

    def _outcome(self, name: str, end: End) -> str:
        """Returns how a trial ended, with its figures and the reason."""
        last = self._last.get(name)
        if end.status == "failed":
            return f"failed: {end.message}"
        goal = self._objective.goal
        metric = None if last is None else last.held_out(goal)
        if last is None or metric is None:
            return end.status
        so_far = {
            "score": last.score or 0.0,
            goal.name: metric,
            "seconds_per_epoch": last.seconds,
            "peak_gb": last.peak_bytes / BYTES_PER_GB,
        }
        figures = f"{_figures(end.results or so_far, goal)}, batch {last.batch_size}"
        shortfall = self._objective.shortfall(last.epoch, metric)
        unit = "points" if goal.unit == "%" else "percent"
        why = f"; {shortfall:.2f} {unit} of {goal.words} beyond the margin" if shortfall else ""
        if end.status == "stopped":
            why = why or f"; others had more at epoch {last.epoch}"
            return f"stopped after epoch {last.epoch}: {figures}{why}"
        return f"{end.status}: {figures}{why}"

    @property
    def _num_ended(self) -> int:
        return sum(state != "running" for state in self._states.values())

    def _table(self) -> Table:
        table = plain_table(
            "trial", "state", "epoch", self._objective.goal.heading, "seconds", "batch", "peak GB", "score"
        )
        # Running trials always, of the others the best that fit a small screen; a pruned one's score is an early one.
        places = {"running": 0, "finished": 1}
        order = sorted(self._states, key=lambda name: (places.get(self._states[name], 2), -self._score(name), name))
        for name in order[:15]:
            last = self._last.get(name)
            cells = [""] * 6
            if last is not None:
                metric = last.held_out(self._objective.goal)
                judged = "" if metric is None else self._objective.goal.cell(metric)
                cells = [str(last.epoch), judged, f"{last.seconds:.2f}", str(last.batch_size)]
                cells += [f"{last.peak_bytes / BYTES_PER_GB:.3f}", f"{last.score or 0.0:.2f}"]
            table.add_row(name, self._states[name], *cells)
        table.caption = f"{self._num_ended} of {self._num_trials} trials done"
        return table

    def _score(self, name: str) -> float:
        last = self._last.get(name)
        return (last.score or 0.0) if last is not None else 0.0


def _figures(results: Mapping[str, float], goal: Goal) -> str:
    """Returns a run's results in one line."""
    return (
        f"score {results['score']:.4g}, {goal.named(results[goal.name])}, "
        f"{results['seconds_per_epoch']:.3g} s/epoch, {results['peak_gb']:.4g} GB"
    )


def _bar(share: float, width: int = 12) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
