"""A search for thresholds: baselines and a probe, then Ray Tune trials, then the best trial against the baselines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

from triaccel_ray.records.events import Claim, LogError, read_events
from triaccel_ray.search_spaces.thresholds import Calibration, calibration, thresholds
from triaccel_ray.search_spaces.tuned import Result, TunedThresholds
from triaccel_ray.service.cli.options import command_for
from triaccel_ray.service.runs.launch import fit, num_groups, run_all
from triaccel_ray.service.runs.objective import Objective, grace_epochs
from triaccel_ray.service.runs.record import RunRecord, read_if_begun, read_run
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trial import TrialContext, reopen
from triaccel_ray.service.search.searcher import JournaledSearcher
from triaccel_ray.service.search.spec import SearchSpec, dimensions
from triaccel_ray.service.storage.layout import (
    BASELINES,
    EVENTS,
    PREPARED,
    REPEATS,
    SEARCH,
    TRIALS,
    read_value,
    write_value,
)
from triaccel_ray.service.storage.mirror import pull_run
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import editing_log

_WAY_OUT = "restore it, or begin a new search"
_REPEAT_SUFFIX = "-again-"
PROBE_EPOCHS = 10
"""The probe trains for half of the run's epochs, but at most for this many: variances fall over time."""
REPEATED_BELOW_S = 60.0
"""Runs that train for less are repeated before they are compared: other load on the machine varies as much."""
NUM_REPEATS = 3
MIN_HEADROOM_BYTES = 64 * 2**20
"""With less, noise in the resident set would determine batch sizes."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Results of the baselines and the probe that the trials depend on."""

    objective: Objective
    calibration: Calibration | None
    headroom_bytes: int | None
    """Memory that trials may take above that of the idle process; None if the user gave a budget."""


@dataclass(frozen=True, kw_only=True)
class SearchRecord:
    """A search read back from its folder."""

    folder: Path
    spec: SearchSpec
    prepared: Prepared | None
    baselines: Mapping[str, RunRecord] = field(default_factory=dict)
    trials: tuple[RunRecord, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Name of a trial whose log or spec cannot be read -> the error message."""
    repeats: Mapping[str, Sequence[RunRecord]] = field(default_factory=dict)
    """Name of the best trial or of a baseline -> its repeats."""

    @property
    def objective(self) -> Objective:
        """The objective of the trials; until the baselines have finished, without the constraint on the metric."""
        if self.prepared is not None:
            return self.prepared.objective
        return Objective(name=self.spec.objective, goal=self.spec.base.goal)


def prepare(spec: SearchSpec, place: StoragePath, *, num_gpus: float, shared: SharedSplits | None) -> Prepared:
    """Runs the FP32 and AMP baselines and the probe unless they have finished; returns what the trials need of them.

    Raises:
        RunFailedError: a baseline failed; the message says how.
        Exception: the error of a baseline that could not be set up, or found no room on the disk.
    """
    path, baselines, base = place.folder / PREPARED, place / BASELINES, spec.base
    if path.exists():
        return read_value(Prepared, path, _WAY_OUT)
    specs = {name: replace(base, method=name, gpus=RunSpec.gpus) for name in ("fp32", "amp")}
    if spec.space == "thresholds":
        epochs = min(math.ceil(base.recipe.epochs / 2), PROBE_EPOCHS)
        specs["probe"] = replace(base, method="probe", recipe=replace(base.recipe, epochs=epochs))
    missing = {name: run for name, run in specs.items() if not is_finished(read_if_begun(baselines.folder / name))}
    # In one reused process, like the trials: a new process holds less memory.
    for error in run_all(missing, baselines, num_gpus=num_gpus, shared=shared, reuse_actors=True).values():
        raise error
    runs = {name: read_run(baselines.folder / name) for name in specs}
    headroom = base.memory_headroom_bytes
    if base.memory_budget_bytes is None and headroom is None:
        headroom = _headroom_bytes(base, runs.get("probe", runs["amp"]))
    variances = defaultdict[str, list[float]](list)
    for tick in runs["probe"].ticks if "probe" in runs else ():
        for layer in tick.observation.layers:
            if layer.variance is not None:
                variances[layer.name].append(layer.variance)
    prepared = Prepared(
        objective=Objective.against(runs["amp"].epochs, base.goal, name=spec.objective, margin=spec.margin),
        calibration=calibration(variances) if "probe" in runs else None,
        headroom_bytes=headroom,
    )
    write_value(path, prepared)
    return prepared


def tune_trials(
    spec: SearchSpec,
    prepared: Prepared,
    place: StoragePath,
    *,
    num_gpus: float,
    shared: SharedSplits | None = None,
    claim: Claim | None = None,
) -> None:
    """Runs the trials; of a search that is resumed, those that have not ended or that failed through a bug.

    With a `claim` on the search's own log, nothing is begun or journaled once another process has taken over the
    search. A resumed search restores scheduler and sampler from the trials' logs. Samples come from `shared`, if given.

    Raises:
        StoreError: the trials' logs could not be fetched from the store.
        DiskFullError: the disk was full for one trial; the others were stopped.
        TakenOverError: another process has taken over the search, or one of its trials; likewise.
        KeyboardInterrupt: the user interrupted the trials; they have ended their logs.
    """
    trials = place / TRIALS
    base = replace(spec.base, method="triaccel", memory_headroom_bytes=prepared.headroom_bytes)

    def spec_of(config: Mapping[str, Any]) -> RunSpec:
        return replace(base, control=thresholds(config, base.control, prepared.calibration))

    context = TrialContext(place=trials, spec_of=spec_of, objective=prepared.objective, shared=shared)
    for trial in trials.folder.glob("*"):
        with editing_log(trials / trial.name) as log:
            reopen(log)
    epochs = base.recipe.epochs
    pruner = ASHAScheduler(
        "epoch", "objective", "max", max_t=epochs, grace_period=grace_epochs(epochs), reduction_factor=3
    )
    searcher = JournaledSearcher(spec, place, claim)
    config = tune.TuneConfig(
        search_alg=searcher,
        scheduler=FIFOScheduler() if spec.objective == "pareto" else pruner,
        num_samples=spec.num_trials,
        reuse_actors=True,
        max_concurrent_trials=num_groups(base, num_gpus),
    )
    fit(context, config, num_gpus=num_gpus)
    if searcher.failure is not None:
        raise searcher.failure
    pull_run(trials)


def read_search(folder: Path) -> SearchRecord:
    """Returns the current state of the search in `folder`.

    Raises:
        LogError: the folder holds no search, or files other than those of single trials are damaged.
    """
    if not (folder / SEARCH).exists():
        raise LogError(f"folder {folder} holds no search ({SEARCH} is missing)")
    baselines = {name: run for name in ("fp32", "amp", "probe") if (run := read_if_begun(folder / BASELINES / name))}
    trials, damaged = list[RunRecord](), dict[str, str]()
    repeats = defaultdict[str, list[RunRecord]](list)
    for path in [*sorted((folder / REPEATS).glob("*")), *sorted((folder / TRIALS).glob("*"))]:
        try:
            run = read_if_begun(path)
            if run is not None and path.parent.name == REPEATS:
                repeats[path.name.rpartition(_REPEAT_SUFFIX)[0]].append(run)
            elif run is not None:
                trials.append(run)
        except LogError as error:
            damaged[path.name] = str(error)
    return SearchRecord(
        folder=folder,
        spec=read_value(SearchSpec, folder / SEARCH, _WAY_OUT),
        prepared=read_value(Prepared, folder / PREPARED, _WAY_OUT) if (folder / PREPARED).exists() else None,
        baselines=baselines,
        trials=tuple(trials),
        damaged=damaged,
        repeats=repeats,
    )


def ranked(record: SearchRecord) -> list[RunRecord]:
    """Returns the trials, best first: finished ones come before stopped ones, whose figures may be of three epochs."""
    return sorted(record.trials, key=lambda run: (run.status != "finished", -value_of(record, run), run.name))


def best_trial(record: SearchRecord) -> RunRecord | None:
    """Returns the best finished trial that is feasible; None when there is none."""
    return next((run for run in ranked(record) if run.status == "finished" and value_of(record, run) > 0), None)


def candidates(record: SearchRecord) -> dict[str, RunRecord]:
    """Returns the best trial, if any, and then the baselines that finished, by name.

    A run that was repeated is replaced by its best repeat: other load on the machine lengthens steps, and never
    shortens them. The trial's own run was chosen because its figures are good, so these favor it.
    """
    best = best_trial(record)
    runs = {} if best is None else {best.name: best}
    runs |= {name: record.baselines[name] for name in ("amp", "fp32") if is_finished(record.baselines.get(name))}
    repeats = best_repeats(record)
    return {name: repeats.get(name, run) for name, run in runs.items()}


def best_repeats(record: SearchRecord) -> dict[str, RunRecord]:
    """Returns the best finished repeat of each repeated run, by the run's name."""
    finished = {name: [run for run in runs if is_finished(run)] for name, runs in record.repeats.items()}
    return {name: max(runs, key=partial(value_of, record)) for name, runs in finished.items() if runs}


def value_of(record: SearchRecord, run: RunRecord) -> float:
    """Returns the objective value of a run; minus infinity without figures."""
    performance = run.performance
    return -math.inf if performance is None else record.objective.value(run.epochs[-1].epoch, performance)


def to_be_repeated(record: SearchRecord) -> dict[str, RunSpec]:
    """Returns the repeats that are still missing, by name: the best trial and the baselines, in turn.

    The baselines are timed before all trials, so other load on the machine can decide between short runs.
    """
    runs = candidates(record) if best_trial(record) else {}
    if any(sum(epoch.seconds for epoch in run.epochs) > REPEATED_BELOW_S for run in runs.values()):
        return {}
    done = {run.name for repeats in record.repeats.values() for run in repeats if is_finished(run)}
    todo: dict[str, RunSpec] = {}
    for number in range(1, NUM_REPEATS + 1):
        todo |= {f"{name}{_REPEAT_SUFFIX}{number}": run.spec for name, run in runs.items()}
    return {name: spec for name, spec in todo.items() if name not in done}


def tuned_thresholds_of(record: SearchRecord) -> TunedThresholds | None:
    """Returns the best thresholds of a search; None while no finished trial is within the margin."""
    best, compared = best_trial(record), candidates(record)
    if best is None or "amp" not in compared or record.prepared is None:
        return None
    info, searched = (
        best.start.info,
        {each.path: each.value(best.spec.control) for each in dimensions(record.spec.optional)},
    )
    began = next(read_events(best.folder / EVENTS)).time_ms / 1000
    return TunedThresholds(
        task=best.spec.task,
        metric=best.spec.goal.name,
        command=command_for("search --from", record.folder),
        date=datetime.fromtimestamp(began, UTC).date().isoformat(),
        hardware=info.get("hardware", "unknown"),
        versions={name: info[name] for name in ("triaccel-ray", "torch", "triton", "python") if name in info},
        num_trials=len(record.trials),
        num_finished=sum(run.status == "finished" for run in record.trials),
        headroom_bytes=record.prepared.headroom_bytes,
        precision=_part("precision", searched),
        batch=_part("batch", searched),
        curvature=_part("curvature", searched),
        every_steps=searched.get("every_steps"),
        amp=_result(compared["amp"]),
        best=_result(compared[best.name]),
        trials_per_gpu=best.spec.trials_per_gpu,
    )


def _part(part: str, searched: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of one part of the configuration, by the name of its field."""
    return {path.removeprefix(f"{part}."): value for path, value in searched.items() if path.startswith(f"{part}.")}


def _result(run: RunRecord) -> Result:
    performance = run.performance
    assert performance is not None  # since it is a finished run on validation samples
    return Result(
        metric=performance.metric,
        seconds_per_epoch=performance.seconds,
        peak_gb=performance.peak_gb,
        score=performance.score,
    )


def _headroom_bytes(base: RunSpec, run: RunRecord) -> int:
    """Returns the memory that the ladder's largest batch needs, scaled up from the starting batch size in `run`.

    With the whole of a large device, usage would never reach a rho threshold. Within this, rho chooses among all rungs.
    """
    idle_bytes = int(run.end.results["idle_gb"] * 1e9) if run.end else 0
    taken, batch = run.epochs[-1].peak_bytes - idle_bytes, base.control.batch
    return max(taken * batch.maximum // batch.start, MIN_HEADROOM_BYTES)


def is_finished(run: RunRecord | None) -> TypeGuard[RunRecord]:
    """Returns whether there is a run and it has finished."""
    return run is not None and run.status == "finished"
