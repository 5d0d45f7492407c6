"""Trains sets of runs as Ray Tune trials; Tune handles placement, concurrency and lost processes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError, RayError
from ray.tune.execution import class_cache
from ray.tune.experiment import Trial

from triaccel_ray.config import require
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.distributed.ranks import LostRankError
from triaccel_ray.records.events import End, LogError, TakenOverError
from triaccel_ray.service.cluster.cluster import environment_variables
from triaccel_ray.service.failures import (
    MAX_LOSSES,
    DiskFullError,
    PreemptedError,
    RunFailedError,
    StoreError,
    failure_record,
)
from triaccel_ray.service.runs.group import release_gpus
from triaccel_ray.service.runs.record import end_run, read_if_begun
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trial import NAME_KEY, RunTrial, TrialContext
from triaccel_ray.service.storage.mirror import pull_run
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import editing_log

_STOPS_ALL_TRIALS: Mapping[str, type[ValueError]] = {"disk_full": DiskFullError, "taken_over": TakenOverError}
"""Cause that stops all trials once one of them reports it -> the exception that `fit` then raises."""
_TRIAL_OF_A_GROUP = tune.PlacementGroupFactory([{"node:__internal_head__": 0.001}])
"""Resources of a trial whose ranks are in processes of their own. Tune demands some, and on the head node, which a
cluster must not lose anyway, it outlives any machine whose GPUs train."""
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
_TUNE_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # else Tune prints tables, even when silenced
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a task's relative paths start at the command's folder
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the event log has everything
}


def run_all(
    specs: Mapping[str, RunSpec],
    root: StoragePath,
    *,
    num_gpus: float,
    shared: SharedSplits | None = None,
    reuse_actors: bool = False,
) -> dict[str, Exception]:
    """Trains or resumes every run, and returns the exceptions of those that failed, by name.

    Each run trains in `root / name`, with samples from `shared` if given, in its own process unless `reuse_actors`.
    Failures are wrapped in RunFailedError, except a StoreError and the error of a run that never began.
    Raises as `fit`.
    """
    if not specs:
        return {}
    by_name = dict(specs)
    context = TrialContext(place=root, spec_of=lambda config: by_name[config[NAME_KEY]], shared=shared)
    limits = [limit for spec in specs.values() if (limit := num_groups(spec, num_gpus)) is not None]
    config = tune.TuneConfig(reuse_actors=reuse_actors, max_concurrent_trials=min(limits, default=None))
    results = fit(context, config, num_gpus=num_gpus, space={NAME_KEY: tune.grid_search(list(by_name))})
    failures = {name: _run_error(root / name, result) for name, result in results.items()}
    return {name: error for name, error in failures.items() if error is not None}


def fit(
    context: TrialContext, config: tune.TuneConfig, *, num_gpus: float, space: dict[str, Any] | None = None
) -> dict[str, Mapping[str, Any]]:
    """Trains the trials of `config`, or those listed in `space`, with Ray Tune; returns their last results by name.

    If a trial was lost too often or could not reach its store, its result is the exception, under `error`. Its log has
    it, too. Tune keeps its own state in a temporary folder, and nothing is read from it.

    Raises:
        DiskFullError: the disk was full for one trial; the others were stopped.
        TakenOverError: another process has taken over one of the trials, or their search; likewise.
        StoreError: the store cannot be reached.
        KeyboardInterrupt: the user interrupted the trials; they have ended their logs.
    """
    context = replace(context, on_gpus=num_gpus > 0)
    alone = tune.PlacementGroupFactory([{"CPU": cpus_of_a_run(num_gpus), "GPU": num_gpus}])

    def reserved(trial: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        return _TRIAL_OF_A_GROUP if context.spec_of(trial).is_distributed else alone

    trainable = tune.with_resources(tune.with_parameters(RunTrial, context=context), reserved)
    begun = _BegunTrials()
    with _quiet_tune(), TemporaryDirectory(prefix="triaccel-tune-", ignore_cleanup_errors=True) as folder:
        tuner = tune.Tuner(
            trainable,
            param_space=space or {},
            tune_config=config,
            run_config=tune.RunConfig(
                name="trials",
                storage_path=folder,
                verbose=0,
                progress_reporter=tune.CLIReporter(),  # silent here; the one for notebooks clears the cell's output
                callbacks=[begun],
                stop=_StopAllTrials(),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trials write their own
                failure_config=tune.FailureConfig(max_failures=MAX_LOSSES),
            ),
        )
        try:
            with _interruptible():
                tuner.fit()
        except KeyboardInterrupt:
            for name, trial in begun.trials.items():
                _end_if_unfinished(context.place / name)
                if context.spec_of(trial.config).is_distributed:
                    with contextlib.suppress(RayError):  # the interrupt may have ended Ray, too
                        release_gpus(context.place / name)
            raise
        last = {name: _last_result(context, trial) for name, trial in begun.trials.items()}
    # Reference cycles in Tune hold Ray handles. Freed by another thread during Ray's shutdown, they end the process.
    del tuner, begun
    gc.collect()
    return last


def _last_result(context: TrialContext, trial: Trial) -> Mapping[str, Any]:
    """Returns a trial's last result, and ends the log of one that Tune gave up; raises as `fit`."""
    result: dict[str, Any] = trial.last_result or {}
    cause = result.get("unfinished", "")
    if cause in _STOPS_ALL_TRIALS:
        raise _STOPS_ALL_TRIALS[cause](result["message"])
    if trial.status != Trial.ERROR:
        return result
    error = _without_ray_wrapper(trial.get_pickled_error() or trial.get_error())
    with editing_log(context.place / trial.config[NAME_KEY]) as folder:
        end_run(folder, context.spec_of(trial.config), failure_record(error))
    return {"error": error}


def num_groups(spec: RunSpec, num_gpus: float) -> int | None:
    """Returns how many runs that are trained on several GPUs may run at a time; None for others.

    Tune cannot tell: Ray Train reserves the GPUs of a group, and the trial itself none. An elastic group takes all that
    it can use.
    """
    if not spec.is_distributed:
        return None
    available = int(ray.cluster_resources().get("GPU" if num_gpus > 0 else "CPU", 0))
    return max(available // spec.gpu_range[1], 1)


def cpus_of_a_run(num_gpus: float) -> int:
    """Returns the number of CPUs a run reserves: one with a GPU, else over half of the cluster's smallest machine.

    Runs that share a machine's cores slow down each other's steps, whose time they are judged by. The environment
    variable `TRIACCEL_CPUS_PER_RUN` sets another number, for large machines without a GPU.
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


class _BegunTrials(tune.Callback):
    """The trials that have begun, by name; at the end also those whose process never started."""

    def __init__(self) -> None:
        self.trials: dict[str, Trial] = {}

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.trials[trial.config[NAME_KEY]] = trial

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        self.trials = {trial.config[NAME_KEY]: trial for trial in trials}


class _StopAllTrials(tune.Stopper):  # no part of the callback: Tune pickles it with its own state
    """Stops all trials once one finds the disk full, or its run taken over by another process."""

    _is_found = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._is_found = self._is_found or result.get("unfinished") in _STOPS_ALL_TRIALS
        return False

    def stop_all(self) -> bool:
        return self._is_found


def _run_error(place: StoragePath, last: Mapping[str, Any]) -> Exception | None:
    """Returns the exception that tells the user how a run failed; None if it finished."""
    error: Exception | None = last.get("error")
    if not isinstance(error, StoreError):
        try:
            pull_run(place)  # first: the message depends on the files in the folder
        except StoreError as unreachable:
            error = unreachable
    if error is None:
        return None
    if isinstance(error, StoreError) or last.get("is_refused"):
        error.add_note(f"raised by the run {place.base_name}")
        return error
    return RunFailedError(place.folder, error)


def _without_ray_wrapper(error: Any) -> Exception:
    """Returns the exception that made Tune give up a trial, without Ray's wrapper."""
    cause = getattr(error, "cause", error)
    if isinstance(cause, RayActorError | LostRankError):
        return PreemptedError(f"its process was lost {MAX_LOSSES + 1} times, the last time so: {first_line(cause)}")
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


def _end_if_unfinished(place: StoragePath) -> None:
    """Ends the log of a run whose process was killed too fast to do so. A run in a remote store is left resumable."""
    with contextlib.suppress(LogError, DiskFullError):
        run = read_if_begun(place.folder) if place.uri is None else None
        if run is not None and run.end is None:
            end_run(place.folder, None, End(status="stopped"))


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Silences Tune, since event logs and results say everything, and keeps it from passing on AWS keys."""
    logger = logging.getLogger("ray.tune")
    level_before = logger.level
    missing = {name: value for name, value in _TUNE_SETTINGS.items() if name not in os.environ}
    # Tune would send these to its actors in a runtime environment, which Ray writes to the logs of every machine.
    class_cache.ENV_VARS_TO_PROPAGATE.difference_update(_AWS_KEYS)
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), environment_variables(missing):
            warnings.simplefilter("ignore", DeprecationWarning)  # about Tune's own API
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level_before)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raises KeyboardInterrupt after Ctrl-C, once Tune has ended the trials cleanly.

    Tune installs its own SIGINT handler, which makes `fit` return as if all trials had run. It restores the previous
    handler only after it has caught the signal.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or os.environ.get("TUNE_DISABLE_SIGINT_HANDLER", "0") != "0":  # Tune installs no handler then
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
        caught = signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt
