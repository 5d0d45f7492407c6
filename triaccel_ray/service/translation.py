"""Between the command line's words and the values they stand for, both ways."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields, replace

from triaccel_ray.config import ControlConfig, require
from triaccel_ray.service import cli
from triaccel_ray.service.comparisons.spec import ComparisonSpec
from triaccel_ray.service.options import Thresholds, Training
from triaccel_ray.service.runs.spec import RunSpec, run_spec
from triaccel_ray.service.searches.dimensions import dimensions
from triaccel_ray.service.searches.spec import SearchSpec
from triaccel_ray.service.units import format_exactly
from triaccel_ray.trainables.registry import TASKS, load_task
from triaccel_ray.trainables.task import Purpose, Recipe


def spec_from(
    task: str, training: Training, thresholds: Thresholds, *, method: str, seed: int, purpose: Purpose = Purpose.SEARCH
) -> RunSpec:
    """Returns the run that the options describe.

    Raises:
        ValueError: an option breaks its rule; the message names it.
    """
    control = thresholds.onto(load_task(task, training.data_dir).control, batch_size=training.batch_size)
    control = replace(control, execution=training.execution(control.execution))
    return run_spec(
        task,
        data_dir=training.data_dir,
        recipe=training.recipe,
        method=method,
        purpose=purpose,
        seed=seed,
        control=control,
        device=training.device,
        **training.memory,
    )


def search_spec(command: cli.Search) -> SearchSpec:
    """Returns the search that the options describe.

    Raises:
        ValueError: an option breaks its rule; the message names it.
    """
    for dimension in dimensions(command.also):
        option, given = f"--{dimension.name.replace('_', '-')}", getattr(command.thresholds, dimension.name)
        rule = "a search finds this one itself; leave it out, or train with it by `triaccel run`"
        require(given is None, option, given, rule)
    base = spec_from(command.task, command.training, command.thresholds, method="triaccel", seed=command.seed)
    return SearchSpec(
        base=replace(base, trials_per_gpu=command.trials_per_gpu),
        space=command.space,
        optional=command.also,
        num_trials=command.trials,
        objective=command.objective,
        margin=command.margin,
        seed=command.seed,
    )


def comparison_spec(command: cli.Compare) -> ComparisonSpec:
    """Returns the comparison that the options describe.

    Raises:
        ValueError: an option breaks its rule; the message names it.
    """
    base = spec_from(
        command.task, command.training, command.thresholds, method="triaccel", seed=0, purpose=Purpose.FINAL
    )
    return ComparisonSpec(
        base=replace(base, trials_per_gpu=command.trials_per_gpu),
        methods=tuple(word.strip() for word in command.methods.split(",") if word.strip()),
        num_seeds=command.seeds,
        ablation=command.ablation,
        num_fixed=command.fixed,
        num_tuned=command.tune_baselines,
    )


def command_of(spec: RunSpec) -> str:
    """Returns the command, ready to paste, that trains with method and thresholds of `spec` again, to four digits.

    A baseline has no thresholds. Of its other settings it has those that differ from the task's own.
    """
    words = ["triaccel", "run", spec.task, "--epochs", str(spec.recipe.epochs)]
    words += ["--method", spec.method] if spec.method != "triaccel" else []
    words += ["--keep", "best"] if spec.keep == "best" else []
    thresholds = {} if spec.is_baseline else _thresholds(spec.control)  # there they do not act
    words += _option_words({**thresholds, **_not_default(spec)})
    words += _memory_words(spec)
    if spec.data_dir is not None:
        words += ["--data-dir", spec.data_dir]
    return shlex.join(words)


def search_command_of(spec: SearchSpec) -> str:
    """Returns the command that searches again; where data files lie is left out, it is no part of what was asked."""
    words = ["triaccel", "search", spec.base.task, "--epochs", str(spec.base.recipe.epochs)]
    words += ["--trials", str(spec.num_trials)]
    usual = {each.name: each.default for each in fields(SearchSpec)}
    asked = {name: getattr(spec, name) for name in ("space", "objective", "margin")}
    settings = {name: value for name, value in asked.items() if value != usual[name]}
    if spec.base.trials_per_gpu > 1:
        settings["trials-per-gpu"] = spec.base.trials_per_gpu
    words += _option_words(settings)
    if spec.optional:
        words += ["--also", *spec.optional]
    searched = {dimension.name.replace("_", "-") for dimension in dimensions(spec.optional)}
    own = {name: value for name, value in _own_thresholds(spec.base).items() if name not in searched}
    words += _option_words({**own, **_not_default(spec.base)})
    return shlex.join([*words, *_memory_words(spec.base)])


def _option_words(values: Mapping[str, object]) -> list[str]:
    """Returns options and their values, numbers to four digits unless that would make the two of a pair equal."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    for low, high in (("tau-low", "tau-high"), ("rho-low", "rho-high")):
        if low in shown and shown[low] == shown.get(high):
            shown |= {low: str(values[low]), high: str(values[high])}
    return [word for name, text in shown.items() for word in (f"--{name}", text)]


def comparison_command_of(spec: ComparisonSpec) -> str:
    """Returns the command that compares again; where data files lie is left out."""
    base = spec.base
    words = ["triaccel", "compare", base.task, "--epochs", str(base.recipe.epochs)]
    words += ["--methods", ",".join(spec.methods), "--seeds", str(spec.num_seeds)]
    words += ["--ablation"] if spec.ablation else []
    counts = {"fixed": spec.num_fixed, "tune-baselines": spec.num_tuned, "trials-per-gpu": base.trials_per_gpu}
    settings: dict[str, object] = {name: count for name, count in counts.items() if count != (name == "trials-per-gpu")}
    settings |= {**_own_thresholds(base), **_not_default(base)}
    settings.pop("seed", None)
    words += _option_words(settings)
    return shlex.join([*words, *_memory_words(base)])


def _own_thresholds(spec: RunSpec) -> dict[str, float]:
    """Returns the thresholds that are not the task's own."""
    own = _thresholds(load_task(spec.task, None).control) if spec.task in TASKS else {}
    return {name: value for name, value in _thresholds(spec.control).items() if value != own.get(name)}


def _thresholds(control: ControlConfig) -> dict[str, float]:
    return {
        "tau-low": control.precision.tau_low,
        "tau-high": control.precision.tau_high,
        "rho-low": control.batch.rho_low,
        "rho-high": control.batch.rho_high,
        "tau-curv": control.curvature.tau_curv,
        "alpha": control.curvature.alpha,
        "t-ctrl": control.every_steps,
        "step-up": control.batch.step_up,
        "step-down": control.batch.step_down,
    }


def _memory_words(spec: RunSpec) -> list[str]:
    if spec.memory_budget_bytes is not None:
        return ["--memory-budget", format_exactly(spec.memory_budget_bytes)]
    if spec.memory_headroom_bytes is not None:
        return ["--memory-headroom", format_exactly(spec.memory_headroom_bytes)]
    return []


def _not_default(spec: RunSpec) -> dict[str, object]:
    lean = {} if spec.lean_memory else {"lean-memory": "off"}
    settings = {"seed": spec.seed, "device": spec.device, **lean, **_settings(spec.recipe, spec.control)}
    if spec.task not in TASKS:  # a user's own: whoever looks at a folder does not mean to run the code that it names
        return settings
    task = load_task(spec.task, None)
    own = {"seed": 0, "device": "auto", **_settings(task.recipe, task.control)}
    changed = {name: value for name, value in settings.items() if value != own.get(name)}
    ladder = ("batch-size", "batch-min", "batch-max")  # one moves the others
    return changed | ({name: settings[name] for name in ladder} if changed.keys() & set(ladder) else {})


def _settings(recipe: Recipe, control: ControlConfig) -> dict[str, object]:
    switches = {"noise-bound": control.batch.bound_by_noise_scale, **asdict(control.execution)}
    clip = {} if control.clip_norm is None else {"clip-norm": control.clip_norm}
    return {
        **clip,
        "lr": recipe.lr,
        "weight-decay": recipe.weight_decay,
        "warmup-epochs": recipe.warmup_epochs,
        "norm-bias-lr-factor": recipe.norm_bias_lr_factor,
        "label-smoothing": recipe.label_smoothing,
        "amp": recipe.amp,
        "precision": control.precision.initial.value,
        "batch-size": control.batch.start,
        "batch-min": control.batch.minimum,
        "batch-max": control.batch.maximum,
        "accumulate": control.batch.accumulate,
        "lr-rule": control.batch.lr_rule,
        "t-curv": control.curvature.every_steps,
        "b-curv": control.curvature.num_samples,
        "curvature": control.curvature.method,
        **{name.replace("_", "-"): {True: "on", False: "off"}.get(value, value) for name, value in switches.items()},
    }
