"""The log of a run in its folder: written by one process, and the only source when the run is read back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from triaccel_ray.measure.score import BYTES_PER_GB, efficiency_score, mean_epoch_seconds
from triaccel_ray.records.events import (
    End,
    Epoch,
    EventLog,
    Interruption,
    LogError,
    Record,
    Start,
    TakenOverError,
    Tick,
    read_events,
)
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import RESULTS, broken_off, needing_room, set_damage_aside
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import EVENTS, SPEC, read_value, write_value

OWN_CODE = "code of your own"
"""Stands for the task of a run that a `ControlLoop` outside the service has logged."""
ONE_VIEW = "one_view_"
"""Begins the results of runs judged by the mean output over several views of each sample: a metric by the first."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Everything known of one run."""

    folder: Path
    spec: RunSpec
    start: Start
    ticks: tuple[Tick, ...]
    epochs: tuple[Epoch, ...]
    end: End | None
    """None while the run goes on, or when it was cut off."""
    interruptions: tuple[Interruption, ...] = ()
    """Where it was broken off and went on."""

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
    def has_outcome(self) -> bool:
        """Whether the run finished, or failed by what was tried: the same again would end the same way."""
        return self.end is not None and (self.end.status == "finished" or self.end.cause in RESULTS)

    @property
    def figures(self) -> Figures | None:
        """The figures of the whole run, with the metric that it ended with; None before it was first judged."""
        return figures_of(self.epochs, self.start.goal, self.end.results if self.end else {})

    def figures_after(self, epoch: int) -> Figures | None:
        """Returns the figures as they were after `epoch` epochs; None where the run was not judged then."""
        return figures_of([each for each in self.epochs if each.epoch <= epoch], self.start.goal)


def figures_of(
    epochs: Sequence[Epoch], goal: Goal, results: Mapping[str, float] = MappingProxyType({})
) -> Figures | None:
    """Returns the figures after these epochs; metric and seconds as the run's results have them, where there are."""
    if not epochs or (metric := results.get(goal.name, epochs[-1].held_out(goal))) is None:
        return None
    seconds = results.get("seconds_per_epoch") or epochs[-1].typical_seconds
    seconds = seconds or mean_epoch_seconds([epoch.seconds for epoch in epochs])
    peak_gb = epochs[-1].peak_bytes / BYTES_PER_GB
    score = efficiency_score(metric, seconds, peak_gb, goal)
    return Figures(metric=metric, seconds=seconds, peak_gb=peak_gb, score=score)


def has_begun(folder: Path) -> bool:
    """Returns whether the log in `folder` holds a record: a run that was lost at once may have left it empty."""
    try:
        with (folder / EVENTS).open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return False


def read_if_begun(folder: Path) -> RunRecord | None:
    """Returns the run in `folder`; None where it has not begun.

    Raises:
        LogError: its log or spec is damaged.
    """
    return read_run(folder) if has_begun(folder) else None


def read_run(folder: Path) -> RunRecord:
    """Returns the run in `folder`; of a log that a `ControlLoop` of a user's own has written there need be no spec.

    Raises:
        LogError: the folder holds no run, or its log or spec is damaged.
    """
    if not (folder / EVENTS).exists():
        raise LogError(f"folder {folder} holds no run ({EVENTS} is missing): name a run's folder")
    records = [event.record for event in read_events(folder / EVENTS)]
    if not records or not isinstance(records[0], Start):
        raise LogError(
            f"event log {folder / EVENTS} does not begin with a start record: it is damaged or was cut; one of code of "
            "your own begins with log.append(Start(control=config))"
        )
    start = records[0]
    is_of_a_task = "task" in start.info or (folder / SPEC).exists()
    return RunRecord(
        folder=folder,
        spec=read_spec(folder) if is_of_a_task else RunSpec(task=OWN_CODE, control=start.control),
        start=start,
        ticks=tuple(r for r in records if isinstance(r, Tick)),
        epochs=tuple(r for r in records if isinstance(r, Epoch)),
        end=next((r for r in reversed(records) if isinstance(r, End)), None),
        interruptions=tuple(r for r in records if isinstance(r, Interruption)),
    )


def read_spec(folder: Path) -> RunSpec:
    """Returns the spec of the run in `folder`.

    Raises:
        LogError: it is missing or damaged.
    """
    return read_value(RunSpec, folder / SPEC, "the run cannot be continued or reported without it")


class RunLog:
    """The event log of a run that is trained here; records may come from several threads.

    Where there is no room for records, methods raise DiskFullError.
    """

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        """Nothing is written, and whatever is appended is lost, before `open`."""
        self._folder, self._spec = folder, spec
        self._writing = threading.Lock()
        self._log: EventLog | None = None
        self.ended = False
        """Whether it takes no more records: it has its last one, or another process has taken the run over."""

    @property
    def is_open(self) -> bool:
        """Whether records are written, or were until the log ended."""
        return self._log is not None

    def take_over(self) -> tuple[list[tuple[int, Interruption]], Interruption | None]:
        """Sets a damaged log aside, and has a process that still writes it end at its next record.

        Returns the log's interruptions with their places, and the one that now follows; None where nothing had begun.
        """
        path = self._folder / EVENTS
        damage = set_damage_aside(path)
        if path.exists():
            with needing_room(self._folder):
                EventLog(path, keep=None).close()
        earlier, latest = broken_off(path)
        return earlier, Interruption(cause="damaged", message=damage, epoch=0) if damage else latest

    def open(self, *, keep: int = 0, checksum: int | None = None) -> None:
        """Opens it after its first `keep` records, as `EventLog` does, and writes the spec beside it."""
        with needing_room(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_value(self._folder / SPEC, self._spec)  # perhaps as damaged as the log
            self._log = EventLog(self._folder / EVENTS, keep=keep, checksum=checksum)

    def append(self, record: Record) -> None:
        """Writes a record, unless the log has ended; raises TakenOverError as `confirm`."""
        with self._writing, needing_room(self._folder):
            if self._log is not None and not self.ended:
                try:
                    self._log.append(record)
                    self.ended = isinstance(record, End)
                except TakenOverError:
                    self.ended = True
                    raise

    def synced(self) -> tuple[int, int] | None:
        """Returns number and checksum of the records, all on the disk; None where none are written or it has ended.

        Raises TakenOverError as `confirm`.
        """
        with self._writing, needing_room(self._folder):
            if self._log is None or self.ended:
                return None
            self._log.sync()
            return self._log.num_records, self._log.checksum

    def confirm(self) -> None:
        """Raises TakenOverError where another process goes on with the run."""
        if self._log is not None:
            self._log.claim.require()

    def close(self) -> None:
        """Closes it."""
        log, self._log = self._log, None
        if log is not None:
            with needing_room(self._folder):
                log.close()


def end_run(folder: Path, spec: RunSpec | None, end: End) -> None:
    """Writes a run's last record where no process trains it, in place of one that is there.

    A run of which there is nothing yet gets `spec` and a beginning.

    Raises:
        DiskFullError: there is no room.
    """
    path, keep = folder / EVENTS, 0
    if has_begun(folder):
        records = [event.record for event in read_events(path)]
        keep = len(records) - isinstance(records[-1], End)
    folder.mkdir(parents=True, exist_ok=True)
    with needing_room(folder), contextlib.closing(EventLog(path, keep=keep)) as log:
        if keep == 0 and spec is not None:
            write_value(folder / SPEC, spec)
            log.append(Start(control=spec.method_control, info={"task": spec.task, "method": spec.method}))
        log.append(end)
