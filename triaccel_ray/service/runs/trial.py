"""A run as a Ray Tune trial: the actor that owns the device, a thin adapter around `Worker`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import pickle
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from triaccel_ray.measure.score import quality
from triaccel_ray.records.events import End, LogError, TakenOverError
from triaccel_ray.service.failures import RESULTS, DiskFullError, StoreError, cause_of, failed, write_traceback
from triaccel_ray.service.runs.objective import Figures, Objective, grace_epochs
from triaccel_ray.service.runs.record import end_run, read_if_begun
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import TrainingFolder

_logger = logging.getLogger(__name__)

NAME = "trial"
"""Key of a configuration: the name of the trial's folder."""
ENDED = "ended"
"""Key of a configuration: whether the trial has ended, as far as its search knew when it was broken off."""
FINISHED = "finished"
"""Key of a result: whether the trial has come to its own end, by its last epoch or by failing."""
FAILED_OBJECTIVE = -1e9
"""Objective of a configuration that diverged or never fitted: below every shortfall in points."""
SAVING_SHARE = 0.05
"""Of the time, for checkpoints; the last one is always written."""
NEGLIGIBLE_S = 0.25
"""A checkpoint that took less is written after every epoch."""
_PARENT_INTERVAL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What the trials of a set have in common."""

    place: StoragePath
    """Holds one folder a trial."""
    spec_of: Callable[[Mapping[str, Any]], RunSpec]
    """Configuration -> the run that it stands for."""
    objective: Objective | None = None
    """What a search judges its trials by. None: the runs are not judged while they train, and a failure is theirs
    alone."""
    shared: SharedSplits | None = None
    """The samples; None where each trial reads them itself."""


class RunTrial(tune.Trainable):
    """One run, trained one epoch a step.

    What its folder's log holds already, from a process that was lost or a search that was broken off, is reported from
    there: scheduler and sampler see every epoch, and none that a checkpoint holds is trained twice.
    """

    _worker: Worker | None = None
    _saved_at, _saving_s = 0.0, 0.0
    _told: deque[dict[str, Any]] | None
    """Results on record that Tune does not know yet; None before the first step."""

    def setup(self, config: dict[str, Any], context: RunContext) -> None:  # type: ignore[override]  # with_parameters
        """Remembers which run the configuration means; the first step that trains builds it."""
        self._context = context
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            _end_with_parent()
            _preload()
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Makes way for another configuration in the same actor, which keeps its CUDA context."""
        self.cleanup()
        self._take(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Trains one epoch, or reports one that is on record; a configuration that cannot train is a result.

        So are a full disk and a trial with which another process goes on: they end everything.
        """
        try:
            if self._told is None:
                self._folder.open()
                self._told = deque(self._on_record(self._folder.path))
            return self._told.popleft() if self._told else self._train()
        except StoreError:  # tried again by Tune, wherever there is room: nothing is wrong with the run
            raise
        except Exception as error:
            return self._failed(error)

    def cleanup(self) -> None:
        """Ends the run's log and lets go of its memory."""
        worker, self._worker = self._worker, None
        # What ends the search has been said, and the log can do without.
        if worker is not None:
            with contextlib.suppress(DiskFullError, TakenOverError):
                if not worker.log.ended and not self._is_broken:
                    worker.stop()
            with contextlib.suppress(DiskFullError):
                worker.close()
        self._bring()

    def _take(self, config: dict[str, Any]) -> None:
        self._spec = self._context.spec_of(config)
        self._folder = TrainingFolder(self._context.place / config.get(NAME, self.trial_id))
        self._has_ended, self._is_broken = config.get(ENDED, False), False
        self._told = None

    def _on_record(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the results that the folder's log holds; the last says so where the trial has ended."""
        try:
            run = read_if_begun(folder)
        except LogError:  # damaged: the run goes on from before the damage, and its log says so
            run = None
        if run is None or run.spec != self._spec:
            return []
        is_finished = run.status == "finished"
        if self._context.objective is None and not is_finished:  # who runs it again knows how it ended
            return []
        told = [self._result(epoch.epoch, run.figures_after(epoch.epoch)) for epoch in run.epochs]
        if run.end is not None and run.end.status == "failed":
            return [*told, _failure(len(told), run.end.cause, run.end.message)]
        if (self._has_ended or is_finished) and told:
            told[-1] |= {"done": True, FINISHED: is_finished}
            if run.end is None:  # stopped by the scheduler, and lost before it could say so
                end_run(folder, None, End(status="stopped"))
        return told

    def _train(self) -> dict[str, Any]:
        worker, shared = self._worker, self._context.shared
        if worker is None:
            splits = None if shared is None else shared.get()
            worker = self._worker = Worker(self._spec, self._folder.path, splits)
            worker.resume()
            self._folder.push_soon()
        if not worker.finished:
            worker.train_epoch()
            began = time.monotonic()
            span = began - self._saved_at + self._saving_s
            if worker.finished or self._saving_s <= max(NEGLIGIBLE_S, SAVING_SHARE * span):
                worker.checkpoint()
                self._saved_at = time.monotonic()
                self._saving_s = self._saved_at - began
        result = self._result(worker.loop.sampler.epoch, worker.figures)
        result["done"] = result[FINISHED] = worker.finished
        if worker.finished:
            worker.finish()
            self._folder.close()
        self._folder.push_soon()
        return result

    def _result(self, epoch: int, figures: Figures | None) -> dict[str, Any]:
        result: dict[str, Any] = {"epoch": epoch, "done": False, FINISHED: False}
        objective = self._context.objective
        if objective is None or figures is None:
            return result
        return {
            **result,
            "quality": quality(figures.metric, objective.goal),
            "seconds_per_epoch": figures.seconds,
            "peak_gb": figures.peak_gb,
            "score": figures.score,
            "objective": objective.value(epoch, figures),
            "hopeless": epoch >= grace_epochs(self._spec.recipe.epochs) and objective.is_hopeless(epoch, figures),
        }

    def _failed(self, error: Exception) -> dict[str, Any]:
        """Puts a failure on record, also one that came before there was a run, and returns the trial's last result.

        A bug in a search is raised, for its process is not used again then; the trial that Tune begins in its place
        finds it on record, and trains nothing.
        """
        cause, worker = cause_of(error), self._worker
        last = None if worker is None else worker.last
        result = _failure(0 if last is None else last.epoch, cause, str(error))
        if isinstance(error, DiskFullError | TakenOverError):
            self._is_broken = True
            return result
        is_alone, has_begun = self._context.objective is None, worker is not None and worker.log.is_open
        is_refused = is_alone and cause == "bug" and not has_begun
        if not is_refused:  # bad input must not use up the run's name
            if worker is None or not has_begun:
                write_traceback(self._folder.path, error)
                end_run(self._folder.path, self._spec, failed(error))
            elif not worker.log.ended:
                worker.fail(error)
            self._bring()
        if is_alone:
            return {**result, "error": _portable(error), "is_refused": is_refused}
        if cause not in RESULTS:
            raise error
        return result

    def _bring(self) -> None:
        """Brings everything to the store; a failure is logged alone: there is more to say or another run to begin."""
        try:
            self._folder.close()
        except (StoreError, TakenOverError) as failure:
            _logger.warning("%s", failure)


def _failure(epoch: int, cause: str, message: str) -> dict[str, Any]:
    """Returns the last result of a trial that failed after `epoch` epochs; `unfinished` has a cause that is no result.

    Figures are as bad as can be, so that a search avoids such configurations.
    """
    figures = {"quality": 0.0, "seconds_per_epoch": 1e9, "peak_gb": 1e9, "score": 0.0, "objective": FAILED_OBJECTIVE}
    unfinished = "" if cause in RESULTS else cause
    return {**figures, "epoch": epoch, "done": True, FINISHED: True, "unfinished": unfinished, "message": message}


def reopen(folder: Path) -> None:
    """Takes back the end of a run that failed for no fault of its configuration: what was wrong may be mended."""
    with contextlib.suppress(LogError):  # a damaged log is set aside by who goes on with it
        run = read_if_begun(folder)
        if run is not None and run.end is not None and run.end.status == "failed" and not run.has_outcome:
            end_run(folder, None, replace(run.end, status="stopped"))


def _portable(error: Exception) -> Exception:
    """Returns `error` with its traceback as a note, or, where it cannot travel, one that says the same."""
    error.add_note(f"raised in the run's own process:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is made anew
        told = RuntimeError(f"{type(error).__name__}: {error}")
        told.__notes__ = error.__notes__
        return told
    return error


def _end_with_parent() -> None:
    """Has this process end soon after its machine's raylet, whatever it is at then.

    Ray 2.60 leaves an actor alone whose raylet was lost. Its run goes on in another process, which may be on this
    machine and want its GPU.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_INTERVAL_S)
        os._exit(1)  # no exit that could wait: checkpoints and records are whole at any time

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


def _preload() -> None:
    """Loads what the first trial would load, and takes all that is loaded out of the garbage collector's sight.

    A trial collects garbage when it begins and when it ends, so that the next one's memory is measured from zero. To
    look through the 440,000 objects of the libraries takes 0.3 s a time, through those of a trial a millisecond.
    """
    importlib.import_module("torch._dynamo")  # which a fused optimizer loads
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # modules that count what they leave behind would find it all
