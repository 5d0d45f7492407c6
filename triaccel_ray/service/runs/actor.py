"""A single run on an actor that owns its device: a thin shell around `Worker`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayTaskError

from triaccel_ray.config import require
from triaccel_ray.records.events import Epoch, TakenOverError
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.runs.orphan import end_with_parent
from triaccel_ray.service.runs.pace import Pace
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Status, Worker
from triaccel_ray.service.storage.mirroring import RunCopy
from triaccel_ray.service.storage.place import Place

SAME_LIBRARIES = (tune,)
"""Loaded for its size alone: on a CPU a baseline's resident set has to hold what a trial's does."""
STOP_PATIENCE_S = 3.0
"""How long a run that is broken off tries to bring its last records to a store; its driver waits longer."""
_WATCH = "watch"
"""Group of the calls that a thread of their own answers, while another trains.

One thread makes all the others: for every thread that multiplies matrices PyTorch takes workspaces, 0.1 GB on an H200,
which would count as the run's.
"""


class RunActor:
    """Builds, trains and ends one run; `status` answers while an epoch is under way."""

    def __init__(self, spec: RunSpec, place: Place, shared: SharedSplits | None = None) -> None:
        """Remembers what to do; `setup` does it, so that its errors reach the caller as they are."""
        self._spec, self._place, self._shared = spec, place, shared
        self._copy = RunCopy(place)
        self._worker: Worker | None = None
        self._saving = Pace()
        end_with_parent()

    def setup(self, *, resume: bool) -> int:
        """Builds the run, or restores it from its checkpoint; returns the epochs done.

        Raises:
            UserCodeError: there is a mistake in the task's own code.
            StoreError: the store cannot be reached.
        """
        self._copy.open()
        splits = None if self._shared is None else self._shared.get()
        with self._copy.kept_if_failed():
            self._worker = worker = Worker(self._spec, self._place.folder, splits)
            if resume:
                return worker.resume()
            worker.start()
        return 0

    def train_epoch(self) -> Epoch:
        """Trains one epoch; writes a checkpoint after the last, and after others unless that would take too long."""
        worker = self._get()
        with self._copy.kept_if_failed():
            record = worker.train_epoch()
            if worker.finished or self._saving.is_due:
                with self._saving.timed():
                    worker.checkpoint()
        self._copy.push_soon()
        return record

    def finish(self) -> dict[str, float]:
        """Ends the run and returns its results."""
        worker = self._get()
        with self._copy.kept_if_failed():
            results = worker.finish()
            worker.close()
        self._copy.close()
        return results

    @ray.method(concurrency_group=_WATCH)
    def stop(self) -> None:
        """Ends the log of a run that is broken off, whatever it is at; to be followed by the actor's end."""
        if self._worker is not None and not self._worker.ended:
            try:
                self._worker.stop()
            except TakenOverError:
                self._copy.abandon()
                raise
            with contextlib.suppress(StoreError):  # it is on this machine, and `resume` brings it there
                self._copy.close(STOP_PATIENCE_S)

    @ray.method(concurrency_group=_WATCH)
    def status(self) -> Status | None:
        """Returns a glance at the run; None before it is built or after it has ended."""
        return None if self._worker is None else self._worker.status()

    def _get(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the run is not set up: call setup first")
        return self._worker


def cpus_of_a_run(num_gpus: float) -> int:
    """Returns how many CPUs a run reserves: one beside a GPU; without, most of the cluster's smallest machine.

    Runs that share a machine's cores lengthen each other's steps, by which they are judged. The environment variable
    `TRIACCEL_CPUS_PER_RUN` sets another number, for large machines without a GPU.

    Raises:
        ValueError: the variable is no whole number of at least 1.
    """
    given = os.environ.get("TRIACCEL_CPUS_PER_RUN")
    if given is not None:
        rule = "must be a whole number of at least 1; unset it for the default"
        require(given.isdecimal() and int(given) >= 1, "TRIACCEL_CPUS_PER_RUN", given, rule)
        return int(given)
    if num_gpus > 0:
        return 1
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min((count for count in cpus if count), default=1) // 2 + 1


def start_actor(spec: RunSpec, place: Place, *, num_gpus: float, shared: SharedSplits | None = None) -> Any:
    """Returns a handle to a new actor for the run, with `num_gpus` GPUs and the CPUs that it reserves."""
    remote: Any = ray.remote  # its types do not know the argument
    actor = remote(concurrency_groups={_WATCH: 1})(RunActor)
    return actor.options(num_cpus=cpus_of_a_run(num_gpus), num_gpus=num_gpus).remote(spec, place, shared)


def original_error(error: Exception) -> Exception:
    """Returns the exception that an actor's method raised, without Ray's wrapping, its traceback there as a note."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    if isinstance(error, RayTaskError):
        cause.add_note(f"raised in the run's own process:\n{error}")
    return cause
