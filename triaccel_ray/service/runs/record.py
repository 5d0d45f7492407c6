"""The event log in a run's folder: written by one process, and the only source when the run is read back."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from triaccel_ray.measure.score import BYTES_PER_GB, efficiency_score
from triaccel_ray.records.codec import decode
from triaccel_ray.records.events import (
    End,
    Epoch,
    Event,
    EventLog,
    Interruption,
    LogError,
    Record,
    Start,
    TakenOverError,
    Throughput,
    Tick,
    read_events,
)
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import CONFIGURATION_CAUSES, reporting_full_disk
from triaccel_ray.service.runs.objective import Performance
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import DAMAGED, EVENTS, REPLACED, SPEC, read_value, write_value

OWN_CODE = "code of your own"
"""Task name of a run that was logged by a `ControlLoop` outside the service."""
ONE_VIEW = "one_view_"
"""Prefix of metrics by each sample's first view, for runs evaluated by the mean output over several views."""
JOULES = "joules"
"""Result: energy of the GPU in training; missing if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything known of one run."""

    folder: Path
    spec: RunSpec
    start: Start
    ticks: tuple[Tick, ...]
    epochs: tuple[Epoch, ...]
    throughputs: tuple[Throughput, ...] = ()
    """Batch sizes timed, in this order, by `triaccel tune-batch` alone."""
    end: End | None
    """None while the run trains, or if it was cut off."""
    interruptions: tuple[Interruption, ...] = ()
    """The points where it was interrupted and resumed."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def status(self) -> str:
        """`finished`, `stopped`, `failed (cause)` or `unfinished`."""
        if self.end is None:
            return "unfinished"
        return f"failed ({self.end.cause})" if self.end.status == "failed" else self.end.status

    @property
    def ms_per_sample(self) -> dict[int, float]:
        """Batch size -> milliseconds per sample of those timed that fit."""
        return {each.batch_size: ms for each in self.throughputs if (ms := each.ms_per_sample) is not None}

    @property
    def efficient_batch_size(self) -> int | None:
        """The efficient batch size; None if the run did not find it."""
        size = self.end.results.get("batch_size") if self.end else None
        return None if size is None else int(size)

    @property
    def has_outcome(self) -> bool:
        """Whether the run finished, or failed because of its configuration, so that a retry would fail again."""
        return self.end is not None and (self.end.status == "finished" or self.end.cause in CONFIGURATION_CAUSES)

    @property
    def to_target(self) -> dict[str, float]:
        """Seconds and joules of training up to the first epoch that reaches the target.

        Empty without a target, or if none reaches it; without joules if they were not measured.
        """
        seconds, target, goal = 0.0, self.spec.target, self.start.goal
        if target is None:
            return {}
        for epoch in self.epochs:
            seconds += epoch.seconds
            if (value := epoch.held_out(goal)) is not None and goal.is_reached(value, target):
                joules = {} if epoch.joules is None else {"joules_to_target": epoch.joules}
                return {"seconds_to_target": seconds, **joules}
        return {}

    @property
    def performance(self) -> Performance | None:
        """The figures of the whole run, with its final metric; None before the first evaluation."""
        results = self.end.results if self.end else {}
        return performance_of(self.epochs[-1], self.start.goal, results) if self.epochs else None


def performance_of(epoch: Epoch, goal: Goal, results: Mapping[str, float] = MappingProxyType({})) -> Performance | None:
    """Returns the figures after an epoch, metric and seconds from `results` if present; None if not evaluated."""
    metric = results.get(goal.name, epoch.held_out(goal))
    if metric is None:
        return None
    seconds = results.get("seconds_per_epoch") or epoch.typical_seconds or epoch.seconds
    peak_gb = epoch.peak_bytes / BYTES_PER_GB
    score = efficiency_score(metric, seconds, peak_gb, goal)
    return Performance(metric=metric, seconds=seconds, peak_gb=peak_gb, score=score)


def joules_after(last: Epoch | None, joules: float | None, spec: RunSpec) -> float | None:
    """Returns the run's joules after an epoch of `joules` that follows `last`; None if not all of them are known.

    The counter is that of one GPU. So runs that share one have no energy of their own, nor have runs on several.
    """
    before = 0.0 if last is None else last.joules
    if before is None or joules is None or spec.trials_per_gpu > 1 or spec.is_distributed:
        return None
    return before + joules


def has_begun(folder: Path) -> bool:
    """Returns whether the log in `folder` holds a record: a run that was lost at once may leave an empty log."""
    try:
        with (folder / EVENTS).open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def read_if_begun(folder: Path) -> RunRecord | None:
    """Returns the run in `folder`, as `read_run`; None if it has not begun."""
    return read_run(folder) if has_begun(folder) else None


def read_run(folder: Path) -> RunRecord:
    """Returns the run in `folder`; a log written by a `ControlLoop` in a user's own code needs no spec.

    Raises:
        LogError: the folder holds no run, or its log or spec is damaged.
    """
    if not (folder / EVENTS).exists():
        raise LogError(f"folder {folder} holds no run ({EVENTS} is missing): name a run's folder")
    records = [event.record for event in read_events(folder / EVENTS)]
    if not records or not isinstance(records[0], Start):
        raise LogError(
            f"event log {folder / EVENTS} does not begin with a start record: it is damaged or was cut; in code of "
            "your own, give the loop on_tick=log.append, which begins the log"
        )
    start = records[0]
    is_of_a_task = "task" in start.info or (folder / SPEC).exists()
    return RunRecord(
        folder=folder,
        spec=read_spec(folder) if is_of_a_task else RunSpec(task=OWN_CODE, control=start.control),
        start=start,
        ticks=tuple(record for record in records if isinstance(record, Tick)),
        epochs=tuple(record for record in records if isinstance(record, Epoch)),
        throughputs=tuple(record for record in records if isinstance(record, Throughput)),
        end=next((record for record in reversed(records) if isinstance(record, End)), None),
        interruptions=tuple(record for record in records if isinstance(record, Interruption)),
    )


def read_spec(folder: Path) -> RunSpec:
    """Returns the spec of the run in `folder`; raises LogError if it is missing or damaged."""
    return read_value(RunSpec, folder / SPEC, "the run cannot be continued or reported without it")


def is_spec_of(spec: RunSpec, saved: str) -> bool:
    """Returns whether the spec in a checkpoint equals `spec`; fields that are missing in it have their defaults."""
    try:
        return decode(RunSpec, json.loads(saved)) == spec
    except ValueError:  # a field that this version does not know
        return False


class RunLog:
    """The event log of a run that this process trains; several threads may append records.

    Methods raise DiskFullError if there is no room for records.
    """

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        """Writes nothing; records appended before `open` are dropped."""
        self._folder, self._spec = folder, spec
        self._lock = threading.Lock()
        self._log: EventLog | None = None
        self._before: list[Event] = []  # what an earlier process has recorded, until the interruption is
        self._damage = ""
        self.ended = False
        """Whether it takes no more records: it has its last one, or another process has taken over the run."""

    @property
    def is_open(self) -> bool:
        """Whether the log is open; an ended log stays open until `close`."""
        return self._log is not None

    def take_over(self) -> None:
        """Sets a damaged log aside, and fences off a process that still writes it, which ends at its next record."""
        path = self._folder / EVENTS
        if not path.exists():
            return
        try:
            for event in read_events(path):
                if not self._before and not isinstance(event.record, Start):
                    raise LogError("the log has no start")
                self._before.append(event)
        except LogError:
            num_whole = len(self._before)
            self._damage = f"its log is damaged after {num_whole} records; all of it is in {DAMAGED}"
        with reporting_full_disk(self._folder):
            if self._damage:
                shutil.copyfile(path, self._folder / DAMAGED)
            EventLog(path, keep=len(self._before) if self._damage else None).close()
        if not self._damage:
            self._before = list(read_events(path))  # again: the other process may have written more until now

    def keep_replaced(self) -> bool:
        """Copies the log to REPLACED if it holds epochs, before its run starts over; returns whether it did."""
        if not any(isinstance(event.record, Epoch) for event in self._before):
            return False
        with reporting_full_disk(self._folder):
            shutil.copyfile(self._folder / EVENTS, self._folder / REPLACED)
        return True

    def open(self, *, keep: int = 0, checksum: int | None = None) -> None:
        """Opens the log, cut back to its first `keep` records as by `EventLog`, and writes the spec beside it."""
        with reporting_full_disk(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_value(self._folder / SPEC, self._spec)  # the old one may be damaged, too
            self._log = EventLog(self._folder / EVENTS, keep=keep, checksum=checksum)

    def record_interruption(self, num_kept: int, *, world_size: int, epoch: int, notes: Sequence[str]) -> None:
        """Appends why the process before this one ended, if there was one; from here, `world_size` processes train.

        Interruptions that were cut off with the records after the first `num_kept` are appended before.
        """
        if not self._before and not self._damage:
            return
        size_before, marks = 1, self._before[num_kept - 1 : num_kept]
        for index, event in enumerate(self._before):
            if isinstance(event.record, Start):
                size_before = int(event.record.parameters.get("world_size") or 1)
            elif isinstance(event.record, Interruption):
                size_before = event.record.world_size
                marks.append(event)  # work since the checkpoint is repeated; work before an interruption counts there
                if index >= num_kept:
                    self.append(event.record)
        cause, message = "preempted", "the process or its node was lost"
        if self._damage:
            cause, message = "damaged", self._damage
        elif isinstance(end := self._before[-1].record, End):
            cause, message = end.cause or end.status, end.message or f"it was {end.status}"
        elif world_size > size_before:  # Ray Train ends the processes to begin again with more
            cause, message = "resized", "processes have been added"
        if world_size != size_before:
            notes = [f"{size_before} -> {world_size} processes", *notes]
        last_ms = max((event.time_ms for event in marks), default=None)
        self._before.clear()
        self.append(
            Interruption(
                cause=cause,
                message="; ".join([message, *notes]),
                epoch=epoch,
                world_size_before=size_before,
                world_size=world_size,
                seconds_lost=None if last_ms is None else max(time.time() - last_ms / 1e3, 0.0),
            )
        )

    def append(self, record: Record) -> None:
        """Writes a record, unless the log has ended; raises TakenOverError like `confirm`."""
        with self._lock, reporting_full_disk(self._folder):
            if self._log is not None and not self.ended:
                try:
                    self._log.append(record)
                    self.ended = isinstance(record, End)
                except TakenOverError:
                    self.ended = True
                    raise

    def synced(self) -> tuple[int, int] | None:
        """Syncs the log to disk; returns number and checksum of its records, None if it is not open or has ended.

        Raises TakenOverError like `confirm`.
        """
        with self._lock, reporting_full_disk(self._folder):
            if self._log is None or self.ended:
                return None
            self._log.sync()
            return self._log.num_records, self._log.checksum

    def confirm(self) -> None:
        """Raises TakenOverError if another process has taken over the run."""
        if self._log is not None:
            self._log.claim.require()

    def close(self) -> None:
        """Closes the log."""
        log, self._log = self._log, None
        if log is not None:
            with reporting_full_disk(self._folder):
                log.close()


def end_run(folder: Path, spec: RunSpec | None, end: End) -> None:
    """Writes the last record of a run that no process trains, replacing an existing one.

    A run without records first gets `spec` and a start record.
    """
    path, keep = folder / EVENTS, 0
    if has_begun(folder):
        records = [event.record for event in read_events(path)]
        keep = len(records) - 1 if isinstance(records[-1], End) else len(records)
    folder.mkdir(parents=True, exist_ok=True)
    with reporting_full_disk(folder), contextlib.closing(EventLog(path, keep=keep)) as log:
        if keep == 0 and spec is not None:
            write_value(folder / SPEC, spec)
            log.append(Start(control=spec.method_control, info={"task": spec.task, "method": spec.method}))
        log.append(end)
