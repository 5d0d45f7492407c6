"""The event log: one JSON object a line, append-only, the single source of everything reported about a run."""

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
from triaccel_ray.records.durable import whole_file
from triaccel_ray.records.goal import LOSS, Goal
from triaccel_ray.records.plan import Applied
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import Decision

FORMAT = 2
"""Version of the log's layout, written into its first record."""


class LogError(ValueError):
    """An event log cannot be read; the message names the file, the line and the way out."""


class OtherLogFormatError(ValueError):
    """Another version of triaccel-ray has written the log: it is whole, and not for this one."""


class TakenOverError(ValueError):
    """Another process goes on with the run: this one has to end, and writes nothing more."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First record: what was asked for, where it runs."""

    control: ControlConfig
    info: Mapping[str, str] = field(default_factory=dict)
    """Task, method, seed, hardware, versions: whatever a reader should be able to filter by."""
    parameters: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    """Settings outside the control loop: recipe, budget."""
    goal: Goal = field(default_factory=Goal)
    """What the task is judged by."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One turn of the control loop."""

    observation: Observation
    decision: Decision
    applied: Applied


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over the training samples, and what was measured at its end."""

    epoch: int
    """Epochs done, from 1."""
    step: int
    """Optimizer steps done."""
    train_loss: float
    held_out_loss: float | None
    """On the validation samples; None where the run does not look (test samples, before its end)."""
    held_out_metrics: Mapping[str, float] = field(default_factory=dict)
    """Name -> figure, likewise."""
    seconds: float
    """Wall-clock time of the training part, the device synchronised at both ends."""
    images_per_second: float
    batch_size: int
    """In force at the end of the epoch."""
    peak_bytes: int
    """Largest memory of the process on the device since the run began."""
    allocated_peak_bytes: int
    """The allocator's own peak."""
    num_skipped: int | None
    """Optimizer steps skipped for a NaN or infinite gradient; None where that is not known."""
    score: float | None
    """`efficiency_score` of the goal's figure, typical seconds and peak GB."""
    typical_seconds: float | None = None
    """Seconds of the shortest of the last epochs, at most five, under the plan in force; on a CPU processor time."""

    def held_out(self, goal: Goal) -> float | None:
        """Returns the goal's figure on the validation samples; None where the run does not look."""
        return self.held_out_loss if goal.name == LOSS else self.held_out_metrics.get(goal.name)


@dataclass(frozen=True, kw_only=True)
class End:
    """Last record: how the run ended."""

    status: str
    """`finished`, `stopped` (by the scheduler or the user) or `failed`."""
    cause: str = ""
    """For a failed run: `out_of_memory`, `non_finite`, `preempted`, `store`, `bug`, and `disk_full` or `runs` (some of
    them failed) for a search or comparison; else empty."""
    message: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """Final metrics."""
    kept_epoch: int | None = None
    """The epoch whose weights the run leaves behind; None where it leaves none."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The run was broken off here and goes on, in another process."""

    cause: str
    """`preempted` (process or node lost), `stopped` (by the user), `damaged` (what followed in the log could not be
    read), or the cause of the failure that stood here."""
    message: str
    """What happened, and from where the run goes on."""
    epoch: int
    """Epochs done where it goes on."""


Record: TypeAlias = Start | Tick | Epoch | End | Interruption
_KINDS: Mapping[str, type[Record]] = {cls.__name__.lower(): cls for cls in (Start, Tick, Epoch, End, Interruption)}


@dataclass(frozen=True, kw_only=True)
class Event:
    """A record with its place in the log."""

    sequence: int
    """Position in the log, from 0, interruptions apart; a resumed run repeats the positions after its checkpoint."""
    time_ms: int
    """Unix time of writing, milliseconds."""
    record: Record


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Which file a process writes: whoever goes on with the run puts another under the same name."""

    path: Path
    device: int
    inode: int

    def require(self) -> None:
        """Returns if the file is still the one of that name.

        Raises:
            TakenOverError: it is not.
        """
        try:
            with self.path.open("rb") as file:  # os.stat may answer from what NFS remembers, opening asks the server
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
    """Appends records to a file; each is on its way to the disk before `append` returns.

    A log has one writer. Opening it puts a new file, with the records kept, in the place of the old one: a process that
    has the old one open, because it was given up for lost and was not, learns so from its next `append` or `sync`.
    """

    def __init__(self, path: Path, *, keep: int | None = 0, checksum: int | None = None) -> None:
        """Opens the log at `path` for appending after its first `keep` records; what follows them is cut off.

        Until the new file is whole on the disk, the old one stays as it is.

        Args:
            path: the file, which need not exist.
            keep: records; None for every whole one.
            checksum: what `checksum` was when the log held `keep` records; None: not compared.

        Raises:
            LogError: the file holds fewer than `keep` whole records, or others than those that `checksum` was made of.
        """
        self.path = path
        lines = _first_lines(path, keep)
        self.num_records = len(lines)
        self.checksum = zlib.crc32(b"".join(lines))
        """CRC-32 of all records."""
        if checksum is not None and checksum != self.checksum:
            raise LogError(f"event log {path}: its first {keep} records are not those that the checkpoint follows")
        self._num_interruptions = sum(b'"kind":"interruption"' in line for line in lines)
        with whole_file(path) as self._file:
            self._file.writelines(lines)
        status = os.fstat(self._file.fileno())
        self.claim = Claim(path=path, device=status.st_dev, inode=status.st_ino)

    @property
    def closed(self) -> bool:
        """Whether it takes no more records."""
        return self._file.closed

    def append(self, record: Record) -> None:
        """Writes one record as one line.

        Raises:
            TakenOverError: another process has opened the log since.
        """
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
        self._num_interruptions += isinstance(record, Interruption)
        self._file.flush()
        self.claim.require()  # afterwards: what went to a file without a name is lost, and was not to be written

    def sync(self) -> None:
        """Returns once everything is on the disk.

        Raises:
            TakenOverError: another process has opened the log since.
        """
        os.fsync(self._file.fileno())
        self.claim.require()

    def close(self) -> None:
        """Writes everything to the disk and closes the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _first_lines(path: Path, count: int | None) -> list[bytes]:
    """Returns the first `count` lines, or all whole ones."""
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
    """Yields the events of the log at `path`; a last line without an end is still being written and is left out.

    Raises:
        LogError: the file is missing, or a line is not an event.
        OtherLogFormatError: another version has written it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"event log {path} cannot be read: {error.strerror}; name the folder of a run") from error
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        yield parse_event(line, f"event log {path}, line {number}")


def parse_event(line: bytes, where: str) -> Event:
    """Returns the event that one line holds.

    Raises:
        LogError: it is not JSON, or not an event; `where` opens the message.
        OtherLogFormatError: it begins a log of another format.
    """
    try:
        raw: Any = json.loads(line)
        if not isinstance(raw, dict) or raw.get("kind") not in _KINDS:
            raise ValueError(f"kind = {raw.get('kind') if isinstance(raw, dict) else raw!r}")
        data = raw.get("data")
        if raw["kind"] == "start" and isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise OtherLogFormatError(
                f"{where}: format = {data['format']!r}, this version reads format {FORMAT}: read it with the version "
                "of triaccel-ray that wrote it"
            )
        record = decode(_KINDS[raw["kind"]], data)
        return Event(sequence=int(raw["sequence"]), time_ms=int(raw["time_ms"]), record=record)
    except OtherLogFormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError(
            f"{where}: not an event ({error}); the log is damaged, restore it from the run's artifacts"
        ) from error
