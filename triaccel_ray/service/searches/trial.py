"""A Tune trial is the actor that owns the GPU: a thin adapter around `Worker`."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import tune

from triaccel_ray.measure.score import quality
from triaccel_ray.records.events import End, LogError, TakenOverError
from triaccel_ray.search_spaces.thresholds import Calibration, thresholds
from triaccel_ray.service.failures import (
    RESULTS,
    DiskFullError,
    StoreError,
    cause_of,
    failed,
    write_traceback,
)
from triaccel_ray.service.runs.ending import end_run
from triaccel_ray.service.runs.objective import Figures, Objective
from triaccel_ray.service.runs.orphan import end_with_parent
from triaccel_ray.service.runs.pace import Pace
from triaccel_ray.service.runs.record import RunRecord, read_if_begun
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.warm import keep_libraries
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.searches.suggestions import ENDED, FINISHED, NAME
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.storage.mirroring import RunCopy
from triaccel_ray.service.storage.place import Place

_logger = logging.getLogger(__name__)

FAILED_OBJECTIVE = -1e9
"""Objective of a configuration that diverged or never fitted: below every shortfall in points."""
_FAILED = {
    "quality": 0.0,
    "seconds_per_epoch": 1e9,
    "peak_gb": 1e9,
    "score": 0.0,
    "objective": FAILED_OBJECTIVE,
    "done": True,
    FINISHED: True,
}


def grace_epochs(num_epochs: int) -> int:
    """Returns after how many epochs a trial may be stopped: half, two at least.

    Variances fall over the epochs and thresholds act late: what a quarter showed was up to 20 times off in the end.
    """
    return min(max(num_epochs // 2, 2), num_epochs)


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """What all trials of a search have in common."""

    spec: RunSpec
    """Everything but the thresholds."""
    objective: Objective
    calibration: Calibration | None
    place: Place
    """Holds one folder a trial."""
    shared: SharedSplits | None = None
    """The samples; None where each trial reads them itself."""


class ThresholdTrial(tune.Trainable):
    """One configuration of thresholds, trained one epoch a step.

    What its folder's log holds already, from a process that was lost or a search that was broken off, is reported from
    there: scheduler and sampler see every epoch, and none that a checkpoint holds is trained twice.
    """

    _worker: Worker | None = None
    _place: Place | None = None
    _copy: RunCopy | None = None
    _told: deque[dict[str, Any]]

    def setup(self, config: dict[str, Any], context: TrialContext | None = None) -> None:
        """Remembers which run the sampled thresholds mean; the first step that trains builds it."""
        if context is None:
            raise TypeError("context = None: pass one by tune.with_parameters(ThresholdTrial, context=...)")
        self._context = context
        self._saving = Pace()
        end_with_parent()
        keep_libraries()
        self._take(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Makes way for another configuration in the same actor, which keeps its CUDA context."""
        self._leave()
        self._take(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Trains one epoch, or reports one that is on record; a configuration that cannot train is a result.

        So are a full disk and a trial with which another process goes on: they end the search. A bug is raised, so that
        its process is not used again; the trial that Tune then begins in its place finds it on record, and trains
        nothing.
        """
        if self._place is None:
            raise RuntimeError("the trial has been cleaned up")
        try:
            if self._copy is None:
                self._open(self._place)
            return self._told.popleft() if self._told else self._train(self._place.folder)
        except StoreError:  # tried again by Tune, wherever there is room: nothing is wrong with the run
            raise
        except Exception as error:
            cause = cause_of(error)
            if isinstance(error, TakenOverError) and self._copy is not None:
                self._copy.abandon()
            if isinstance(error, DiskFullError | TakenOverError):
                self._broken = True
                return {**_FAILED, "epoch": 0, "unfinished": cause, "message": str(error)}
            self._note(error, self._place.folder)
            if cause in RESULTS:
                loop = getattr(self._worker, "loop", None)  # neither need be there: not even building them may fit
                return {**_FAILED, "epoch": 0 if loop is None else loop.sampler.epoch, "unfinished": ""}
            raise

    def cleanup(self) -> None:
        """Ends the run's log and lets go of its memory."""
        self._leave()

    def _take(self, config: dict[str, Any]) -> None:
        context = self._context
        control = thresholds(config, context.spec.control, context.calibration)
        self._spec = replace(context.spec, control=control)
        self._place = context.place / config.get(NAME, self.trial_id)
        self._ended = config.get(ENDED, False)
        self._broken = False

    def _open(self, place: Place) -> None:
        copy = RunCopy(place)
        copy.open()
        self._copy = copy
        self._told = deque(self._on_record(place.folder))

    def _on_record(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the results that the folder's log holds; the last says so where the trial has ended."""
        try:
            run = read_if_begun(folder)
        except LogError:  # damaged: the run goes on from before the damage, and its log says so
            run = None
        if run is None or run.spec != self._spec:
            return []
        told = [self._result(epoch.epoch, _figures_after(run, epoch.epoch)) for epoch in run.epochs]
        if run.end is not None and run.end.status == "failed":
            cause = "" if run.end.cause in RESULTS else run.end.cause
            return [*told, {**_FAILED, "epoch": len(told), "unfinished": cause, "message": run.end.message}]
        if (self._ended or (run.end is not None and run.end.status == "finished")) and told:
            told[-1]["done"] = True
            told[-1][FINISHED] = run.end is not None and run.end.status == "finished"
            if run.end is None:  # stopped by the scheduler, and lost before it could say so
                end_run(folder, None, End(status="stopped"))
        return told

    def _train(self, folder: Path) -> dict[str, Any]:
        assert self._copy is not None
        worker = self._worker
        if worker is None:
            shared = self._context.shared
            splits = None if shared is None else shared.get()
            worker = self._worker = Worker(self._spec, folder, splits)
            worker.resume()
        if not worker.finished:
            worker.train_epoch()
            if self._saving.is_due:
                with self._saving.timed():
                    worker.checkpoint()
        figures, epoch = worker.figures, worker.loop.sampler.epoch
        if worker.finished:
            worker.finish()
            self._copy.close()
        self._copy.push_soon()
        return {**self._result(epoch, figures), "done": worker.finished, FINISHED: worker.finished}

    def _result(self, epoch: int, figures: Figures) -> dict[str, Any]:
        objective = self._context.objective
        return {
            "epoch": epoch,
            "quality": quality(figures.metric, objective.goal),
            "seconds_per_epoch": figures.seconds,
            "peak_gb": figures.peak_gb,
            "score": figures.score,
            "objective": objective.value(epoch, figures),
            "hopeless": epoch >= grace_epochs(self._spec.recipe.epochs) and objective.is_hopeless(epoch, figures),
            "done": False,
            FINISHED: False,
        }

    def _note(self, error: Exception, folder: Path) -> None:
        """Puts a failure on record, also one that came before there was a run."""
        if self._worker is None or not self._worker.begun:
            write_traceback(folder, error)
            end_run(folder, self._spec, failed(error))
        elif not self._worker.ended:
            self._worker.fail(error)
        if self._copy is not None:
            _bring(self._copy)

    def _leave(self) -> None:
        worker, copy = self._worker, self._copy
        self._worker, self._copy, self._place = None, None, None
        # What ends the search has been said, and the log can do without.
        with contextlib.suppress(DiskFullError):
            if worker is not None and not worker.ended and not self._broken:
                _stop(worker, copy)
        with contextlib.suppress(DiskFullError):
            if worker is not None:
                worker.close()
        if copy is not None:
            _bring(copy)


def _stop(worker: Worker, copy: RunCopy | None) -> None:
    """Ends the log of a run that is broken off, unless another process goes on with it."""
    try:
        worker.stop()
    except TakenOverError:
        if copy is not None:
            copy.abandon()


def _bring(copy: RunCopy) -> None:
    """Brings everything to the store; a failure is logged alone, for there is more to say or another run to begin."""
    try:
        copy.close()
    except StoreError as failure:
        _logger.warning("%s", failure)


def reopen(folder: Path) -> None:
    """Takes back the end of a run that failed for no fault of its configuration: what was wrong may be mended."""
    try:
        run = read_if_begun(folder)
    except LogError:  # to be set aside by who goes on with it
        return
    end = None if run is None else run.end
    if end is not None and end.status == "failed" and end.cause not in RESULTS:
        end_run(folder, None, replace(end, status="stopped"))


def _figures_after(run: RunRecord, epoch: int) -> Figures:
    figures = run.figures_after(epoch)
    if figures is None:
        raise LogError(f"event log {run.folder / EVENTS}: epoch {epoch} of a trial has not been judged")
    return figures
