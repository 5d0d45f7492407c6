"""Chooses a comparison's fixed setting and recipes on validation samples alone, before its final runs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from triaccel_ray.apply.precision import precisions_without_benefit, supported_precisions
from triaccel_ray.config import require
from triaccel_ray.decide.batch import ladder
from triaccel_ray.measure.score import quality
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import (
    CHOICES,
    REFERENCE,
    REFERENCE_TRIAL,
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
"""Sampled learning rates and weight decays lie between the recipe's values divided and multiplied by this factor."""


def choose(spec: ComparisonSpec, place: StoragePath, *, num_gpus: float, shared: SharedSplits | None = None) -> None:
    """Chooses the settings of the final runs and writes them to `CHOICES`; trials that have ended are not run again.

    The fixed setting is chosen first, with the recipe as it is. Then every method, `fixed` included, tries the same
    samples of learning rate and weight decay. Training and validation samples come from `shared`, if given.

    Raises:
        RunFailedError: a trial failed for another reason than its setting; the message says how.
        ValueError: no fixed setting could be trained.
        Exception: the error of a trial that could not be set up, or found no room on the disk.
    """
    root, fixed, tuned = place / TRIALS, None, {}
    if spec.num_fixed:
        settings = sampled_settings(spec.base, precisions_where_it_runs(spec.base, num_gpus=num_gpus), spec.num_fixed)
        runs = _run_missing(fixed_trials(spec, settings), root, num_gpus=num_gpus, shared=shared)
        fixed = best_setting(settings, runs)
    if spec.num_tuned:
        runs = _run_missing(tuning_trials(spec, fixed), root, num_gpus=num_gpus, shared=shared)
        tuned = {method: best_sample(spec, method, fixed, runs) for method in spec.all_methods}
    write_value(place.folder / CHOICES, Choices(fixed=fixed, tuned=tuned))


def fixed_trials(spec: ComparisonSpec, settings: Sequence[FixedSetting]) -> dict[str, RunSpec]:
    """Returns the trials of the fixed settings by name, and the AMP trial that they are judged against."""
    trials = {REFERENCE_TRIAL: trial_of(replace(spec.base, method=REFERENCE))}
    return trials | {setting.name: trial_of(setting.onto(spec.base)) for setting in settings}


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
    """Returns `spec` as a trial, which has no access to test samples."""
    return replace(spec, purpose=Purpose.SEARCH)


def recipe_samples(count: int, seed: int) -> list[RecipeSample]:
    """Returns `count` samples, uniform on a logarithmic scale; the first is the recipe as it is."""
    rng = random.Random(seed)
    factors = [(WIDEST ** rng.uniform(-1, 1), WIDEST ** rng.uniform(-1, 1)) for _ in range(count - 1)]
    return [RecipeSample(), *(RecipeSample(lr=lr, weight_decay=weight_decay) for lr, weight_decay in factors)]


def sampled_settings(spec: RunSpec, precisions: Sequence[Precision], count: int) -> list[FixedSetting]:
    """Returns `count` pairs of a precision and a batch size of the ladder, or all pairs if there are fewer.

    The task's own setting comes first; the others are drawn without replacement, by the seed of `spec`.
    """
    own = (spec.control.precision.initial, spec.control.batch.start)
    grid = list(itertools.product(precisions, ladder(spec.control.batch)))
    others = [pair for pair in grid if pair != own]
    random.Random(spec.seed).shuffle(others)
    chosen = [*([own] if own in grid else []), *others][:count]
    return [FixedSetting(precision=precision, batch_size=size) for precision, size in chosen]


def precisions_where_it_runs(spec: RunSpec, *, num_gpus: float) -> tuple[Precision, ...]:
    """Returns the precisions that the task's layers can compute in, as found on a machine that would train them."""
    task: Any = ray.remote(max_calls=1)(_precisions)  # its process ends at once, and its CUDA context with it
    found: list[str] = ray.get(task.options(num_cpus=1, num_gpus=num_gpus).remote(spec))
    return tuple(Precision(value) for value in found)


def _precisions(spec: RunSpec) -> list[str]:
    model = spec.load_task().model()
    slow = precisions_without_benefit(spec.torch_device.type, is_compiled=False)
    supported = set().union(*(supported_precisions(layer, without=slow) for layer in find_layers(model)))
    return [level.value for level in Precision if level in supported]


def best_setting(settings: Sequence[FixedSetting], runs: Mapping[str, RunRecord]) -> FixedSetting:
    """Returns the setting with the best score within the margin of AMP's metric, as a search would.

    If none is within the margin, it returns the one with the smallest shortfall.

    Raises:
        ValueError: AMP's trial, or every setting's, did not finish.
    """
    amp = runs[REFERENCE_TRIAL]
    rule = f"{amp.status}: the fixed settings cannot be judged without it"
    require(amp.status == "finished", "trial", amp.name, rule)
    objective = Objective.against(amp.epochs, amp.start.goal)
    values = {}
    for setting in settings:
        run = runs[setting.name]
        if run.status == "finished" and run.figures is not None:
            values[setting] = objective.value(run.epochs[-1].epoch, run.figures)
    tried = ", ".join(setting.name for setting in settings)
    rule = "none could be trained to its end; try more, or allow more memory"
    require(len(values) > 0, "fixed settings", tried, rule)
    return max(values, key=lambda setting: values[setting])


def best_sample(spec: ComparisonSpec, method: str, fixed: FixedSetting | None, runs: Mapping[str, RunRecord]) -> Tuned:
    """Returns the sample with the best validation metric; the lower validation loss breaks ties.

    If no trial finished, it returns the sample that leaves the recipe as it is.
    """
    samples = recipe_samples(spec.num_tuned, spec.base.seed)
    ranks = {}
    for index, sample in enumerate(samples):
        name = _trial_name(method, index, fixed)
        run = runs[name]
        if run.status == "finished" and run.end is not None:
            goal, results = run.start.goal, run.end.results
            ranks[name, sample] = (-quality(results[goal.name], goal), results["loss"])
    trial, sample = min(ranks, key=lambda pair: ranks[pair], default=("", samples[0]))
    return Tuned(trial=trial, sample=sample)


def _trial_name(method: str, index: int, fixed: FixedSetting | None) -> str:
    """Returns the name of a method's trial of one sample; the chosen fixed setting reuses the trial that it won by."""
    if index:
        return f"{method}-recipe{index}"
    return fixed.name if method == FIXED and fixed is not None else f"{method}-recipe"


def _run_missing(
    specs: Mapping[str, RunSpec], place: StoragePath, *, num_gpus: float, shared: SharedSplits | None
) -> dict[str, RunRecord]:
    """Runs the trials that have not ended, and returns the records of all."""
    root = place.folder
    before = {name: read_if_begun(root / name) for name in specs}
    done = {name: run for name, run in before.items() if run is not None and run.has_outcome}
    missing = {name: spec for name, spec in specs.items() if name not in done}
    for error in run_all(missing, place, num_gpus=num_gpus, shared=shared).values():
        if cause_of(error) not in RESULTS:
            raise error
    return {name: done.get(name) or read_run(root / name) for name in specs}
