"""The last record of a run that no process trains any more."""

from __future__ import annotations

import contextlib
from pathlib import Path

from triaccel_ray.records.events import End, EventLog, Start, read_events
from triaccel_ray.service.failures import needing_room
from triaccel_ray.service.runs.record import has_begun
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import EVENTS, SPEC, write_value


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
