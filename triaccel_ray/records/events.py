"""The event log: one JSON object per line, append-only, the single source of everything reported about a run."""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.durable import atomic_write
from triaccel_ray.records.goal import LOSS, Goal
from triaccel_ray.records.plan import Applied, Fault, Storage
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import Decision

FORMAT = 6
"""Version of the log's layout, written into its first record."""


class LogError(ValueError):
    """An event log cannot be read; the message names the file, the line and what to do."""


class OtherLogFormatError(ValueError):
    """The event log is intact but was written by another version of triaccel-ray, which this one cannot read."""


class TakenOverError(ValueError):
    """Another process has taken over the run: this one is fenced off, must end and must write nothing more."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First record: the run's settings and environment."""

    control: ControlConfig
    info: Mapping[str, str] = field(default_factory=dict)
    """Task, method, seed, hardware, versions: the values by which readers filter runs."""
    parameters: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    """Settings outside the control loop: recipe, budget."""
    goal: Goal = field(default_factory=Goal)
    """The metric by which the task is judged."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One tick of the control loop."""

    observation: Observation
    decision: Decision
    applied: Applied


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the training samples, and the measurements at its end."""

    epoch: int
    """Epochs done, from 1."""
    step: int
    """Optimizer steps done."""
    train_loss: float
    held_out_loss: float | None
    """Loss on the held-out samples; None if not evaluated, as test samples are before the end of the run."""
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric name -> value on the held-out samples; empty if not evaluated."""
    seconds: float
    """Wall-clock time of training alone, with the device synchronized at both ends."""
    images_per_second: float
    batch_size: int
    """Batch size at the end of the epoch."""
    peak_bytes: int
    """Peak memory of the process on the device since the run began."""
    allocated_peak_bytes: int
    """Peak memory of tensors, as counted by the allocator."""
    num_skipped: int | None
    """Optimizer steps skipped for a NaN or infinite gradient; None if unknown."""
    score: float | None
    """`efficiency_score` of the goal's metric, typical seconds and peak GB."""
    typical_seconds: float | None = None
    """Seconds of the shortest of the last (at most five) epochs under the current plan; on a CPU, processor time."""
    joules: float | None = None
    """Energy of the whole GPU in the run's training so far, evaluation left out; None if not measured."""

    def held_out(self, goal: Goal) -> float | None:
        """Returns the goal's metric on the held-out samples; None if they were not evaluated."""
        return self.held_out_loss if goal.name == LOSS else self.held_out_metrics.get(goal.name)


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Steps of one batch size, timed by `triaccel tune-batch` with a new model and a fixed plan."""

    batch_size: int
    step_ms: float | None
    """Median milliseconds of a step; None if the batch does not fit in memory."""
    peak_bytes: int
    """Peak memory of the process on the device while this size was set up, warmed up and timed."""
    num_micro_batches: int = 1
    storage: Mapping[str, Storage] = field(default_factory=dict)
    """`Plan.storage`."""
    faults: tuple[Fault, ...] = ()
    """Faults until the plan settled; they say, for example, why steps are not captured."""

    @property
    def ms_per_sample(self) -> float | None:
        """Milliseconds per sample; None if the batch does not fit."""
        return None if self.step_ms is None else self.step_ms / self.batch_size


@dataclass(frozen=True, kw_only=True)
class End:
    """Last record: how the run ended."""

    status: str
    """`finished`, `stopped` (by the scheduler or the user) or `failed`."""
    cause: str = ""
    """For a failed run: `out_of_memory`, `non_finite`, `preempted`, `store`, `bug`; for a search or comparison also
    `disk_full` or `runs` (some of its runs failed). Empty otherwise."""
    message: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """Final metrics."""
    kept_epoch: int | None = None
    """Epoch whose weights the run keeps; None if it keeps none."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The run was interrupted here and continues in another process."""

    cause: str
    """`preempted` (process or node lost), `resized` (processes have been added), `stopped` (by the user), `damaged`
    (the rest of the log could not be read), or the cause in the `End` record that stood here."""
    message: str
    """What happened, and from where the run continues."""
    epoch: int
    """Epochs done at the point from which it continues."""
    world_size_before: int = 1
    """Processes that trained the run before."""
    world_size: int = 1
    """Processes that train the run from here."""
    seconds_lost: float | None = None
    """Seconds since the checkpoint, or since the last interruption if that is later: of work that is repeated, and of
    the restart. None if the log is damaged."""


Record: TypeAlias = Start | Tick | Epoch | Throughput | End | Interruption
_KINDS: Mapping[str, type[Record]] = {
    cls.__name__.lower(): cls for cls in (Start, Tick, Epoch, Throughput, End, Interruption)
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """A record with its place in the log."""

    sequence: int
    """Position in the log, from 0, without interruptions; a resumed run repeats the positions after its checkpoint."""
    time_ms: int
    """Unix time of writing, milliseconds."""
    record: Record


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Identity of the log file that a process writes; a process that takes over the run replaces this file."""

    path: Path
    device: int
    inode: int

    def require(self) -> None:
        """Checks that `path` still names this file.

        Raises:
            TakenOverError: the file has been replaced or removed.
        """
        try:
            with self.path.open("rb") as file:  # os.stat may answer from NFS's cache, opening asks the server
                found = os.fstat(file.fileno())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            found = None
        if found is None or (found.st_dev, found.st_ino) != (self.device, self.inode):
            raise TakenOverError(
                f"event log {self.path}: another process has taken this run over, and goes on with it; this one has "
                "ended and writes nothing more"
            )


class EventLog:
    """Appends records to a file; each is handed to the operating system before `append` returns.

    A log has one writer. Opening the log replaces its file by a new one that holds the records kept. This fences off a
    process that was presumed dead and still has the old file open: its next `append` or `sync` raises an error.
    """

    def __init__(self, path: str | Path, *, keep: int | None = 0, checksum: int | None = None) -> None:
        """Opens the log at `path` for appending after its first `keep` records, and drops all later ones.

        The old file stays unchanged until the new one is complete on disk.

        Args:
            path: the file, which need not exist.
            keep: number of records to keep; None: every complete one.
            checksum: value of `self.checksum` when the log held `keep` records; None: not compared.

        Raises:
            LogError: the file holds fewer than `keep` complete records, or their checksum is not `checksum`.
        """
        self.path = path = Path(path)
        lines = _first_lines(path, keep)
        self.num_records = len(lines)
        self.checksum = zlib.crc32(b"".join(lines))
        """CRC-32 of all records."""
        if checksum is not None and checksum != self.checksum:
            raise LogError(f"event log {path}: its first {keep} records are not those that the checkpoint follows")
        self._num_interruptions = sum(b'"kind":"interruption"' in line for line in lines)
        with atomic_write(path) as self._file:
            self._file.writelines(lines)
        status = os.fstat(self._file.fileno())
        self.claim = Claim(path=path, device=status.st_dev, inode=status.st_ino)

    @property
    def closed(self) -> bool:
        """Whether the log is closed and takes no more records."""
        return self._file.closed

    def append(self, record: Record) -> None:
        """Writes one record as one line.

        Raises:
            LogError: the log is empty and the record a tick. `ControlLoop(on_tick=log.append)` writes a start before.
            TakenOverError: another process has opened the log since.
        """
        if self.num_records == 0 and isinstance(record, Tick):
            raise LogError(f"event log {self.path} begins with a tick: give the loop on_tick=log.append itself")
        line = {
            "sequence": self.num_records - self._num_interruptions,
            "time_ms": time.time_ns() // 1_000_000,
            "kind": type(record).__name__.lower(),
            "data": encode(record),
        }
        text = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._file.write(text)
        self.num_records += 1
        self.checksum = zlib.crc32(text, self.checksum)
        if isinstance(record, Interruption):
            self._num_interruptions += 1
        self._file.flush()
        self.claim.require()  # after writing: a record in a file that was replaced is lost, as it should be

    def sync(self) -> None:
        """Writes everything to disk.

        Raises:
            TakenOverError: another process has opened the log since.
        """
        os.fsync(self._file.fileno())
        self.claim.require()

    def close(self) -> None:
        """Writes everything to disk and closes the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _first_lines(path: Path, count: int | None) -> list[bytes]:
    """Returns the first `count` lines; if None, all complete ones."""
    if count == 0 or (count is None and not path.exists()):
        return []
    lines: list[bytes] = []
    with path.open("rb") as file:
        while count is None or len(lines) < count:
            line = file.readline()
            if not line.endswith(b"\n"):
                if count is None:
                    break
                raise LogError(
                    f"event log {path} holds {len(lines)} records, {count} belong to the checkpoint: it was cut"
                )
            lines.append(line)
    return lines


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of the log at `path`, except a last line without a newline, which is still being written.

    Raises:
        LogError: the file is missing, or a line is not an event.
        OtherLogFormatError: another version wrote it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"event log {path} cannot be read: {error.strerror}; name the folder of a run") from error
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        yield parse_event(line, f"event log {path}, line {number}")


def parse_event(line: bytes, where: str) -> Event:
    """Returns the event in one line of a log.

    Raises:
        LogError: the line is not JSON, or not an event; the message begins with `where`.
        OtherLogFormatError: the line begins a log of another format.
    """
    try:
        raw: Any = json.loads(line)
        if not isinstance(raw, dict):
            raise ValueError(f"kind = {raw!r}")
        kind: Any = raw.get("kind")
        data = raw.get("data")
        if kind not in _KINDS:
            raise ValueError(f"kind = {kind!r}")
        if kind == "start" and isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise OtherLogFormatError(
                f"{where}: format = {data['format']!r}, this version reads format {FORMAT}: read it with the version "
                "of triaccel-ray that wrote it"
            )
        record = decode(_KINDS[kind], data)
        return Event(sequence=int(raw["sequence"]), time_ms=int(raw["time_ms"]), record=record)
    except OtherLogFormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError(
            f"{where}: not an event ({error}); the log is damaged, restore it from the run's artifacts"
        ) from error
