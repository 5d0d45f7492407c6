"""Why a run ended before its time, and what follows from it.

| cause | what it is | what is done |
|---|---|---|
| `out_of_memory` | not even one sample fits, after the loop has tried smaller and smaller micro-batches | a result |
| `non_finite` | the training loss is no number any more | a result |
| `preempted` | the process or its node was lost | tried again from the checkpoint, MAX_LOSSES times |
| `disk_full` | a checkpoint or the log could not be written | everything stops, with a message |
| `taken_over` | another process goes on with the run, whose one writer it is | nothing is written; the process ends |
| `store` | the store of a storage URI was out of reach where a run begins or ends | tried again, likewise |
| `bug` | anything else | shown to the user, never tried again by itself |
| `runs` | of a search or comparison: some of its runs failed | `resume` tries those again that another try may mend |

The traceback of a failure is in the run's folder, as ERROR.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from triaccel_ray.cuda.out_of_memory import is_out_of_memory
from triaccel_ray.model.dry_run import IN_YOUR_CODE
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, LogError, Start, TakenOverError, read_events
from triaccel_ray.service.storage.layout import DAMAGED, ERROR, REPLACED

MAX_LOSSES = 3
"""Processes that a run may lose before it counts as failed."""

RESULTS = ("out_of_memory", "non_finite")
"""Causes that say something about what was tried: trying the same again would end the same way."""


class NonFiniteLossError(RuntimeError):
    """The training loss is no longer a number: the run has diverged."""


class PreemptedError(RuntimeError):
    """The process that trained the run, or its node, was lost too often."""


class DiskFullError(ValueError):
    """A file of the run could not be written for lack of room; what was complete before is still there."""


class StoreError(ValueError):
    """A store cannot be used, or not now; the message names it, the reason and the way out."""


class RunFailedError(RuntimeError):
    """A run has failed after it had begun; the message names it, the cause and where to look."""

    def __init__(self, folder: Path, error: Exception) -> None:
        """Of the run in `folder`, ended by `error`."""
        self.cause = cause_of(error)
        known = isinstance(error, NonFiniteLossError | PreemptedError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        trace = f", the traceback in {ERROR}" if (folder / ERROR).exists() else ""
        where = [note for note in getattr(error, "__notes__", ()) if note.startswith(IN_YOUR_CODE)]
        said = f"{folder.name} failed ({self.cause}): {text[:500]}; its log and last checkpoint are in {folder}{trace}"
        super().__init__("\n".join([said, *where[:1]]))
        self.__cause__ = error


class RunsFailedError(RunFailedError):
    """Of a search or comparison no run came to its end; the message says how each of them failed."""

    def __init__(self, failures: Sequence[str]) -> None:
        """Of runs that failed so."""
        RuntimeError.__init__(self, "\n".join(failures))
        self.cause = "runs"


_CAUSES = {
    NonFiniteLossError: "non_finite",
    PreemptedError: "preempted",
    DiskFullError: "disk_full",
    TakenOverError: "taken_over",
    StoreError: "store",
}


def cause_of(error: BaseException) -> str:
    """Returns the class of a failure, as the table above names it."""
    if isinstance(error, RunFailedError):
        return error.cause
    if is_out_of_memory(error):
        return "out_of_memory"
    return next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), "bug")


def failed(error: Exception) -> End:
    """Returns the last record of a run that `error` has ended."""
    return End(status="failed", cause=cause_of(error), message=f"{type(error).__name__}: {error}"[:500])


def write_traceback(folder: Path, error: BaseException) -> None:
    """Leaves the traceback in the run's folder, where there is room for it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).write_text("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def needing_room(folder: Path) -> Iterator[None]:
    """Writes to the disk of `folder` happen inside.

    Raises:
        DiskFullError: there was no room left.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not is_disk_full(error):
            raise
        raise DiskFullError(
            f"the disk of {folder} is full: make room, then go on with `triaccel resume`; everything up to the last "
            "checkpoint is kept"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Returns whether `error`, or one that it followed from, says that a disk or quota has no room left."""
    seen: BaseException | None = error  # torch, for one, raises its own error about the bytes that are missing
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def set_damage_aside(path: Path) -> str:
    """Cuts a damaged log back to the records before the damage; all of it is kept beside, as DAMAGED.

    Returns what to say of it; nothing where the log is whole, or there is none.
    """
    num_whole = 0
    try:
        for event in read_events(path):
            if num_whole == 0 and not isinstance(event.record, Start):
                break
            num_whole += 1
        else:
            return ""
    except LogError:
        if not path.exists():
            return ""
    with needing_room(path.parent):
        shutil.copyfile(path, path.with_name(DAMAGED))
        EventLog(path, keep=num_whole).close()
    return f"its log is damaged after {num_whole} records; all of it is in {DAMAGED}"


def keep_replaced(path: Path) -> bool:
    """Copies a log with epochs in it to REPLACED, before its run begins again; returns whether there was one."""
    if not path.exists() or not any(isinstance(event.record, Epoch) for event in read_events(path)):
        return False
    with needing_room(path.parent):
        shutil.copyfile(path, path.with_name(REPLACED))
    return True


def broken_off(path: Path) -> tuple[list[tuple[int, Interruption]], Interruption | None]:
    """Returns the log's interruptions and their places, and the one that now follows; None where nothing had begun."""
    try:
        records = [event.record for event in read_events(path)]
    except LogError:
        return [], None
    earlier = [(place, record) for place, record in enumerate(records) if isinstance(record, Interruption)]
    if not records:
        return earlier, None
    end = records[-1]
    if isinstance(end, End):
        cause, message = end.cause or end.status, end.message or f"it was {end.status}"
        return earlier, Interruption(cause=cause, message=message, epoch=0)
    return earlier, Interruption(cause="preempted", message="the process or its node was lost", epoch=0)
