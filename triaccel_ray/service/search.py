"""A search for thresholds: baselines and probe first, then Ray Tune over the space, judged on validation samples."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import optuna
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.optuna import OptunaSearch

from search_spaces.thresholds import ANCHOR, Calibration, calibration, search_space
from triaccel_ray.config import require, require_integer
from triaccel_ray.events import LogError
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.service.objective import OBJECTIVES, Objective
from triaccel_ray.service.record import RunRecord, read_run
from triaccel_ray.service.runs import OnGlance, run_all
from triaccel_ray.service.shared_data import SharedSplits
from triaccel_ray.service.spec import RunSpec
from triaccel_ray.service.trial import ThresholdTrial, TrialContext
from triaccel_ray.service.worker import EVENTS, require_new, write_atomically

T = TypeVar("T")

SEARCH = "search.json"
PREPARED = "prepared.json"
BASELINES = "baselines"
TRIALS = "trials"
TUNE = "tune"
PROBE_EPOCHS = 10
"""The probe trains for half of the run's epochs, for this many at most: variances fall over time."""
MIN_HEADROOM_BYTES = 32 * 2**20
"""Below this the noise of a resident set would decide about batch sizes."""


@dataclass(frozen=True, kw_only=True)
class SearchSpec:
    """One search, as asked for."""

    base: RunSpec
    """Everything that the trials have in common."""
    space: str = "thresholds"
    """Name in search_spaces.thresholds.SPACES."""
    optional: tuple[str, ...] = ()
    """Further dimensions, among search_spaces.thresholds.OPTIONAL."""
    num_trials: int = 16
    """Configurations to sample."""
    objective: str = "score"
    """One of OBJECTIVES."""
    margin: float = 1.0
    """Percentage points below the AMP baseline that stay feasible."""
    seed: int = 0
    """Of the sampler."""

    def __post_init__(self) -> None:
        search_space(self.space, self.optional)
        require_integer("trials", self.num_trials, low=1)
        require(self.objective in OBJECTIVES, "objective", self.objective, f"must be one of {', '.join(OBJECTIVES)}")
        Objective(name=self.objective, margin=self.margin)


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


def begin_search(spec: SearchSpec, folder: Path) -> None:
    """Makes the search's folder and writes what was asked for.

    Raises:
        ValueError: the folder exists; nothing is touched.
    """
    require_new(folder)
    folder.mkdir(parents=True)
    write_atomically(folder / SEARCH, json.dumps(encode(spec), indent=2))


def prepare(
    spec: SearchSpec, folder: Path, *, num_gpus: float, on_glance: OnGlance, shared: SharedSplits | None = None
) -> Prepared:
    """Returns what the trials need to know, from the baselines FP32 and AMP and the probe; runs those not yet run.

    Raises:
        ValueError: a baseline failed; the message says how.
    """
    path = folder / PREPARED
    if path.exists():
        return read_value(Prepared, path)
    base = spec.base
    specs = {"fp32": replace(base, method="fp32"), "amp": replace(base, method="amp")}
    if spec.space == "thresholds":
        epochs = min(-(-base.recipe.epochs // 2), PROBE_EPOCHS)
        specs["probe"] = replace(base, method="probe", recipe=replace(base.recipe, epochs=epochs))
    done = {name: run for name in specs if (run := _finished(folder / BASELINES / name)) is not None}
    missing = {name: each for name, each in specs.items() if name not in done}
    outcomes = run_all(missing, folder / BASELINES, num_gpus=num_gpus, on_glance=on_glance, resume=True, shared=shared)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise ValueError(f"the baseline {name} failed: {outcome}") from outcome
        done[name] = read_run(folder / BASELINES / name)
    prepared = _prepared(spec, done)
    write_atomically(path, json.dumps(encode(prepared), indent=2))
    return prepared


def tune_trials(
    spec: SearchSpec,
    prepared: Prepared,
    folder: Path,
    *,
    num_gpus: float,
    resume: bool = False,
    shared: SharedSplits | None = None,
) -> None:
    """Runs the trials under Ray Tune, with samples from `shared`; with `resume`, those that have not finished.

    Trials are read back by `read_search`; nothing of Tune's own result matters afterwards.
    """
    folder = folder.absolute()
    context = TrialContext(
        spec=replace(spec.base, method="triaccel", memory_headroom_bytes=prepared.headroom_bytes),
        objective=prepared.objective,
        calibration=prepared.calibration,
        folder=str(folder / TRIALS),
        shared=shared,
    )
    trainable = tune.with_resources(tune.with_parameters(ThresholdTrial, context=context), {"cpu": 1, "gpu": num_gpus})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Tune and Optuna announce their own deprecations to whoever uses them
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        if resume and tune.Tuner.can_restore(str(folder / TUNE)):
            tuner = tune.Tuner.restore(str(folder / TUNE), trainable, resume_unfinished=True, restart_errored=True)
        else:
            tuner = _tuner(spec, trainable, folder)
        tuner.fit()


def read_search(folder: Path) -> SearchRecord:
    """Returns the search in `folder`, as far as it has come.

    Raises:
        LogError: there is none, or its files are damaged.
    """
    if not (folder / SEARCH).exists():
        raise LogError(f"folder {folder} holds no search ({SEARCH} is missing)")
    baselines = {name: run for name in ("fp32", "amp", "probe") if (run := _readable(folder / BASELINES / name))}
    trials = [run for path in sorted((folder / TRIALS).glob("*")) if (run := _readable(path))]
    return SearchRecord(
        folder=folder,
        spec=read_value(SearchSpec, folder / SEARCH),
        prepared=read_value(Prepared, folder / PREPARED) if (folder / PREPARED).exists() else None,
        baselines=baselines,
        trials=tuple(trials),
    )


def ranked(record: SearchRecord) -> list[tuple[float, RunRecord]]:
    """Returns the trials with figures, best first, with what the search maximised.

    Finished trials come before stopped ones: a figure after three epochs is none to choose by.
    """
    objective = record.prepared.objective if record.prepared else Objective(name=record.spec.objective)
    valued = [
        (objective.value(run.epochs[-1].epoch, figures), run) for run in record.trials if (figures := run.figures)
    ]
    return sorted(valued, key=lambda pair: (pair[1].status != "finished", -pair[0], pair[1].name))


def best_trial(record: SearchRecord) -> RunRecord | None:
    """Returns the best finished trial that is feasible; None when there is none."""
    return next((run for value, run in ranked(record) if value > 0 and run.status == "finished"), None)


def _prepared(spec: SearchSpec, runs: Mapping[str, RunRecord]) -> Prepared:
    amp = runs["amp"]
    reference = tuple(epoch.held_out_accuracy or 0.0 for epoch in amp.epochs)
    objective = Objective(name=spec.objective, margin=spec.margin, reference=reference)
    results = amp.end.results if amp.end else {}
    idle_bytes = int(results["idle_gb"] * 1e9)
    headroom = spec.base.memory_headroom_bytes
    if spec.base.memory_budget_bytes is None and headroom is None:
        # Room to grow, not the whole device: on a large one no threshold would ever be met.
        headroom = max(2 * (amp.epochs[-1].peak_bytes - idle_bytes), MIN_HEADROOM_BYTES)
    calibrated_on = None
    if "probe" in runs:
        variances = [
            layer.variance for tick in runs["probe"].ticks for layer in tick.observation.layers if layer.variance
        ]
        calibrated_on = calibration(variances)
    return Prepared(objective=objective, calibration=calibrated_on, headroom_bytes=headroom)


def _tuner(spec: SearchSpec, trainable: Any, folder: Path) -> tune.Tuner:
    space = search_space(spec.space, spec.optional)
    pareto = spec.objective == "pareto"
    metric: Any = ["accuracy", "seconds_per_epoch", "peak_gb"] if pareto else "objective"
    mode: Any = ["max", "min", "min"] if pareto else "max"
    scheduler: TrialScheduler = FIFOScheduler()
    if not pareto:
        epochs = spec.base.recipe.epochs
        grace = max(epochs // 4, 1)
        scheduler = ASHAScheduler(
            time_attr="epoch", metric="objective", mode="max", max_t=epochs, grace_period=grace, reduction_factor=3
        )
    return tune.Tuner(
        trainable,
        param_space={},
        tune_config=tune.TuneConfig(
            search_alg=OptunaSearch(
                space,
                metric=metric,
                mode=mode,
                sampler=optuna.samplers.TPESampler(
                    n_startup_trials=max(spec.num_trials // 4, 4), multivariate=True, seed=spec.seed
                ),
                points_to_evaluate=[{name: ANCHOR[name] for name in space}],
            ),
            scheduler=scheduler,
            num_samples=spec.num_trials,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=str(folder),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=3),  # machines that leave
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=1, checkpoint_frequency=max(spec.base.recipe.epochs // 4, 1), checkpoint_at_end=False
            ),
        ),
    )


def _finished(folder: Path) -> RunRecord | None:
    run = _readable(folder)
    return run if run is not None and run.status == "finished" else None


def _readable(folder: Path) -> RunRecord | None:
    """Returns the run in `folder`; None where it has not begun."""
    return read_run(folder) if (folder / EVENTS).exists() else None


def read_value(cls: type[T], path: Path) -> T:
    """Returns the value of class `cls` that the file at `path` holds.

    Raises:
        LogError: it cannot be read, or holds something else.
    """
    try:
        return decode(cls, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise LogError(f"{path} cannot be read ({error}): restore it, or begin a new search") from error
