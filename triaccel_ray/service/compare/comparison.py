"""Compares methods over seeds, as in the paper's tables, by final runs that each read the test set once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from triaccel_ray.decide.batch import batch_lr_scale
from triaccel_ray.measure.score import efficiency_score
from triaccel_ray.records.events import LogError
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.runs.record import RunRecord, read_if_begun
from triaccel_ray.service.runs.spec import FIXED, RunSpec
from triaccel_ray.service.storage.layout import COMPARISON, FIXED_SETTING, TRIALS, read_value
from triaccel_ray.trainables.task import Purpose

_WAY_OUT = "begin a new comparison"
REFERENCE = "amp"
"""The method that the others are tested against."""
TRAINING_SECONDS = "training_seconds"
"""Figure of a run: seconds of all its epochs, compilation, captures and changes of plan included."""
READINGS: Mapping[str, tuple[str, str]] = {
    "s/epoch, process GB": ("seconds_per_epoch", "peak_gb"),
    "s/epoch, allocator GB": ("seconds_per_epoch", "allocated_peak_gb"),
    "whole run s, process GB": (TRAINING_SECONDS, "peak_gb"),
    "whole run s, allocator GB": (TRAINING_SECONDS, "allocated_peak_gb"),
}
"""Readings of the score's time and memory -> the figures. The paper takes the second, a user pays for the third."""


@dataclass(frozen=True, kw_only=True)
class FixedSetting:
    """A precision for all layers and a batch size, from the first step to the last."""

    precision: Precision
    batch_size: int

    @property
    def name(self) -> str:
        """Name of the trial that evaluates it."""
        return f"{FIXED}-{self.precision.value}-{self.batch_size}"

    def onto(self, spec: RunSpec) -> RunSpec:
        """Returns `spec` as a run of this setting.

        The learning rate follows the batch size by the rule of the elastic batch size. AdaScale, which needs
        measurements, becomes the square root rule.
        """
        control, batch = spec.control, spec.control.batch
        scaled = replace(batch, lr_rule="sqrt") if batch.lr_rule == "adascale" else batch
        lr = spec.recipe.lr * batch_lr_scale(scaled, self.batch_size, None)
        fixed = replace(
            control,
            precision=replace(control.precision, initial=self.precision),
            batch=replace(batch, start=self.batch_size),
        )
        return replace(spec, method=FIXED, control=fixed, recipe=replace(spec.recipe, lr=lr))


@dataclass(frozen=True, kw_only=True)
class MethodResults:
    """The finished final runs of one method."""

    method: str
    by_seed: Mapping[int, Mapping[str, float]]
    """Seed -> figure -> value."""

    def values(self, figure: str) -> dict[int, float]:
        """Returns the figure by seed, of the runs that have it."""
        return {seed: results[figure] for seed, results in self.by_seed.items() if figure in results}

    def scored_by(self, reading: str, goal: Goal) -> MethodResults:
        """Returns the same runs with their score by one of READINGS; without those that lack a figure for it."""
        seconds, memory = READINGS[reading]
        scored = {
            seed: {"score": efficiency_score(results[goal.name], results[seconds], results[memory], goal)}
            for seed, results in self.by_seed.items()
            if goal.name in results and results.get(seconds) and results.get(memory)
        }
        return replace(self, by_seed=scored)

    def mean(self, figure: str) -> float:
        """Returns the mean over seeds; nan without any, or if a run lacks the figure."""
        values = self.values(figure).values()
        return statistics.fmean(values) if values and len(values) == len(self.by_seed) else math.nan

    def deviation(self, figure: str) -> float:
        """Returns the standard deviation over seeds; nan for fewer than two, or if a run lacks the figure."""
        values = self.values(figure).values()
        return statistics.stdev(values) if len(values) > 1 and len(values) == len(self.by_seed) else math.nan


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord:
    """The current state of a comparison, read back from its folder."""

    folder: Path
    spec: ComparisonSpec
    fixed: FixedSetting | None = None
    """The fixed setting that the trials chose; None until then, and if none was asked for."""
    trials: Mapping[str, RunRecord] = field(default_factory=dict)
    """Runs on the validation samples, by name."""
    runs: Mapping[str, RunRecord] = field(default_factory=dict)
    """Final runs that have begun, by name."""

    def unfinished(self) -> dict[str, RunSpec]:
        """Returns the final runs still to be done; a run that failed because of its configuration counts as done."""
        return {
            name: spec
            for name, spec in final_runs(self.spec, self.fixed).items()
            if name not in self.runs or not self.runs[name].has_outcome
        }

    @property
    def failed(self) -> dict[str, RunRecord]:
        """The final runs that failed, by name."""
        return {name: run for name, run in self.runs.items() if run.end is not None and run.end.status == "failed"}

    def results(self, method: str) -> MethodResults:
        """Returns the results of one method's finished runs."""
        by_seed: dict[int, Mapping[str, float]] = {}
        for run in self.runs.values():
            if run.spec.method == method and run.end is not None and run.status == "finished":
                seconds = sum(epoch.seconds for epoch in run.epochs)
                by_seed[run.spec.seed] = {**run.end.results, TRAINING_SECONDS: seconds, **run.to_target}
        return MethodResults(method=method, by_seed=by_seed)


def final_runs(spec: ComparisonSpec, fixed: FixedSetting | None) -> dict[str, RunSpec]:
    """Returns every final run by its name, `METHOD-seedN`; the seeds are the same for all methods."""
    bases = {method: replace(spec.base, method=method) for method in spec.all_methods}
    if fixed is not None:
        bases[FIXED] = fixed.onto(spec.base)
    return {
        f"{method}-seed{seed}": replace(base, seed=seed, purpose=Purpose.FINAL)
        for seed in range(spec.num_seeds)
        for method, base in bases.items()
    }


def read_comparison(folder: Path) -> ComparisonRecord:
    """Returns the comparison in `folder`.

    Raises:
        LogError: the folder holds no comparison, or its files are damaged.
    """
    if not (folder / COMPARISON).exists():
        raise LogError(f"folder {folder} holds no comparison ({COMPARISON} is missing)")
    spec = read_value(ComparisonSpec, folder / COMPARISON, _WAY_OUT)
    is_chosen = (folder / FIXED_SETTING).exists()
    trials = sorted((folder / TRIALS).glob("*"))
    return ComparisonRecord(
        folder=folder,
        spec=spec,
        fixed=read_value(FixedSetting, folder / FIXED_SETTING, _WAY_OUT) if is_chosen else None,
        trials={path.name: run for path in trials if (run := read_if_begun(path)) is not None},
        runs={name: run for name in final_runs(spec, None) if (run := read_if_begun(folder / name)) is not None},
    )


def summary_metrics(record: ComparisonRecord) -> dict[str, float]:
    """Returns the figures that summarize a comparison in MLflow: `METHOD/accuracy_mean`, ...

    Each method has seven, so that all methods together stay below 60 keys. Everything else is in the tables.
    """
    metrics = {}
    for method in record.spec.all_methods:
        results = record.results(method)
        for figure in (record.spec.base.goal.name, "seconds_per_epoch", "peak_gb", "score"):
            metrics[f"{method}/{figure}_mean"] = results.mean(figure)
            if figure != "peak_gb":
                metrics[f"{method}/{figure}_std"] = results.deviation(figure)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
