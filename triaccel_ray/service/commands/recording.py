"""Records runs in MLflow while a command works, in the store and experiment that hold them; a search is one tree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from triaccel_ray.records.events import End, EventLog, Start, TakenOverError
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.commands.next_steps import command_to_resume, resumable
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.console import err
from triaccel_ray.service.failures import cause_of, reporting_full_disk
from triaccel_ray.service.locations import tracking_uri_of
from triaccel_ray.service.runs.record import has_begun
from triaccel_ray.service.search.search import best_trial, read_search
from triaccel_ray.service.search.searcher import ended_trials
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import EVENTS, JOURNAL, create_with_spec
from triaccel_ray.service.storage.mirror import mirrored
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.shipment import ParentRun
from triaccel_ray.service.tracking.shipment_state import read_shipment_state
from triaccel_ray.service.tracking.shipper import Shipper
from triaccel_ray.service.tracking.tracker import Tracker, sqlite_path
from triaccel_ray.service.units import format_bytes

FLUSH_TIMEOUT_S = 15.0
"""Time that a command waits at its end for a store that does not answer."""


@dataclass(frozen=True, kw_only=True)
class CommandContext:
    """Where a command that trains keeps its result, and where it records it."""

    place: StoragePath
    where: Locations
    tracker: Tracker
    experiment: str
    """MLflow experiment."""
    resume: bool
    """Whether the command resumes what is at `place`."""

    @property
    def resume_command(self) -> str:
        """Command that resumes it after an interruption."""
        return command_to_resume(self.place, self.where)

    @property
    def folder(self) -> Path:
        """Folder of the results on this machine."""
        return self.place.folder


def with_recorded_store(folder: Path, where: Locations) -> Locations:
    """Returns `where` with the tracking store that holds the run of `folder`, unless `where` names a store.

    If that store is a SQLite file that no longer exists, it was moved, perhaps with the runs. Then the default store is
    used.
    """
    shipped = read_shipment_state(folder)
    if where.tracking_uri is None and shipped is not None:
        path = sqlite_path(shipped.store)
        usual = None if where.storage_path.uri is not None else tracking_uri_of(where)
        if shipped.store != usual and (path is None or path.is_file()):
            err.print(f"recorded in {shipped.store}, as before; --tracking-uri names another store", soft_wrap=True)
            return replace(where, tracking_uri=shipped.store)
    return where


def search_parent(spec: SearchSpec, folder: Path) -> ParentRun:
    """Returns the MLflow parent run of the search in `folder`."""
    tags = {"task": spec.base.task, "kind": "search", "seed": str(spec.seed), "space": spec.space}
    tags |= {"objective": spec.objective, "margin": f"{spec.margin:g}"}

    def closing_tags() -> dict[str, str]:
        record = read_search(folder)
        best, prepared = best_trial(record), record.prepared
        results = {} if best is None else {"best_trial": best.name}
        if prepared is not None and prepared.headroom_bytes is not None:
            results["memory_headroom"] = format_bytes(prepared.headroom_bytes)
        return results

    journal = folder / JOURNAL
    return ParentRun(tags=tags, pruned=lambda: ended_trials(journal), closing_tags=closing_tags)


@contextlib.contextmanager
def recording(context: CommandContext, *, parent: ParentRun | None = None) -> Iterator[None]:
    """Ships event logs to the tracking store in the background while the body trains, and the rest of them at the end.

    A failing store neither stops nor slows training. If records are missing at the end, a message says so and names the
    command that ships them.
    """
    shipper = Shipper(context.tracker, context.folder, experiment=context.experiment, parent=parent)
    shipper.start()
    timeout_s = FLUSH_TIMEOUT_S
    try:
        yield
    except BaseException:
        timeout_s = 5.0  # an error message should not wait long for the store
        raise
    finally:
        if not shipper.finish(timeout_s):
            err.print(
                f"not everything is recorded in {context.tracker.uri}: {shipper.last_error}\n"
                "Some records still wait. Nothing is lost: "
                f"`{context.resume_command}` records them once the store answers.",
                style="yellow",
                soft_wrap=True,
            )


@contextlib.contextmanager
def set_of_runs(
    spec: SearchSpec | ComparisonSpec, file: str, context: CommandContext, parent: ParentRun
) -> Iterator[EventLog]:
    """Yields the event log of a search or comparison, whose spec is in `file`; its folder is synced and recorded.

    Interrupted work ends the log too, so that nothing stays "running" for ever. Resuming removes that end.
    """
    folder = context.folder
    if not context.resume:
        create_with_spec(folder, file, spec)
    with resumable(context.resume_command, context.place), mirrored(context.place):
        with reporting_full_disk(folder):
            log = EventLog(folder / EVENTS, keep=1 if has_begun(folder) else 0)
            if log.num_records == 0:
                log.append(Start(control=spec.base.control, info=parent.tags))
        with recording(context, parent=parent):
            try:
                yield log
            except BaseException as error:
                end = End(status="failed", cause=cause_of(error), message=str(error))
                if isinstance(error, KeyboardInterrupt):
                    end = End(status="stopped")
                # The disk is full, perhaps, or another process took over: the error that is raised says so.
                with contextlib.suppress(OSError, TakenOverError):
                    log.append(end)
                raise
            finally:
                with reporting_full_disk(folder):
                    log.close()
