"""What a comparison chooses before its final runs, on validation samples alone: fixed setting and recipes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from triaccel_ray.apply.precision import supported_precisions, useless_precisions
from triaccel_ray.config import require
from triaccel_ray.decide.batch import ladder
from triaccel_ray.measure.score import quality
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import (
    CHOICES,
    REFERENCE,
    TRIALS,
    Choices,
    FixedSetting,
    RecipeSample,
    Tuned,
)
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.failures import RESULTS, cause_of
from triaccel_ray.service.runs.methods import FIXED
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import RunRecord, read_if_begun, read_run
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import write_value
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose

WIDEST = 4.0
"""Samples of the recipe lie within this factor of its values, both ways."""


def choose(spec: ComparisonSpec, place: StoragePath, *, num_gpus: float, shared: SharedSplits | None = None) -> None:
    """Chooses what the final runs are to use, and writes it down; trials that have ended are not run again.

    The fixed setting is chosen first, with the recipe as it is; then every method, the fixed one too, gets the same
    samples of learning rate and weight decay. Training and validation samples come from `shared`, where given.

    Raises:
        RunFailedError: a trial failed for another reason than its setting; the message says how.
        ValueError: no fixed setting could be trained.
        Exception: what a trial that could not be set up, or found no room on the disk, has raised.
    """
    root, fixed, tuned = place / TRIALS, None, {}
    if spec.num_fixed:
        settings = sampled_settings(spec.base, precisions_where_it_runs(spec.base, num_gpus=num_gpus), spec.num_fixed)
        runs = _ended(fixed_trials(spec, settings), root, num_gpus=num_gpus, shared=shared)
        fixed = best_setting(settings, runs)
    if spec.num_tuned:
        runs = _ended(tuning_trials(spec, fixed), root, num_gpus=num_gpus, shared=shared)
        tuned = {method: best_sample(spec, method, fixed, runs) for method in spec.all_methods}
    write_value(place.folder / CHOICES, Choices(fixed=fixed, tuned=tuned))


def fixed_trials(spec: ComparisonSpec, settings: Sequence[FixedSetting]) -> dict[str, RunSpec]:
    """Returns the trials of fixed settings by name, and that of AMP, by which they are judged."""
    reference = {_trial_name(REFERENCE, 0, None): trial_of(replace(spec.base, method=REFERENCE))}
    return {**reference, **{setting.name: trial_of(setting.onto(spec.base)) for setting in settings}}


def tuning_trials(spec: ComparisonSpec, fixed: FixedSetting | None) -> dict[str, RunSpec]:
    """Returns the trials of every method with every sample of learning rate and weight decay, by name."""
    trials = {}
    for method in spec.all_methods:
        base = Choices(fixed=fixed).onto(spec.base, method)
        for index, sample in enumerate(recipe_samples(spec.num_tuned, spec.base.seed)):
            name = _trial_name(method, index, fixed)
            trials[name] = trial_of(sample.onto(base))
    return trials


def trial_of(spec: RunSpec) -> RunSpec:
    """Returns `spec` as a trial: whatever it was for, test samples are not at hand."""
    return replace(spec, purpose=Purpose.SEARCH)


def recipe_samples(count: int, seed: int) -> list[RecipeSample]:
    """Returns `count` samples, uniform on a logarithmic scale; the first is the recipe as it is."""
    chance = random.Random(seed)
    factors = [(WIDEST ** chance.uniform(-1, 1), WIDEST ** chance.uniform(-1, 1)) for _ in range(count - 1)]
    return [RecipeSample(), *(RecipeSample(lr=lr, weight_decay=weight_decay) for lr, weight_decay in factors)]


def sampled_settings(spec: RunSpec, precisions: Sequence[Precision], count: int) -> list[FixedSetting]:
    """Returns `count` settings of `precisions` and the batch sizes of the ladder, or all where there are fewer.

    The task's own comes first; the others are drawn without repetition, by the seed of `spec`.
    """
    own = (spec.control.precision.initial, spec.control.batch.start)
    grid = list(itertools.product(precisions, ladder(spec.control.batch)))
    others = [pair for pair in grid if pair != own]
    random.Random(spec.seed).shuffle(others)
    chosen = [*([own] if own in grid else []), *others][:count]
    return [FixedSetting(precision=precision, batch_size=size) for precision, size in chosen]


def precisions_where_it_runs(spec: RunSpec, *, num_gpus: float) -> tuple[Precision, ...]:
    """Returns the precisions that the task's layers can compute in, asked of a machine that would train them."""
    task: Any = ray.remote(max_calls=1)(_precisions)  # its process, and with it a CUDA context, ends at once
    found: list[str] = ray.get(task.options(num_cpus=1, num_gpus=num_gpus).remote(spec))
    return tuple(Precision(value) for value in found)


def _precisions(spec: RunSpec) -> list[str]:
    model = spec.load_task().model()
    useless = useless_precisions(spec.torch_device.type, is_compiled=False)
    offered = [supported_precisions(layer, without=useless) for layer in find_layers(model)]
    return [level.value for level in Precision if any(level in each for each in offered)]


def best_setting(settings: Sequence[FixedSetting], runs: Mapping[str, RunRecord]) -> FixedSetting:
    """Returns the setting of the best score among those within the margin of AMP's metric, as a search would.

    Where none is within the margin, the one that lacks least.

    Raises:
        ValueError: AMP's trial, or every setting's, did not run to its end.
    """
    amp = runs[_trial_name(REFERENCE, 0, None)]
    require(
        amp.status == "finished", "trial", amp.name, f"{amp.status}: the fixed settings cannot be judged without it"
    )
    objective = Objective.against(amp.epochs, amp.start.goal)
    values = {
        setting: objective.value(run.epochs[-1].epoch, run.figures)
        for setting in settings
        if (run := runs[setting.name]).status == "finished" and run.figures is not None
    }
    tried = ", ".join(setting.name for setting in settings)
    require(
        len(values) > 0, "fixed settings", tried, "none could be trained to its end; try more, or allow more memory"
    )
    return max(values, key=lambda setting: values[setting])


def best_sample(spec: ComparisonSpec, method: str, fixed: FixedSetting | None, runs: Mapping[str, RunRecord]) -> Tuned:
    """Returns the sample of the best validation metric, among equals of the lowest validation loss.

    Where no trial ran to its end, the recipe as it is.
    """
    samples = recipe_samples(spec.num_tuned, spec.base.seed)
    names = [_trial_name(method, index, fixed) for index in range(len(samples))]
    ranks = {}
    for name, sample in zip(names, samples, strict=True):
        run = runs[name]
        if run.status == "finished" and run.end is not None:
            goal, results = run.start.goal, run.end.results
            ranks[name, sample] = (-quality(results[goal.name], goal), results["loss"])
    trial, sample = min(ranks, key=lambda pair: ranks[pair], default=("", samples[0]))
    return Tuned(trial=trial, sample=sample)


def _trial_name(method: str, index: int, fixed: FixedSetting | None) -> str:
    """Returns the name of a method's trial of one sample; what has been tried as a fixed setting is not tried again."""
    if index:
        return f"{method}-recipe{index}"
    return fixed.name if method == FIXED and fixed is not None else f"{method}-recipe"


def _ended(
    specs: Mapping[str, RunSpec], place: StoragePath, *, num_gpus: float, shared: SharedSplits | None
) -> dict[str, RunRecord]:
    """Returns the records of all these trials, after running those that have not ended."""
    root = place.folder
    before = {name: read_if_begun(root / name) for name in specs}
    done = {name: run for name, run in before.items() if run is not None and run.has_outcome}
    missing = {name: spec for name, spec in specs.items() if name not in done}
    for error in run_all(missing, place, num_gpus=num_gpus, shared=shared).values():
        if cause_of(error) not in RESULTS:
            raise error
    return {name: done.get(name) or read_run(root / name) for name in specs}
