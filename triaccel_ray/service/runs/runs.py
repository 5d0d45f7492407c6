"""Carrying out a set of runs, each on an actor of its own; Ray decides where and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.records.events import Epoch, Interruption, LogError, read_events
from triaccel_ray.service.failures import (
    MAX_LOSSES,
    DiskFullError,
    PreemptedError,
    RunFailedError,
    StoreError,
    cause_of,
    failed,
)
from triaccel_ray.service.runs.actor import original_error, start_actor
from triaccel_ray.service.runs.ending import end_run
from triaccel_ray.service.runs.record import has_begun
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Status
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.storage.mirroring import catch_up, edited
from triaccel_ray.service.storage.place import Place

STATUS_INTERVAL_S = 0.5
STOP_TIMEOUT_S = 60.0
"""How long runs that are broken off may take to end their logs, mostly a moment; another Ctrl-C cuts it short."""


@dataclass(frozen=True, kw_only=True)
class Glance:
    """What is known of one run of a set while it is under way."""

    name: str
    status: Status | None = None
    last: Epoch | None = None
    results: Mapping[str, float] | None = None
    error: Exception | None = None
    notice: str = ""
    """How a run that was broken off goes on."""


OnGlance = Callable[[Glance], None]


def run_all(
    specs: Mapping[str, RunSpec],
    root: Place,
    *,
    num_gpus: float,
    on_glance: OnGlance,
    resume: bool = False,
    shared: SharedSplits | None = None,
) -> dict[str, Mapping[str, float] | Exception]:
    """Returns the results of every run, or the exception that ended it, by name.

    That is a RunFailedError for a run that had begun, what was raised for one that had not, and DiskFullError and
    StoreError as they are.

    Each run has the place `root / name`, and its samples from `shared` where given. As many train at once as the
    cluster has room for. Ctrl-C ends the logs of those under way.
    """
    drives = {
        name: _Drive(
            root / name,
            partial(start_actor, spec, root / name, num_gpus=num_gpus, shared=shared),
            num_epochs=spec.recipe.epochs,
            resume=resume,
        )
        for name, spec in specs.items()
    }
    try:
        return _drive_all(drives, root, on_glance)
    except KeyboardInterrupt:
        stopping = [reference for drive in drives.values() if (reference := drive.stop()) is not None]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=STOP_TIMEOUT_S)
            with contextlib.suppress(StoreError):
                catch_up(root, patience_s=0.0)
        raise
    finally:
        for drive in drives.values():
            drive.close()


def _drive_all(
    drives: dict[str, _Drive], root: Place, on_glance: OnGlance
) -> dict[str, Mapping[str, float] | Exception]:
    """Returns all outcomes; `drives` keeps those under way."""
    outcomes: dict[str, Mapping[str, float] | Exception] = {}
    while drives:
        pending = {drive.pending: name for name, drive in drives.items()}
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=STATUS_INTERVAL_S)
        for reference in ready:
            name = pending[reference]
            glance = drives[name].advance()
            on_glance(glance)
            if glance.results is not None or glance.error is not None:
                outcomes[name] = glance.error or glance.results or {}
                drives.pop(name).close()
            if glance.results is not None:
                try:
                    catch_up(root / name)
                except StoreError as error:
                    outcomes[name] = error
        for drive in drives.values():
            status = drive.glance()
            if status is not None:
                on_glance(status)
    return outcomes


def how_it_goes_on(folder: Path) -> str:
    """Returns what the log says of its last interruption, with which a resumed run begins; empty without one."""
    try:
        records = [event.record for event in read_events(folder / EVENTS)]
    except LogError:  # on another machine, or empty
        return ""
    return records[-1].message if records and isinstance(records[-1], Interruption) else ""


class _Drive:
    """One run's calls, one after the other."""

    def __init__(self, place: Place, start: Callable[[], Any], *, num_epochs: int, resume: bool) -> None:
        self._place, self._name, self._start_actor, self._num_epochs = place, place.base_name, start, num_epochs
        self._num_lost = 0
        self._begin(resume=resume)

    def _begin(self, *, resume: bool) -> None:
        self._actor, self._resumes = self._start_actor(), resume
        self.pending: Any = self._actor.setup.remote(resume=resume)
        self._status: Any = None
        self._epochs_done: int | None = None
        self._finishing = False

    def advance(self) -> Glance:
        """Takes the pending call's result and makes the next call."""
        try:
            result = ray.get(self.pending)
        except RayActorError as error:
            return self._lost(error)
        except Exception as error:  # whatever the run raised is its outcome
            return Glance(name=self._name, error=self._outcome(original_error(error)))
        if self._finishing:
            return Glance(name=self._name, results=result)
        notice = how_it_goes_on(self._place.folder) if self._epochs_done is None and self._resumes else ""
        last = result if isinstance(result, Epoch) else None
        self._epochs_done = result.epoch if isinstance(result, Epoch) else int(result)
        self._finishing = self._epochs_done >= self._num_epochs
        self.pending = self._actor.finish.remote() if self._finishing else self._actor.train_epoch.remote()
        return Glance(name=self._name, last=last, notice=notice)

    def _lost(self, error: RayActorError) -> Glance:
        """Begins again from the checkpoint on another actor, wherever there is room, unless that happens too often."""
        self._num_lost += 1
        if self._num_lost > MAX_LOSSES:
            text = f"its process was lost {self._num_lost} times, the last time so: {first_line(error)}"
            return Glance(name=self._name, error=self._given_up(PreemptedError(text)))
        self.close()
        self._begin(resume=True)
        return Glance(name=self._name)

    def _given_up(self, error: PreemptedError) -> Exception:
        """Writes the last record, which there is no process for, and returns the outcome."""
        try:
            with edited(self._place):  # first: a log that another machine wrote comes from the store
                if has_begun(self._place.folder):
                    end_run(self._place.folder, None, failed(error))
        except (DiskFullError, StoreError) as unwritten:
            return self._outcome(unwritten)
        return self._outcome(error)

    def _outcome(self, error: Exception) -> Exception:
        refused = self._epochs_done is None and cause_of(error) == "bug"  # bad input, or a mistake in the set-up
        if refused or isinstance(error, DiskFullError | StoreError):
            error.add_note(f"raised by the run {self._name}")
            return error
        try:
            catch_up(self._place)  # first: the message says what is in the folder
        except StoreError as unreachable:
            return unreachable
        return RunFailedError(self._place.folder, error)

    def glance(self) -> Glance | None:
        """Returns the status that was asked for at the last call, if it has come, and asks again."""
        if self._epochs_done is None:
            return None
        before, self._status = self._status, self._status or self._actor.status.remote()
        if before is None or not ray.wait([before], timeout=0)[0]:
            return None
        self._status = None
        try:
            status = ray.get(before)
        except Exception:  # the run's own call reports what is wrong
            return None
        return None if status is None else Glance(name=self._name, status=status)

    def stop(self) -> Any:
        """Begins to end the run's log, and returns what to wait for; None where the run has not begun."""
        reference = self._actor.stop.remote()
        return None if self._epochs_done is None else reference

    def close(self) -> None:
        """Ends the actor, and with it the device's memory."""
        ray.kill(self._actor)
