"""A single run on an actor that owns its device: a thin shell around `Worker`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayTaskError

from triaccel_ray.events import Epoch
from triaccel_ray.service.failures import telling_mistakes
from triaccel_ray.service.orphan import end_with_parent
from triaccel_ray.service.shared_data import SharedSplits
from triaccel_ray.service.spec import RunSpec
from triaccel_ray.service.worker import Status, Worker

SAME_LIBRARIES = (tune,)
"""Loaded for its size alone: on a CPU a baseline's resident set has to hold what a trial's does."""


class RunActor:
    """Builds, trains and ends one run; `status` answers while an epoch is under way."""

    def __init__(self, spec: RunSpec, folder: str, shared: SharedSplits | None = None) -> None:
        """Remembers what to do; `setup` does it, so that its errors reach the caller as they are."""
        self._spec, self._folder, self._shared = spec, Path(folder), shared
        self._worker: Worker | None = None
        end_with_parent()

    def setup(self, *, resume: bool) -> int:
        """Builds the run, or restores it from its checkpoint; returns the epochs done.

        Raises:
            SetupError: there is a mistake in the task's own code.
        """
        splits = None if self._shared is None else self._shared.get()
        with telling_mistakes():
            self._worker = worker = Worker(self._spec, self._folder, splits)
            if resume:
                return worker.resume()
            worker.start()
        return 0

    def train_epoch(self) -> Epoch:
        """Trains one epoch and writes a checkpoint."""
        worker = self._get()
        record = worker.train_epoch()
        worker.checkpoint()
        return record

    def finish(self) -> dict[str, float]:
        """Ends the run and returns its results."""
        worker = self._get()
        results = worker.finish()
        worker.close()
        return results

    def stop(self) -> None:
        """Ends the log of a run that is broken off, whatever it is at; to be followed by the actor's end."""
        if self._worker is not None and not self._worker.ended:
            self._worker.stop()

    def status(self) -> Status | None:
        """Returns a glance at the run; None before it is built or after it has ended."""
        return None if self._worker is None else self._worker.status()

    def _get(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the run is not set up: call setup first")
        return self._worker


def start_actor(spec: RunSpec, folder: Path, *, num_gpus: float, shared: SharedSplits | None = None) -> Any:
    """Returns a handle to a new actor for the run, with `num_gpus` GPUs and one CPU of its own.

    Two threads: one trains, the other answers `status` and `stop`.
    """
    actor: Any = ray.remote(RunActor)
    return actor.options(num_cpus=1, num_gpus=num_gpus, max_concurrency=2).remote(spec, str(folder), shared)


def original_error(error: Exception) -> Exception:
    """Returns the exception that an actor's method raised, without Ray's wrapping, its traceback there as a note."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return error
    if isinstance(error, RayTaskError):
        cause.add_note(f"raised in the run's own process:\n{error}")
    return cause
