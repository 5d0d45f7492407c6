"""A run as a Ray Tune trial: the actor that owns the device, a thin adapter around `Worker`."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

from triaccel_ray.distributed.ranks import LostRankError
from triaccel_ray.measure.score import quality
from triaccel_ray.records.events import End, LogError, TakenOverError
from triaccel_ray.service.failures import (
    CONFIGURATION_CAUSES,
    DiskFullError,
    StoreError,
    cause_of,
    failure_record,
    picklable,
    write_traceback,
)
from triaccel_ray.service.runs.batch_tuner import BatchTuner
from triaccel_ray.service.runs.environment import end_with_parent, preload
from triaccel_ray.service.runs.group import Group
from triaccel_ray.service.runs.objective import Objective, Performance, grace_epochs
from triaccel_ray.service.runs.record import end_run, performance_of, read_if_begun
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import TUNE_BATCH, RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import TrainingFolder, editing_log

_logger = logging.getLogger(__name__)

NAME_KEY = "trial"
"""Key of a configuration: the name of the trial's folder."""
ENDED_KEY = "ended"
"""Key of a configuration: whether the trial had ended, as far as its search knew when it was interrupted."""
FINISHED_KEY = "finished"
"""Key of a result: whether the trial ended by itself, after its last epoch or with a failure."""
FAILED_OBJECTIVE = -1e9
"""Objective of a configuration that diverged or did not fit in memory: below that of any other."""


@dataclass(frozen=True, kw_only=True)
class TrialContext:
    """Settings shared by a set of trials."""

    place: StoragePath
    """Holds one folder per trial."""
    spec_of: Callable[[Mapping[str, Any]], RunSpec]
    """Tune configuration -> spec of its run."""
    objective: Objective | None = None
    """Objective of the search. None outside a search: results then have no figures, and a failure concerns its run
    alone."""
    shared: SharedSplits | None = None
    """The samples; None if each trial reads them itself."""
    on_gpus: bool = False
    """Whether the ranks of a run on several GPUs have one each; else they are processes on CPUs."""


class RunTrial(tune.Trainable):
    """One run as a trial; each step trains one epoch, or times one batch size.

    It trains in this process, or on several GPUs in a group of others.
    Epochs already in the log, from a lost process or an interrupted search, are reported from there. So scheduler and
    sampler see every epoch, and no epoch that a checkpoint holds is trained twice.
    """

    _training: Worker | Group | None = None
    _unreported: deque[dict[str, Any]] | None
    """Results from the log still to be reported to Tune; None before the first step."""

    def setup(self, config: dict[str, Any], context: TrialContext) -> None:  # type: ignore[override]  # with_parameters
        """Stores the spec of the run; the first step that trains builds its worker."""
        self._context = context
        self._configure(config)
        end_with_parent()
        if not self._spec.is_distributed:
            preload()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Switches the actor to another configuration; it keeps its CUDA context."""
        self.cleanup()
        self._configure(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Trains one epoch, or reports one from the log; returns a failed configuration as a result.

        A full disk, or a run taken over by another process, is also a result: it ends all trials.
        """
        try:
            if self._unreported is None:
                self._folder.open()
                self._unreported = deque(self._results_in_log(self._folder.path))
            return self._unreported.popleft() if self._unreported else self._train()
        except (StoreError, LostRankError):  # Tune retries it on any machine with room: the run itself is fine
            raise
        except Exception as error:
            try:
                return self._failure(error)
            except (DiskFullError, TakenOverError) as larger:
                return self._failure(larger)

    def cleanup(self) -> None:
        """Ends the run's log and frees its memory."""
        training, self._training = self._training, None
        if training is not None:
            # A full disk or a takeover has been reported already, and need not be in the log.
            with contextlib.suppress(DiskFullError, TakenOverError):
                training.stop()
            with contextlib.suppress(DiskFullError):
                training.close()
        self._upload()

    def _configure(self, config: dict[str, Any]) -> None:
        self._spec = self._context.spec_of(config)
        self._place = self._context.place / config.get(NAME_KEY, self.trial_id)
        self._folder = TrainingFolder(self._place)
        self._has_ended, self._unreported = config.get(ENDED_KEY, False), None

    def _results_in_log(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the results of the epochs in the folder's log; the last is marked done if the trial has ended."""
        try:
            run = read_if_begun(folder)
        except LogError:  # damaged: the run resumes from before the damage, and its log says so
            run = None
        if run is None or run.spec != self._spec:
            return []
        is_finished = run.status == "finished"
        if self._context.objective is None and not is_finished:  # a caller that reruns it knows how it ended
            return []
        results = [self._result(epoch.epoch, performance_of(epoch, run.start.goal)) for epoch in run.epochs]
        if run.end is not None and run.end.status == "failed":
            return [*results, _failed_result(run.end.cause, run.end.message)]
        if results and (self._has_ended or is_finished or results[-1]["done"]):
            results[-1] |= {"done": True, FINISHED_KEY: is_finished}
            if run.end is None:  # pruned by the scheduler, and lost before it was logged
                end_run(folder, None, End(status="stopped"))
        return results

    def _train(self) -> dict[str, Any]:
        context, training = self._context, self._training
        if training is None and self._spec.is_distributed:
            training = self._training = Group(self._spec, self._place, on_gpus=context.on_gpus, shared=context.shared)
        elif training is None:
            splits = None if context.shared is None else ray.get(context.shared)
            kind = BatchTuner if self._spec.method == TUNE_BATCH else Worker
            training = self._training = kind(self._spec, self._folder.path, splits)
            training.resume()
            self._folder.push_soon()
        progress = training.next_progress() if isinstance(training, Group) else training.train_epoch(self._folder)
        result = self._result(progress.epoch, progress.performance)
        return result | ({"done": True, FINISHED_KEY: True} if progress.finished else {})

    def _result(self, epoch: int, performance: Performance | None) -> dict[str, Any]:
        """Returns what Tune hears of an epoch; a trial that is too far behind AMP is done without having finished."""
        result: dict[str, Any] = {"epoch": epoch, "done": False, FINISHED_KEY: False}
        objective = self._context.objective
        if objective is None or performance is None:
            return result
        return {
            **result,
            "quality": quality(performance.metric, objective.goal),
            "seconds_per_epoch": performance.seconds,
            "peak_gb": performance.peak_gb,
            "score": performance.score,
            "objective": objective.value(epoch, performance),
            "done": epoch >= grace_epochs(self._spec.recipe.epochs) and objective.is_hopeless(epoch, performance),
        }

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Logs a failure, also one from before the run began, and returns the trial's last result.

        In a search a bug is raised, so that Tune does not reuse the process. The trial that Tune starts in its place
        finds the failure in the log, and trains nothing.
        """
        cause, training = cause_of(error), self._training
        result = _failed_result(cause, str(error))
        if isinstance(error, DiskFullError | TakenOverError):
            if isinstance(training, Worker):
                training.log.ended = True
            return result
        is_in_search = self._context.objective is not None
        has_begun = training is not None and training.has_begun
        is_refused = not is_in_search and cause == "bug" and not has_begun
        if not is_refused:  # invalid input must not use up the run's name
            if isinstance(training, Worker) and has_begun:
                training.fail(error)
            else:  # the ranks of a group have ended, and their log may be on another machine
                is_elsewhere = isinstance(training, Group)
                with editing_log(self._place) if is_elsewhere else nullcontext(self._folder.path) as folder:
                    write_traceback(folder, error)
                    run = read_if_begun(folder) if has_begun else None
                    if run is None or run.end is None:  # else rank 0 has ended it
                        end_run(folder, self._spec, failure_record(error))
            self._upload()
        if not is_in_search:
            error = error if isinstance(training, Group) else picklable(error)
            return {**result, "error": error, "is_refused": is_refused}
        if cause not in CONFIGURATION_CAUSES:
            raise error
        return result

    def _upload(self) -> None:
        """Uploads everything to the store; a failure is only logged, so that the actor can report or start a run."""
        try:
            self._folder.close()
        except (StoreError, TakenOverError) as failure:
            _logger.warning("%s", failure)


def _failed_result(cause: str, message: str) -> dict[str, Any]:
    """Returns the last result of a trial that failed.

    `unfinished` is the cause, if the configuration is not to blame. Figures are so bad that a search avoids it.
    """
    performance = {
        "quality": 0.0,
        "seconds_per_epoch": 1e9,
        "peak_gb": 1e9,
        "score": 0.0,
        "objective": FAILED_OBJECTIVE,
    }
    unfinished = "" if cause in CONFIGURATION_CAUSES else cause
    return {**performance, "done": True, FINISHED_KEY: True, "unfinished": unfinished, "message": message}


def reopen(folder: Path) -> None:
    """Marks a run as stopped if its configuration is not to blame for its failure, so that it is tried again."""
    with contextlib.suppress(LogError):  # a damaged log is set aside when its run resumes
        run = read_if_begun(folder)
        if run is not None and run.end is not None and run.end.status == "failed" and not run.has_outcome:
            end_run(folder, None, replace(run.end, status="stopped"))
