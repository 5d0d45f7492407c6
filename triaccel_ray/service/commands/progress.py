"""Progress on standard error: a line per epoch or batch size, and one at the end of each run."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from triaccel_ray.records.events import End, Epoch, Interruption, LogError, Start, Throughput, Tick, parse_event
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.console import err
from triaccel_ray.service.runs.record import performance_of
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_position import Position, TruncatedLogError, lines_after
from triaccel_ray.service.units import format_bytes
from triaccel_ray.trainables.task import Purpose


@dataclass
class _Run:
    """The last records of one run."""

    start: Start
    epoch: Epoch | None = None
    tick_line: bytes = b""
    """Last tick as text, parsed only when shown: ticks are many, and each names every layer."""
    has_ended: bool = False

    @property
    def num_epochs(self) -> int:
        """Epochs that the run is to train; 0 if its log does not say."""
        return int(self.start.parameters.get("recipe.epochs") or 0)

    def line(self, epoch: Epoch) -> str:
        """Returns the figures of the last epoch as text."""
        parts = (
            self.epoch_text(epoch),
            self.step_text(epoch.images_per_second, epoch.batch_size, epoch.peak_bytes),
            self._layers(),
            f"loss {epoch.train_loss:.4f}",
            self.judged(epoch),
        )
        return ", ".join(filter(None, parts))

    def epoch_text(self, epoch: Epoch) -> str:
        """Returns the number of the epoch as text."""
        return f"epoch {epoch.epoch}/{self.num_epochs}"

    def step_text(self, rate: float, batch_size: int, used_bytes: int) -> str:
        """Returns samples per second, batch size and memory as text."""
        limit_bytes = int(self.start.parameters.get("memory_limit_bytes") or 0)
        limit = f" of {format_bytes(limit_bytes)}" if limit_bytes else ""
        speed = f"samples/s {rate:,.0f}, " if rate else ""
        return f"{speed}batch {batch_size}, memory {format_bytes(used_bytes)}{limit}"

    def _layers(self) -> str:
        with contextlib.suppress(LogError):  # none yet, or damaged, which the report shows
            tick = parse_event(self.tick_line, "the last tick").record
            assert isinstance(tick, Tick)
            levels = Counter(tick.decision.plan.precision.values())
            return "layers " + " ".join(f"{levels[level]} {level.value}" for level in Precision if level in levels)
        return ""

    def judged(self, epoch: Epoch, results: Mapping[str, float] = MappingProxyType({})) -> str:
        """Returns metric and score on held-out samples as text, those of `results` if it has them; empty without."""
        performance = performance_of(epoch, self.start.goal, results)
        if performance is None:
            return ""
        samples = "test" if self.start.info.get("purpose") == Purpose.FINAL.value else "held out"
        return f"{samples} {self.start.goal.named(performance.metric)}, score {performance.score:.2f}"


class ProgressPrinter:
    """Prints the progress of runs from their event logs, wherever they train; the runs do not depend on it."""

    def __init__(self, title: str, folder: Path, names: Iterable[str] = (), *, num_trials: int = 0) -> None:
        """Follows the runs `names` below `folder`, one folder per run; without names, all runs there.

        Of a single run about 100 epochs are printed at most, of each of several 5: every second, third, ... of a longer
        one. `num_trials` is the expected number of runs; 0 if it is unknown.
        """
        self._title, self._folder, self._names, self._num_trials = title, folder, tuple(names), num_trials
        self._max_epochs = 100 if len(self._names) == 1 else 5
        self._runs: dict[str, _Run] = {}
        self._positions: dict[Path, Position] = {}
        self._seen: set[int] = set()
        self._has_begun, self._stopping = False, threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Prints the title at once and starts following; records already in the logs are not printed."""
        self._read()
        self._has_begun = True
        self._print(self._title)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Reads the logs to their ends."""
        self._stopping.set()
        self._thread.join()

    def _follow(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(1.0)
            self._read()

    def _read(self) -> None:
        paths = [self._folder / name / EVENTS for name in self._names] or sorted(self._folder.glob(f"*/{EVENTS}"))
        for path in filter(Path.exists, paths):
            with contextlib.suppress(LogError):  # the report shows that a log is damaged
                try:
                    self._read_log(path, self._positions.get(path, Position()))
                except TruncatedLogError:
                    self._read_log(path, Position())

    def _read_log(self, path: Path, position: Position) -> None:
        for lines in lines_after(position, path):
            for line in lines:
                self._process_line(path.parent.name, line)
            position = self._positions[path] = position.after(lines)

    def _process_line(self, name: str, line: bytes) -> None:
        run = self._runs.get(name)
        if run is not None and b'"kind":"tick"' in line:
            run.tick_line = line
            return
        record = parse_event(line, name).record
        if isinstance(record, Start):
            run = self._runs[name] = _Run(record)
        if run is None:  # the log has lost its beginning
            return
        run.has_ended = isinstance(record, End)  # any record after an end means that the run was resumed
        if isinstance(record, Epoch):
            run.epoch = record
        key = hash((name, line))
        is_known = key in self._seen  # a truncated log is read again
        self._seen.add(key)
        if is_known or not self._has_begun:
            return
        prefix = "" if len(self._names) == 1 else f"{name}: "
        match record:
            case Interruption():
                self._print(f"{name}: {record.message}")
            case Throughput():
                rate = 1e3 / record.ms_per_sample if record.ms_per_sample else 0.0
                self._print(prefix + run.step_text(rate, record.batch_size, record.peak_bytes))
            case Epoch():
                every = max(math.ceil(run.num_epochs / self._max_epochs), 1)
                if record.epoch in (1, run.num_epochs) or record.epoch % every == 0:
                    self._print(prefix + run.line(record))
            case End():
                self._print_end(name, record, run)

    def _print_end(self, name: str, end: End, run: _Run) -> None:
        num_ended = sum(each.has_ended for each in self._runs.values())
        counter = f"{num_ended}/{self._num_trials} " if self._num_trials else ""
        after, text = "", ""
        if run.epoch is not None:
            after, text = f" after {run.epoch_text(run.epoch)}", run.judged(run.epoch, end.results)
        if end.status == "failed":
            text = end.message.partition("\n")[0]
        self._print(f"{counter}{name} {end.status}{after}: {text}".removesuffix(": "))

    def _print(self, line: str) -> None:
        err.print(line, soft_wrap=True)
