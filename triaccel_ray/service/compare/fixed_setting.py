"""Chooses a comparison's fixed setting on validation samples alone, before its final runs."""

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
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import REFERENCE, FixedSetting
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.failures import CONFIGURATION_CAUSES, cause_of
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import RunRecord, read_if_begun, read_run
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import FIXED_SETTING, TRIALS, write_value
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose


def choose_fixed_setting(
    spec: ComparisonSpec, place: StoragePath, *, num_gpus: float, shared: SharedSplits | None
) -> None:
    """Chooses the fixed setting and writes it to `FIXED_SETTING`; trials that have ended are not run again.

    Training and validation samples come from `shared`, unless it is None.

    Raises:
        RunFailedError: a trial failed for another reason than its setting; the message says how.
        ValueError: no fixed setting could be trained.
        Exception: the error of a trial that could not be set up, or found no room on the disk.
    """
    precisions = precisions_where_it_runs(spec.base, num_gpus=num_gpus)
    settings, root = sampled_settings(spec.base, precisions, spec.num_fixed), place.folder / TRIALS
    specs = fixed_trials(spec.base, settings)
    begun = {name: run for name in specs if (run := read_if_begun(root / name)) is not None}
    missing = {name: trial for name, trial in specs.items() if name not in begun or not begun[name].has_outcome}
    for error in run_all(missing, place / TRIALS, num_gpus=num_gpus, shared=shared).values():
        if cause_of(error) not in CONFIGURATION_CAUSES:
            raise error
    runs = {name: read_run(root / name) for name in specs}
    write_value(place.folder / FIXED_SETTING, best_setting(settings, runs))


def fixed_trials(base: RunSpec, settings: Sequence[FixedSetting]) -> dict[str, RunSpec]:
    """Returns the trials of the fixed settings by name, and the AMP trial, on one GPU, that they are judged against."""
    trial = replace(base, purpose=Purpose.SEARCH)  # without access to test samples
    amp = replace(trial, method=REFERENCE, gpus=RunSpec.gpus)
    return {REFERENCE: amp} | {setting.name: setting.onto(trial) for setting in settings}


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
    found: tuple[Precision, ...] = ray.get(task.options(num_cpus=1, num_gpus=num_gpus).remote(spec))
    return found


def _precisions(spec: RunSpec) -> tuple[Precision, ...]:
    model = spec.load_task().model()
    slow = precisions_without_benefit(spec.torch_device.type, is_compiled=False)
    supported = set().union(*(supported_precisions(layer, without=slow) for layer in find_layers(model)))
    return tuple(level for level in Precision if level in supported)


def best_setting(settings: Sequence[FixedSetting], runs: Mapping[str, RunRecord]) -> FixedSetting:
    """Returns the setting with the best score within the margin of AMP's metric, as a search would.

    If none is within the margin, it returns the one with the smallest shortfall.

    Raises:
        ValueError: AMP's trial, or every setting's, did not finish.
    """
    amp = runs[REFERENCE]
    rule = f"{amp.status}: the fixed settings cannot be judged without it"
    require(amp.status == "finished", "trial", amp.name, rule)
    objective = Objective.against(amp.epochs, amp.start.goal)
    values = {}
    for setting in settings:
        run = runs[setting.name]
        if run.status == "finished" and run.performance is not None:
            values[setting] = objective.value(run.epochs[-1].epoch, run.performance)
    tried = ", ".join(setting.name for setting in settings)
    rule = "none could be trained to its end; try more, or allow more memory"
    require(len(values) > 0, "fixed settings", tried, rule)
    return max(values, key=lambda setting: values[setting])
