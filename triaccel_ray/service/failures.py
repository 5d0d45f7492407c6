"""Causes of failed runs; `docs/reliability.md` says what each means, and whether it is tried again.

The traceback of a failure is in the run's folder, in the file ERROR.
"""

from __future__ import annotations

import contextlib
import errno
import math
import pickle
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from triaccel_ray.apply.evaluate import Evaluation
from triaccel_ray.cuda.out_of_memory import is_out_of_memory
from triaccel_ray.distributed.ranks import LostRankError
from triaccel_ray.model.dry_run import IN_YOUR_CODE
from triaccel_ray.records.events import End, TakenOverError
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.storage.layout import ERROR

MAX_LOSSES = 3
"""Lost processes that a run survives; a run on several ranks survives as many in each epoch. One more is a failure."""

CONFIGURATION_CAUSES = ("out_of_memory", "non_finite")
"""Causes that lie in the settings tried: the same settings would fail the same way again."""


class NonFiniteLossError(RuntimeError):
    """The training loss, or a held-out loss or metric, is NaN or infinite: the run has diverged."""


class PreemptedError(RuntimeError):
    """The process that trained the run, or its node, was lost too often."""


class DiskFullError(ValueError):
    """The disk is too full to write a file of the run; files completed before are intact."""


class StoreError(ValueError):
    """A remote store cannot be used, perhaps only for now; the message has store, reason and remedy."""


class RunFailedError(RuntimeError):
    """A run failed after it had begun; the message has its name, the cause and where to look."""

    def __init__(self, folder: Path, error: Exception) -> None:
        """Describes the failure of the run in `folder` by `error`."""
        self.cause = cause_of(error)
        known = isinstance(error, NonFiniteLossError | PreemptedError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        trace = f", the traceback in {ERROR}" if (folder / ERROR).exists() else ""
        where = [note for note in getattr(error, "__notes__", ()) if note.startswith(IN_YOUR_CODE)]
        cause = "" if self.cause == "bug" else f" ({self.cause})"
        said = f"{folder.name} failed{cause}: {text[:500]}; its log and last checkpoint are in {folder}{trace}"
        super().__init__("\n".join([said, *where[:1]]))
        self.__cause__ = error


class AllRunsFailedError(RunFailedError):
    """No run of a search or comparison finished; the message says how each failed."""

    def __init__(self, failures: Iterable[str]) -> None:
        """Joins the messages of the failed runs."""
        RuntimeError.__init__(self, "\n".join(failures))
        self.cause = "runs"


_CAUSES = {
    NonFiniteLossError: "non_finite",
    PreemptedError: "preempted",
    LostRankError: "preempted",
    DiskFullError: "disk_full",
    TakenOverError: "taken_over",
    StoreError: "store",
}


def cause_of(error: BaseException) -> str:
    """Returns the cause of a failure, a word of the table in `docs/reliability.md`."""
    if isinstance(error, RunFailedError):
        return error.cause
    if is_out_of_memory(error):
        return "out_of_memory"
    return next((cause for kind, cause in _CAUSES.items() if isinstance(error, kind)), "bug")


def failure_record(error: Exception) -> End:
    """Returns the end record of a run that failed by `error`."""
    return End(status="failed", cause=cause_of(error), message=f"{type(error).__name__}: {error}"[:500])


def require_finite_result(evaluation: Evaluation, model: nn.Module, goal: Goal, way_out: str) -> None:
    """Raises NonFiniteLossError if the metric on held-out samples, or the loss and a value in the model, is not finite.

    A loss that is not finite may be the task's intention.
    """
    # An overflow may have reached a norm's running statistics.
    tensors = (*model.parameters(), *model.buffers())
    if not math.isfinite(evaluation.loss) and not all(tensor.isfinite().all() for tensor in tensors):
        raise NonFiniteLossError(
            f"the loss on held-out samples is {evaluation.loss}, and the model holds NaN or infinite values{way_out}"
        )
    if not math.isfinite(evaluation.metrics.get(goal.name, 0.0)):
        raise NonFiniteLossError(f"{goal.name} of held-out samples is {evaluation.metrics[goal.name]}{way_out}")


def picklable(error: Exception) -> Exception:
    """Returns `error` with its traceback as a note; if it cannot be pickled, a RuntimeError with the same message."""
    error.add_note(f"raised in the run's own process:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # unpickling may raise anything
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.__notes__ = error.__notes__
        return substitute
    return error


def write_traceback(folder: Path, error: BaseException) -> None:
    """Writes the traceback into the run's folder, if the disk allows it."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR).write_text("".join(traceback.format_exception(error)))


@contextlib.contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Wraps writes to the disk of `folder`, and turns the error of a full disk into a `DiskFullError`."""
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
    """Returns whether `error`, or an error in its chain, says that a disk or quota is full."""
    seen: BaseException | None = error  # torch, for one, raises an error of its own about missing bytes
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
