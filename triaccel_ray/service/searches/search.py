"""A search for thresholds: baselines and probe first, then Ray Tune over the space, judged on validation samples."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
from ray import tune
from ray.exceptions import RayActorError
from ray.tune.execution import class_cache
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from triaccel_ray.records.events import Claim, LogError, TakenOverError
from triaccel_ray.search_spaces.thresholds import ANCHOR, Calibration, calibration, search_space
from triaccel_ray.service.failures import MAX_LOSSES, DiskFullError, PreemptedError, StoreError, failed
from triaccel_ray.service.runs.actor import cpus_of_a_run
from triaccel_ray.service.runs.ending import end_run
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import RunRecord, read_if_begun, read_run
from triaccel_ray.service.runs.runs import OnGlance, run_all
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.searches.spec import SearchSpec
from triaccel_ray.service.searches.suggestions import NAME, Directions, JournaledSearch, quiet_optuna
from triaccel_ray.service.searches.trial import ThresholdTrial, TrialContext, grace_epochs, reopen
from triaccel_ray.service.storage.layout import BASELINES, read_value, require_new, write_value
from triaccel_ray.service.storage.mirroring import bring_notes, catch_up, edited
from triaccel_ray.service.storage.place import Place

_WAY_OUT = "restore it, or begin a new search"
SEARCH = "search.json"
PREPARED = "prepared.json"
TRIALS = "trials"
JOURNAL = "trials.jsonl"
PROBE_EPOCHS = 10
"""The probe trains for half of the run's epochs, for this many at most: variances fall over time."""
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN")
_ANNOUNCEMENTS = (DeprecationWarning, FutureWarning, optuna.exceptions.ExperimentalWarning)
"""What Tune and Optuna say of their own plans to whoever uses them."""
MIN_HEADROOM_BYTES = 64 * 2**20
"""Below this the noise of a resident set would decide about batch sizes."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What baselines and probe found out, on which the trials rely."""

    objective: Objective
    calibration: Calibration | None
    headroom_bytes: int | None
    """Memory on top of an idle process that trials may take; None where the user gave a budget."""


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """A search read back from its folder."""

    folder: Path
    spec: SearchSpec
    prepared: Prepared | None
    baselines: Mapping[str, RunRecord] = field(default_factory=dict)
    trials: tuple[RunRecord, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Name of a trial whose log or spec cannot be read -> what is wrong with it."""

    @property
    def objective(self) -> Objective:
        """What trials are judged by; without the condition on the metric before the AMP baseline has finished."""
        return (
            Objective(name=self.spec.objective, goal=self.spec.base.goal)
            if self.prepared is None
            else self.prepared.objective
        )


def begin_search(spec: SearchSpec, folder: Path) -> None:
    """Makes the search's folder and writes what was asked for.

    Raises:
        ValueError: the folder exists; nothing is touched.
    """
    require_new(folder)
    folder.mkdir(parents=True)
    write_value(folder / SEARCH, spec)


def prepare(
    spec: SearchSpec, place: Place, *, num_gpus: float, on_glance: OnGlance, shared: SharedSplits | None = None
) -> Prepared:
    """Returns what the trials need to know, from the baselines FP32 and AMP and the probe; runs those not yet run.

    Raises:
        RunFailedError: a baseline failed; the message says how.
        Exception: what a baseline that could not be set up, or found no room on the disk, has raised.
    """
    folder = place.folder
    path = folder / PREPARED
    if path.exists():
        return read_value(Prepared, path, _WAY_OUT)
    base = spec.base
    specs = {"fp32": replace(base, method="fp32"), "amp": replace(base, method="amp")}
    if spec.space == "thresholds":
        epochs = min(-(-base.recipe.epochs // 2), PROBE_EPOCHS)
        specs["probe"] = replace(base, method="probe", recipe=replace(base.recipe, epochs=epochs))
    done = {name: run for name in specs if (run := _finished(folder / BASELINES / name)) is not None}
    missing = {name: each for name, each in specs.items() if name not in done}
    outcomes = run_all(missing, place / BASELINES, num_gpus=num_gpus, on_glance=on_glance, resume=True, shared=shared)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise outcome
        done[name] = read_run(folder / BASELINES / name)
    prepared = _prepared(spec, done)
    write_value(path, prepared)
    return prepared


def tune_trials(
    spec: SearchSpec,
    prepared: Prepared,
    place: Place,
    *,
    num_gpus: float,
    resume: bool = False,
    shared: SharedSplits | None = None,
    claim: Claim | None = None,
) -> None:
    """Runs the trials under Ray Tune, with samples from `shared`; with `resume`, those that have not ended.

    With a `claim` on the search's own log, nothing is begun or noted once another process goes on with the search.

    A bug is no end. Whatever is on record is told to scheduler and sampler from the trials' logs, so that they know all
    that the search knew when it was broken off. Tune's own state, written every ten seconds, lags behind what trials
    have done; it goes to a temporary folder, and nothing is read from it. Trials are read back by `read_search`.

    Raises:
        StoreError: the trials' logs could not be taken from the store.
        DiskFullError: a trial found no room for its files; the others were stopped.
        TakenOverError: another process goes on with the search, or with one of its trials; likewise.
        KeyboardInterrupt: the user broke the trials off; they have ended their logs.
    """
    trials = place / TRIALS
    context = TrialContext(
        spec=replace(spec.base, method="triaccel", memory_headroom_bytes=prepared.headroom_bytes),
        objective=prepared.objective,
        calibration=prepared.calibration,
        place=trials,
        shared=shared,
    )
    reserved = {"cpu": cpus_of_a_run(num_gpus), "gpu": num_gpus}
    trainable = tune.with_resources(tune.with_parameters(ThresholdTrial, context=context), reserved)
    if resume:
        for trial in trials.folder.glob("*"):
            with edited(trials / trial.name):
                reopen(trial)
    temporary = TemporaryDirectory(prefix="triaccel-tune-", ignore_cleanup_errors=True)
    with warnings.catch_warnings(), quiet_optuna(), _quiet_tune(), temporary as own:
        for category in _ANNOUNCEMENTS:
            warnings.simplefilter("ignore", category)
        # Tune would send these to its actors by a runtime environment, which Ray writes to the logs of every machine.
        class_cache.ENV_VARS_TO_PROPAGATE.difference_update(_KEYS)
        try:
            with _interruptible():
                results = _tuner(spec, trainable, place, Path(own), claim).fit()
        except KeyboardInterrupt:
            with contextlib.suppress(StoreError):
                catch_up(trials, patience_s=0.0)
            raise
    ended = [results[index] for index in range(len(results))]
    for result in ended:
        if result.metrics and result.metrics.get("unfinished") in _ENDS_ALL:
            raise _ENDS_ALL[result.metrics["unfinished"]](result.metrics["message"])
    catch_up(trials)
    for result in ended:
        if result.error is not None and result.config:
            lost = isinstance(result.error, RayActorError)
            error = PreemptedError(f"its process was lost {MAX_LOSSES + 1} times") if lost else result.error
            with edited(trials / result.config[NAME]):
                end_run(trials.folder / result.config[NAME], context.spec, failed(error))


def read_search(folder: Path) -> SearchRecord:
    """Returns the search in `folder`, as far as it has come.

    Raises:
        LogError: there is none, or files that all of it depends on are damaged.
    """
    if not (folder / SEARCH).exists():
        raise LogError(f"folder {folder} holds no search ({SEARCH} is missing)")
    baselines = {name: run for name in ("fp32", "amp", "probe") if (run := read_if_begun(folder / BASELINES / name))}
    trials, damaged = [], {}
    for path in sorted((folder / TRIALS).glob("*")):
        try:
            trials += [run] if (run := read_if_begun(path)) else []
        except LogError as error:
            damaged[path.name] = str(error)
    return SearchRecord(
        folder=folder,
        spec=read_value(SearchSpec, folder / SEARCH, _WAY_OUT),
        prepared=read_value(Prepared, folder / PREPARED, _WAY_OUT) if (folder / PREPARED).exists() else None,
        baselines=baselines,
        trials=tuple(trials),
        damaged=damaged,
    )


def ranked(record: SearchRecord) -> list[tuple[float, RunRecord]]:
    """Returns the trials with figures, best first, with what the search maximised.

    Finished trials come before stopped ones: a figure after three epochs is none to choose by.
    """
    judge = record.objective
    valued = [(judge.value(run.epochs[-1].epoch, figures), run) for run in record.trials if (figures := run.figures)]
    return sorted(valued, key=lambda pair: (pair[1].status != "finished", -pair[0], pair[1].name))


def best_trial(record: SearchRecord) -> RunRecord | None:
    """Returns the best finished trial that is feasible; None when there is none."""
    return next((run for value, run in ranked(record) if value > 0 and run.status == "finished"), None)


def _prepared(spec: SearchSpec, runs: Mapping[str, RunRecord]) -> Prepared:
    amp = runs["amp"]
    objective = Objective.against(amp.epochs, spec.base.goal, name=spec.objective, margin=spec.margin)
    headroom = spec.base.memory_headroom_bytes
    if spec.base.memory_budget_bytes is None and headroom is None:
        headroom = _headroom_bytes(spec.base, runs.get("probe", amp))
    calibrated_on = None
    if "probe" in runs:
        variances: dict[str, list[float]] = {}
        for tick in runs["probe"].ticks:
            for layer in tick.observation.layers:
                if layer.variance is not None:
                    variances.setdefault(layer.name, []).append(layer.variance)
        calibrated_on = calibration(variances)
    return Prepared(objective=objective, calibration=calibrated_on, headroom_bytes=headroom)


def _headroom_bytes(base: RunSpec, run: RunRecord) -> int:
    """Returns the room that the ladder's largest batch takes, by what the start took in `run`.

    Not the whole device: on a large one no threshold would ever be met. Within it rho chooses among all rungs.
    """
    idle_bytes = int(run.end.results["idle_gb"] * 1e9) if run.end else 0
    taken, batch = run.epochs[-1].peak_bytes - idle_bytes, base.control.batch
    return max(taken * batch.maximum // batch.start, MIN_HEADROOM_BYTES)


_ENDS_ALL: Mapping[str, type[ValueError]] = {"disk_full": DiskFullError, "taken_over": TakenOverError}
"""Why a trial did not go on -> what the search then ends with."""


class _EndOfAll(tune.Stopper):
    """Stops all trials once one has found no room on the disk, or another process at its place."""

    _found = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self._found = self._found or result.get("unfinished") in _ENDS_ALL
        return False

    def stop_all(self) -> bool:
        return self._found


class _Pruner(ASHAScheduler):
    """Successive halving that stops a trial out of reach of the AMP baseline, however few came as far before it."""

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        action: str = super().on_trial_result(tune_controller, trial, result)
        return self.STOP if result["hopeless"] else action


def _tuner(spec: SearchSpec, trainable: Any, place: Place, own: Path, claim: Claim | None) -> tune.Tuner:
    space = search_space(spec.space, spec.optional)
    pareto = spec.objective == "pareto"
    several: Directions = {"quality": "maximize", "seconds_per_epoch": "minimize", "peak_gb": "minimize"}
    scheduler: TrialScheduler = FIFOScheduler()
    if not pareto:
        epochs = spec.base.recipe.epochs
        scheduler = _Pruner(
            time_attr="epoch",
            metric="objective",
            mode="max",
            max_t=epochs,
            grace_period=grace_epochs(epochs),
            reduction_factor=3,
        )
    return tune.Tuner(
        trainable,
        param_space={},
        tune_config=tune.TuneConfig(
            search_alg=JournaledSearch(
                space,
                place.folder / JOURNAL,
                claim=claim,
                sampler=partial(_sampler, spec),
                directions=several if pareto else {"objective": "maximize"},
                first={name: ANCHOR[name] for name in space},
                noted=partial(bring_notes, place),
            ),
            scheduler=scheduler,
            num_samples=spec.num_trials,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=place.base_name,
            storage_path=str(own),
            verbose=0,
            progress_reporter=tune.CLIReporter(),  # silent then; a notebook's own clears what the cell has shown
            stop=_EndOfAll(),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trials keep their own
            failure_config=tune.FailureConfig(max_failures=MAX_LOSSES),
        ),
    )


def _sampler(spec: SearchSpec, number: int) -> optuna.samplers.BaseSampler:
    """Returns the sampler of the trial of this number."""
    return optuna.samplers.TPESampler(
        n_startup_trials=max(spec.num_trials // 4, 4), multivariate=True, seed=(spec.seed * 10_007 + number) % 2**32
    )


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Tune tells errors alone meanwhile, not where its temporary files are: a notebook's own Ray may tell all."""
    logger = logging.getLogger("ray.tune")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes Ctrl-C an exception again, after Tune has ended the trials in good order.

    Tune puts a handler of its own in place, which returns from `fit` as if all trials had been run, and takes it away
    when it has caught the signal, and only then.
    """
    elsewhere = threading.current_thread() is not threading.main_thread()
    if elsewhere or os.environ.get("TUNE_DISABLE_SIGINT_HANDLER", "0") != "0":  # there Tune leaves the handler alone
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


def _finished(folder: Path) -> RunRecord | None:
    run = read_if_begun(folder)
    return run if run is not None and run.status == "finished" else None
