"""What a single run is asked to do, as a value that travels to the machine that does it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from triaccel_ray.config import BatchConfig, ControlConfig, require, require_flag, require_integer, require_number
from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.units import format_bytes
from triaccel_ray.trainables.registry import load_task
from triaccel_ray.trainables.task import Purpose, Recipe

CUDA_CONTEXT_BYTES = 100 * 2**20
"""What a process holds of a GPU at least before its first tensor; 200 to 500 MiB on most."""
MAX_TRIALS_PER_GPU = 16
"""With more, CUDA contexts alone would fill the smaller GPUs."""
COMMIT = "commit"
"""Name, in a run's first record, of the git commit of the user's working directory."""
COMMIT_VARIABLE = "TRIACCEL_COMMIT"
"""Environment variable by which workers, which may be elsewhere, know it."""
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run: a task, a method, a seed, and every setting in force."""

    task: str
    """Name of a bundled task, or `package.module:Class`."""
    method: str = "triaccel"
    """One of METHODS."""
    purpose: Purpose = Purpose.SEARCH
    """Which data exists for this run."""
    seed: int = 0
    """Of initialisation, order and augmentation; the validation split does not depend on it."""
    recipe: Recipe = field(default_factory=Recipe)
    control: ControlConfig = field(default_factory=ControlConfig)
    memory_budget_bytes: int | None = None
    """MemMax; the whole device when None."""
    memory_headroom_bytes: int | None = None
    """In place of a budget: bytes on top of what the process holds before the first batch."""
    data_dir: str | None = None
    """Where data files lie; the task's own cache when None."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`; auto takes the GPU where there is one."""
    lean_memory: bool = True
    """Whether a process on a GPU holds less memory outside of tensors: small stacks, expandable segments. The baselines
    fp32 and amp hold what any other program would."""
    trials_per_gpu: int = 1
    """Runs that share a GPU, this one counted; each may hold its part of the memory, and timings are marked."""
    goal: Goal = field(default_factory=Goal)
    """What the task is judged by."""
    keep: Literal["last", "best"] | None = None
    """Whose weights the run leaves in its folder: the last epoch's, or those of the epoch that was best by the goal on
    the validation samples. None: no weights, as of trials and of runs that are compared."""
    register: str | None = None
    """Name by which MLflow's model registry gets the trained model; None: it does not."""

    def __post_init__(self) -> None:
        require(self.method in METHODS, "method", self.method, f"must be one of {', '.join(METHODS)}")
        require_integer("seed", self.seed, low=0)
        require_number("seed", self.seed, "must lie in [0, 2**31)", low=0, high=2**31 - 1)
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "must be one of auto, cpu, cuda")
        require_flag("lean-memory", self.lean_memory)
        require_integer("trials-per-gpu", self.trials_per_gpu, low=1)
        rule = f"must be a whole number from 1 to {MAX_TRIALS_PER_GPU}"
        require(self.trials_per_gpu <= MAX_TRIALS_PER_GPU, "trials-per-gpu", self.trials_per_gpu, rule)
        rule = "a run on the CPU has no GPU to share; leave it out, or --device cpu"
        require(self.trials_per_gpu == 1 or self.device != "cpu", "trials-per-gpu", self.trials_per_gpu, rule)
        rule = "a final run has no validation samples to choose an epoch by: leave out --final, or --keep best"
        require(self.keep != "best" or self.purpose is not Purpose.FINAL, "keep", self.keep, rule)
        rule = "must name a model in 1 to 200 printable characters, without '/' and ':', and not begin with '.'"
        require(self.register is None or _is_model_name(self.register), "register", self.register, rule)
        if self.memory_headroom_bytes is not None:
            require_integer("memory headroom (bytes)", self.memory_headroom_bytes, low=1)
        if self.memory_budget_bytes is not None:
            require_integer("memory budget (bytes)", self.memory_budget_bytes, low=1)
            require(
                self.memory_headroom_bytes is None,
                "memory headroom",
                self.memory_headroom_bytes,
                "give a budget or a headroom, not both",
            )

    @property
    def torch_device(self) -> torch.device:
        """The device that the run uses.

        Raises:
            ValueError: `cuda` is asked for where there is none.
        """
        available = torch.cuda.is_available()
        require(self.device != "cuda" or available, "device", self.device, "no CUDA device is visible; leave it out")
        if available and self.device != "cpu":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def is_baseline(self) -> bool:
        """Whether the run is FP32 or AMP as a tutorial writes it, without this engine."""
        return self.method in ("fp32", "amp")

    @property
    def method_control(self) -> ControlConfig:
        """The control configuration with the parts off that the method does without."""
        if self.method == "triaccel":
            return self.control
        precision, batch = self.control.precision, _without_noise(self.control.batch)
        if self.method not in ("dynamic-precision", "dynamic-both"):
            initial = Precision.FP32 if self.method in ("fp32", "dynamic-batch") else precision.initial
            precision = replace(precision, enabled=False, initial=initial, initial_layers={})
        if self.method not in ("dynamic-batch", "dynamic-both"):
            batch = replace(batch, enabled=False, lr_rule="none")
        curvature = replace(self.control.curvature, enabled=self.method == "probe" and self.control.curvature.enabled)
        execution = self.control.execution
        if self.is_baseline:
            execution = replace(execution, data_on="device")
        return replace(self.control, precision=precision, curvature=curvature, batch=batch, execution=execution)


def run_spec(task_name: str, *, data_dir: Path | None, recipe: Mapping[str, object], **settings: object) -> RunSpec:
    """Returns the spec of a run of `task_name`: the task's own recipe and thresholds where nothing else is said.

    Raises:
        ValueError: the task is unknown, or a setting breaks its rule.
    """
    task = load_task(task_name, data_dir)
    settings.setdefault("control", task.control)
    given = {name: value for name, value in recipe.items() if value is not None}
    return RunSpec(
        task=task_name,
        data_dir=None if data_dir is None else str(data_dir.expanduser().absolute()),
        goal=task.goal,
        recipe=replace(task.recipe, **given),  # type: ignore[arg-type]  # names checked by the dataclass
        **settings,  # type: ignore[arg-type]  # likewise
    )


def require_budget(spec: RunSpec) -> None:
    """Returns if the memory budget of a run on this machine may be enough: before Ray starts, which takes seconds.

    On a CPU this process, with PyTorch and Ray loaded, holds less than a worker will. A CUDA context is not made here.

    Raises:
        ValueError: the budget is smaller, or larger than the machine's memory.
    """
    budget = spec.memory_budget_bytes
    if budget is None:
        return
    if spec.device != "cpu" and torch.cuda.is_available():
        floor, holder = CUDA_CONTEXT_BYTES, "a CUDA context"
    else:
        floor, holder = memory_meter(torch.device("cpu"), budget).sample(), "a process with PyTorch and Ray"
    if budget <= floor:
        raise ValueError(
            f"memory budget = {format_bytes(budget)}: {holder} alone takes {format_bytes(floor)}; give more, or "
            "--memory-headroom 500MiB for memory on top of that"
        )


def environment(device: torch.device) -> dict[str, str]:
    """Returns hardware and versions, for the record."""
    info = {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "device": device.type,
        "python": platform.python_version(),
        "host": platform.node(),
    }
    for package in ("torch", "triton", "triaccel-ray"):
        try:
            info[package] = version(package)
        except PackageNotFoundError:
            info[package] = "not installed"
    if commit := os.environ.get(COMMIT_VARIABLE):
        info[COMMIT] = commit
    return info


def commit_of(folder: Path) -> str:
    """Returns the git commit checked out in `folder`, `-dirty` where files differ from it; empty where none is."""
    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _is_model_name(name: str) -> bool:
    """Returns whether MLflow takes `name` for a registered model's."""
    is_legal = name.isprintable() and not name.startswith(".") and not {"/", ":"} & set(name)
    return is_legal and bool(name.strip()) and len(name) <= 200


def _cpu_name() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _without_noise(batch: BatchConfig) -> BatchConfig:
    """Returns `batch` with nothing that needs the curvature's per-sample gradients."""
    rule = "sqrt" if batch.lr_rule == "adascale" else batch.lr_rule
    return replace(batch, lr_rule=rule, bound_by_noise_scale=False)
