"""Between the command line's words and the values they stand for, both ways."""

from __future__ import annotations

import shlex

from trainables.registry import load_task
from trainables.task import Purpose
from triaccel_ray.service.options import Thresholds, Training
from triaccel_ray.service.spec import RunSpec, run_spec
from triaccel_ray.service.units import parse_bytes


def spec_from(
    task: str, training: Training, thresholds: Thresholds, *, method: str, seed: int, purpose: Purpose = Purpose.SEARCH
) -> RunSpec:
    """Returns the run that the options describe.

    Raises:
        ValueError: an option breaks its rule; the message names it.
    """
    recipe_fields = ("epochs", "lr", "weight_decay", "warmup_epochs", "label_smoothing")
    control = thresholds.onto(load_task(task, training.data_dir).control, batch_size=training.batch_size)
    return run_spec(
        task,
        data_dir=training.data_dir,
        recipe={name: getattr(training, name) for name in recipe_fields},
        method=method,
        purpose=purpose,
        seed=seed,
        control=control,
        memory_budget_bytes=None if training.memory_budget is None else parse_bytes(training.memory_budget),
        memory_headroom_bytes=None if training.memory_headroom is None else parse_bytes(training.memory_headroom),
        device=training.device,
    )


def command_of(spec: RunSpec) -> str:
    """Returns the command, ready to paste, that trains with the thresholds of `spec` again."""
    control = spec.control
    words = ["triaccel", "run", spec.task, "--epochs", str(spec.recipe.epochs)]
    values = {
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
    for name, value in values.items():
        words += [f"--{name}", f"{value:.4g}" if isinstance(value, float) else str(value)]
    if spec.memory_budget_bytes is not None:
        words += ["--memory-budget", f"{spec.memory_budget_bytes}B"]
    if spec.memory_headroom_bytes is not None:
        words += ["--memory-headroom", f"{-(-spec.memory_headroom_bytes // 2**20)}MiB"]
    if spec.data_dir is not None:
        words += ["--data-dir", spec.data_dir]
    return shlex.join(words)
