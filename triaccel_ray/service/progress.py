"""Progress on standard error: a live table on a terminal, a line for each epoch or result elsewhere."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.measure.score import ACCURACY, BYTES_PER_GB
from triaccel_ray.records.events import End, Epoch, LogError, parse_event
from triaccel_ray.records.goal import Goal
from triaccel_ray.service import console
from triaccel_ray.service.console import plain_table
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.runs import Glance
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.log_tail import LogTail
from triaccel_ray.service.units import format_bytes

MAX_LINES = 100
"""Epochs of a run that get a line; of more, every second, third, ... one does."""


class Progress:
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

    def _table(self) -> Table:
        raise NotImplementedError


class RunProgress(Progress):
    """Epochs, images per second, batch size, memory against the limit and precisions of a set of runs."""

    def __init__(
        self, title: str, names: Iterable[str] = (), *, goal: Goal = ACCURACY, each_epoch: bool = False
    ) -> None:
        """Lists the runs of these names as waiting; others are added when something is known of them.

        Without a terminal a run has a line at its end, and with `each_epoch` one for every epoch.
        """
        super().__init__(title)
        self._glances: dict[str, Glance] = {name: Glance(name=name) for name in names}
        self._goal, self._each_epoch = goal, each_epoch
        self._last_reason = ""

    def update(self, glance: Glance) -> None:
        """Takes in what is newly known of one run."""
        if glance.notice:
            self.say(f"{glance.name}: {glance.notice}")
        before = self._glances.get(glance.name, Glance(name=glance.name))
        now = replace(
            before,
            status=glance.status or before.status,
            last=glance.last or before.last,
            results=glance.results or before.results,
            error=glance.error or before.error,
        )
        self._glances[glance.name] = now
        if glance.error is not None:
            reason = first_line(glance.error)
            self.say(f"{glance.name} failed: {'likewise' if reason == self._last_reason else reason}")
            self._last_reason = reason
        elif glance.results is not None and not self._each_epoch:
            self.say(f"{glance.name} finished: {_figures(glance.results, self._goal)}")
        elif glance.last is not None and self._each_epoch:
            self._say_epoch(glance.last, now)
        self._refresh()

    def _say_epoch(self, epoch: Epoch, known: Glance) -> None:
        status = known.status
        num_epochs = 0 if status is None else status.num_epochs
        judged = epoch.held_out(self._goal)
        if epoch.epoch not in (1, num_epochs) and epoch.epoch % max(math.ceil(num_epochs / MAX_LINES), 1):
            return
        parts = [
            f"epoch {epoch.epoch}" + (f"/{num_epochs}" if num_epochs else ""),
            f"loss {epoch.train_loss:.4f}",
            *([] if judged is None else [self._goal.named(judged)]),
            f"batch {epoch.batch_size}",
            *([] if status is None else [_precisions(status.layers_per_precision)]),
            format_bytes(epoch.peak_bytes) + ("" if status is None else f" of {format_bytes(status.limit_bytes)}"),
            f"{epoch.seconds:.3g} s",
        ]
        self.say(", ".join(parts))

    def _table(self) -> Table:
        table = plain_table("run", "epoch", "", "samples/s", "batch", "memory", "layers", "validation")
        for name, glance in self._glances.items():
            status = glance.status
            if glance.error is not None:
                table.add_row(name, Text("failed", style="red"), *[""] * 6)
            elif status is None:
                table.add_row(name, "starting", *[""] * 6)
            else:
                num_epochs = status.num_epochs
                done = num_epochs if glance.results is not None else status.epoch
                table.add_row(
                    name,
                    f"{done:.1f}/{num_epochs}",
                    _bar(done / max(num_epochs, 1)),
                    f"{status.images_per_second:,.0f}" if status.images_per_second else "",
                    str(status.batch_size),
                    f"{format_bytes(status.used_bytes)} of {format_bytes(status.limit_bytes)}",
                    _precisions(status.layers_per_precision),
                    status.judged,
                )
        return table


class TrialProgress(Progress):
    """The trials of a search, read from their logs: whatever schedules them, a terminal has no part in it."""

    def __init__(self, title: str, num_trials: int, folder: Path, objective: Objective) -> None:
        """Follows the logs below `folder`, one folder a trial, judged by `objective`."""
        super().__init__(title)
        self._num_trials, self._folder, self._objective = num_trials, folder, objective
        self._tails: dict[Path, LogTail] = {}
        self._last: dict[str, Epoch] = {}
        self._states: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="trial-progress", daemon=True)

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
            for path in sorted(self._folder.glob(f"*/{EVENTS}")):
                tail = self._tails.setdefault(path, LogTail(path))
                with contextlib.suppress(LogError):  # of a damaged log the report tells
                    for lines in tail.blocks():
                        for line in lines:
                            self._take(path.parent.name, line)
            self._refresh()

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


def _precisions(counts: Mapping[str, int]) -> str:
    return " ".join(f"{count} {name}" for name, count in counts.items() if count)


def _bar(share: float, width: int = 12) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
