"""The log of a run: its one writer, and its last record where no process trains it any more."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from triaccel_ray.records.events import End, EventLog, Interruption, Record, Start, TakenOverError, read_events
from triaccel_ray.service.failures import broken_off, needing_room, set_damage_aside
from triaccel_ray.service.runs.record import has_begun
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import EVENTS, SPEC, write_value


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
