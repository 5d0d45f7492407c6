"""Carrying out a set of runs on actors; Ray decides where and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError

from triaccel_ray.events import Epoch
from triaccel_ray.out_of_memory import first_line
from triaccel_ray.service.failures import (
    MAX_LOSSES,
    DiskFullError,
    PreemptedError,
    RunFailedError,
    StoreError,
    cause_of,
)
from triaccel_ray.service.runs.actor import original_error, start_actor
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Status
from triaccel_ray.service.storage.mirroring import catch_up
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

    On a GPU, a run that has finished hands its process on to another one of its method: libraries and the CUDA context
    take longer to load than small runs to train. Other methods load other kernels, whose memory would count as theirs.
    """
    drives = {
        name: _Drive(
            root / name,
            spec,
            partial(start_actor, spec, root / name, num_gpus=num_gpus, shared=shared),
            resume=resume,
            hands_on=num_gpus > 0,
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
                ended = drives.pop(name)
                heir = ended.heir(drives.values()) if glance.error is None else None
                if heir is None:
                    ended.close()
                else:
                    heir.take_over(ended)
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


class _Drive:
    """One run's calls, one after the other."""

    def __init__(self, place: Place, spec: RunSpec, start: Callable[[], Any], *, resume: bool, hands_on: bool) -> None:
        self._place, self._name, self._spec, self._start_actor = place, place.base_name, spec, start
        self._hands_on, self._resume = hands_on, resume
        self._num_lost = 0
        self._begin(resume=resume)

    def _begin(self, *, resume: bool) -> None:
        self._actor = self._start_actor()
        self._expect(self._actor.setup.remote(resume=resume))

    def _expect(self, setup: Any) -> None:
        self.pending: Any = setup
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
        last = result if isinstance(result, Epoch) else None
        self._epochs_done = result.epoch if isinstance(result, Epoch) else int(result)
        self._finishing = self._epochs_done >= self._spec.recipe.epochs
        self.pending = self._actor.finish.remote() if self._finishing else self._actor.train_epoch.remote()
        return Glance(name=self._name, last=last)

    def heir(self, others: Iterable[_Drive]) -> _Drive | None:
        """Returns the run that takes this finished one's process over: the last of its method that waits for one.

        The first may have one by now, that is on its way to set it up.
        """
        waiting = [each for each in others if each._epochs_done is None and each._num_lost == 0]
        alike = [each for each in waiting if each._spec.method == self._spec.method]
        return alike[-1] if alike and self._hands_on else None

    def take_over(self, ended: _Drive) -> None:
        """Goes on in the process of a run that has ended, in place of waiting for one of its own."""
        ray.kill(self._actor)
        self._actor = ended._actor
        self._expect(self._actor.set_up_another.remote(self._spec, self._place, resume=self._resume))

    def _lost(self, error: RayActorError) -> Glance:
        """Begins again from the checkpoint on another actor, wherever there is room, unless that happens too often."""
        self._num_lost += 1
        if self._num_lost > MAX_LOSSES:
            text = f"its process was lost {self._num_lost} times, the last time so: {first_line(error)}"
            return Glance(name=self._name, error=self._outcome(PreemptedError(text)))
        self.close()
        self._begin(resume=True)
        return Glance(name=self._name)

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
