"""The event log: one JSON object a line, append-only, the single source of everything reported about a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from triaccel_ray.config import ControlConfig
from triaccel_ray.decide.state import Decision
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.plan import Applied
from triaccel_ray.signals import Observation

FORMAT = 1
"""Version of the log's layout, written into its first record."""


class LogError(ValueError):
    """An event log cannot be read; the message names the file, the line and the way out."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First record: what was asked for, where it runs."""

    control: ControlConfig
    info: Mapping[str, str] = field(default_factory=dict)
    """Task, method, seed, hardware, versions: whatever a reader should be able to filter by."""
    parameters: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    """Settings outside the control loop: recipe, budget."""
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
    held_out_accuracy: float | None
    """Percent of the validation samples; None where the run does not look (test samples, before its end)."""
    held_out_loss: float | None
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
    """Optimizer steps skipped for an overflow; None where that is not known."""
    score: float | None
    """Accuracy / (mean seconds of the last five epochs x peak GB)."""


@dataclass(frozen=True, kw_only=True)
class End:
    """Last record: how the run ended."""

    status: str
    """`finished`, `stopped` (by the scheduler or the user) or `failed`."""
    cause: str = ""
    """For a failed run: `out_of_memory`, `non_finite`, `preempted`, `bug`; else empty."""
    message: str = ""
    results: Mapping[str, float] = field(default_factory=dict)
    """Final metrics."""


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """The run was broken off here and goes on, in another process."""

    cause: str
    """`preempted` (process or node lost), `stopped` (by the user), or the cause of the failure that stood here."""
    message: str
    """What happened, and from where the run goes on."""
    epoch: int
    """Epochs done where it goes on."""


Record: TypeAlias = Start | Tick | Epoch | End | Interruption
_KINDS: Mapping[str, type[Record]] = {
    "start": Start,
    "tick": Tick,
    "epoch": Epoch,
    "end": End,
    "interruption": Interruption,
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """A record with its place in the log."""

    sequence: int
    """Position in the log, from 0, interruptions apart; a resumed run repeats the positions after its checkpoint."""
    time_ms: int
    """Unix time of writing, milliseconds."""
    record: Record


class EventLog:
    """Appends records to a file; each is on its way to the disk before `append` returns."""

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        """Opens the log at `path` for appending after its first `keep` records; what follows them is cut off.

        Raises:
            LogError: the file holds fewer than `keep` whole records.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab+")
        self._file.seek(0)
        self._num_interruptions = 0
        for index in range(keep):
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.close()
                raise LogError(f"event log {path} holds {index} records, {keep} belong to the checkpoint: it was cut")
            self._num_interruptions += b'"kind":"interruption"' in line
        self._file.truncate(self._file.tell())
        self.num_records = keep

    def append(self, record: Record) -> None:
        """Writes one record as one line."""
        kind = next(name for name, cls in _KINDS.items() if type(record) is cls)
        sequence = self.num_records - self._num_interruptions
        line = {"sequence": sequence, "time_ms": time.time_ns() // 1_000_000, "kind": kind}
        text = json.dumps({**line, "data": encode(record)}, allow_nan=False, separators=(",", ":"))
        self._file.write(text.encode() + b"\n")
        self.num_records += 1
        self._num_interruptions += isinstance(record, Interruption)
        self._file.flush()

    def sync(self) -> None:
        """Returns once everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Writes everything to the disk and closes the file."""
        self.sync()
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of the log at `path`; a last line without an end is still being written and is left out.

    Raises:
        LogError: the file is missing, or a line is not an event of this format.
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
        LogError: it is not JSON, or not an event of this format; `where` opens the message.
    """
    try:
        raw: Any = json.loads(line)
        if not isinstance(raw, dict) or raw.get("kind") not in _KINDS:
            raise ValueError(f"kind = {raw.get('kind') if isinstance(raw, dict) else raw!r}")
        record = decode(_KINDS[raw["kind"]], raw.get("data"))
        if isinstance(record, Start) and record.format != FORMAT:
            raise ValueError(f"format = {record.format}: this version reads format {FORMAT}")
        return Event(sequence=int(raw["sequence"]), time_ms=int(raw["time_ms"]), record=record)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LogError(
            f"{where}: not an event ({error}); the log is damaged, restore it from the run's artifacts"
        ) from error
