"""Builds the spec of a run, search or comparison from a command's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from triaccel_ray.config import ControlConfig, require
from triaccel_ray.service.cli.arguments import Compare, Replay, Run, Search, TrainingCommand, TuneBatch
from triaccel_ray.service.cli.options import RUN_SETTINGS
from triaccel_ray.service.cli.settings import changed, given
from triaccel_ray.service.compare.comparison import read_comparison
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.locations import find, find_run
from triaccel_ray.service.runs.record import read_spec
from triaccel_ray.service.runs.spec import TUNE_BATCH, RunSpec, run_spec
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.search.spec import SearchSpec, dimensions
from triaccel_ray.trainables.task import Purpose

Given = Mapping[tuple[str, ...], Any]
"""Field path -> value, as returned by `settings.given`."""


def spec_of(command: TrainingCommand) -> RunSpec | SearchSpec | ComparisonSpec:
    """Returns the spec of the run, search or comparison that the command asks for.

    Raises:
        ValueError: an option breaks its rule, or nothing has the name given as --from; the message names it.
    """
    match command:
        case Search():
            return _search_of(command)
        case Compare():
            return _comparison_of(command)
        case TuneBatch():
            return _tuning_of(command)
        case Run():
            return _run_of(command)
    raise TypeError(f"{type(command).__name__} trains nothing")


_PRECISION_SETTINGS_OF_EVERY_METHOD = ("initial", "allow_slow_precisions", "fp8")
"""Settings of `precision` that a method on this engine uses even if it adapts no precision."""


def _run_of(command: Run) -> RunSpec:
    options = given(command.main, command.training, command.thresholds)
    base = _base(command, options)
    if base.method == TUNE_BATCH:  # to train at a batch size that was found
        base = replace(base, method=RunSpec.method)
    is_final = command.final or base.purpose is Purpose.FINAL
    options.setdefault(("keep",), "last" if is_final else base.keep or "last")
    spec = with_options(base, {**options, ("purpose",): Purpose.FINAL if is_final else base.purpose})
    if command.config is None:  # a file's are those of its run, whatever its method
        _require_used(spec, options)
    return spec


def _require_used(spec: RunSpec, options: Given) -> None:
    """Checks that the method uses the given options of the precision and curvature rules; turning one off is allowed.

    Raises:
        ValueError: it does not.
    """
    if spec.method in ("triaccel", "paper"):
        return
    control = spec.method_control
    off = {("control", part) for part in ("precision", "curvature") if not getattr(control, part).enabled}
    used = ("enabled",) if spec.is_baseline else ("enabled", *_PRECISION_SETTINGS_OF_EVERY_METHOD)
    for setting in RUN_SETTINGS.values():
        if setting.path in options and setting.path[:2] in off:
            rule = f"--method {spec.method} does not use it; leave it out, or give --method triaccel"
            require(setting.path[-1] in used, f"--{setting.option}", setting.shown(options[setting.path]), rule)


def _tuning_of(command: TuneBatch) -> RunSpec:
    options = given(command.main, command.training, command.thresholds)
    base = _base(command, options)
    rule = f"was trained by {base.method}, without the engine that is timed; name a run of another method"
    require(not base.is_baseline, "--from", command.from_, rule)
    batch, start = base.control.batch, options.get(("control", "batch", "start"))
    if start is not None:  # moves the smallest size to a rung below it, not along with it as in a run
        rungs_below = max(start - batch.minimum, 0) // batch.granularity
        options.setdefault(("control", "batch", "minimum"), start - rungs_below * batch.granularity)
    return with_options(replace(base, method=TUNE_BATCH, purpose=Purpose.SEARCH, keep=None), options)


def _search_of(command: Search) -> SearchSpec:
    own, common = _split(command)
    if command.from_ is None:
        spec = SearchSpec(base=_of_task(command, common))
    else:
        spec = read_search(find(command.from_, command.where).folder).spec
    spec = changed(spec, own)
    for dimension in dimensions(spec.optional):
        setting = RUN_SETTINGS[dimension.name]
        rule = "a search finds this one itself; leave it out, or train with it by `triaccel run`"
        require(setting.path not in common, f"--{setting.option}", common.get(setting.path), rule)
    return replace(spec, base=with_options(replace(spec.base, seed=spec.seed), common))


def _comparison_of(command: Compare) -> ComparisonSpec:
    own, common = _split(command)
    if command.from_ is None:
        spec = ComparisonSpec(base=replace(_of_task(command, common), purpose=Purpose.FINAL))
    else:
        spec = read_comparison(find(command.from_, command.where).folder).spec
    base, ablation = with_options(spec.base, common), spec.ablation or command.ablation
    return replace(changed(spec, own), base=base, ablation=ablation)


def replayed_control(command: Replay, control: ControlConfig) -> ControlConfig:
    """Returns `control`, the configuration of a run, with the thresholds that the command gives."""
    return _with_control(control, {path[1:]: value for path, value in given(command.thresholds).items()})


def with_options(spec: RunSpec, options: Given) -> RunSpec:
    """Returns the run with the given options applied.

    Raises:
        ValueError: an option breaks its rule, alone or together with others; or the task does not read it.
    """
    control = {path[1:]: value for path, value in options.items() if path[0] == "control"}
    rest = {path: value for path, value in options.items() if path[0] != "control"}
    limits = (("memory_headroom_bytes",), ("memory_budget_bytes",))
    if options.keys() & limits:  # a given limit replaces one of the other kind
        rest = {**dict.fromkeys(limits), **rest}
    new_spec = changed(spec, {**rest, ("control",): _with_control(spec.control, control)})
    _require_read(new_spec, options)
    return new_spec


def _require_read(spec: RunSpec, options: Given) -> None:
    """Checks that the task reads every option given; a value equal to its own passes, as those of a settings file do.

    Raises:
        ValueError: the task does not read an option, or its `unread` has a name that is no option.
    """
    task = spec.load_task()
    own = replace(spec, recipe=task.recipe, control=task.control, data_dir=None, gpus=RunSpec.gpus)
    for name in task.unread:
        require(name in RUN_SETTINGS, f"unread of {spec.task}", name, "must name an option of `triaccel run`")
        setting = RUN_SETTINGS[name]
        default = reduce(getattr, setting.path, own)
        value = options.get(setting.path, default)
        require(value == default, f"--{setting.option}", value, f"{spec.task} does not read it; leave it out")


def _with_control(control: ControlConfig, options: Given) -> ControlConfig:
    """Returns `control` with the given options applied.

    A starting batch size outside the ladder, or off its rungs, moves the ladder with it. A curvature method that does
    not measure the noise scale turns off the task's own noise-scale bound.
    """
    options = dict(options)
    if options.get(("curvature", "method"), "fisher") != "fisher":
        options.setdefault(("batch", "bound_by_noise_scale"), False)
    start, batch = options.get(("batch", "start")), control.batch
    if start is not None:
        step = options.get(("batch", "granularity"), batch.granularity)
        rungs_below = min((start - 1) // step, (batch.start - batch.minimum) // step)
        options.setdefault(("batch", "minimum"), start - rungs_below * step)
        options.setdefault(("batch", "maximum"), max(batch.maximum, start))
    return changed(control, options)


def _base(command: Run | TuneBatch, options: Given) -> RunSpec:
    """Returns the run with the task's own settings, or the run that --from names, on a GPU of its own."""
    if command.from_ is None:
        return _of_task(command, options)
    return replace(read_spec(find_run(command.from_, command.where)), trials_per_gpu=1)


def _split(command: Search | Compare) -> tuple[dict[tuple[str, ...], Any], dict[tuple[str, ...], Any]]:
    """Returns the options of the search or comparison itself, and those of its runs."""
    common = given(command.main, command.training, command.thresholds)
    runs_own = {("gpus",), ("trials_per_gpu",), ("target",)}
    return {path: common.pop(path) for path in given(command.main).keys() - runs_own}, common


def _of_task(command: TrainingCommand, options: Given) -> RunSpec:
    """Returns the run with the task's own settings; the task is loaded with the given folder of data files."""
    assert command.task is not None  # checked by `parsing.check`
    folder = options.get(("data_dir",))
    return run_spec(command.task, None if folder is None else Path(folder))
