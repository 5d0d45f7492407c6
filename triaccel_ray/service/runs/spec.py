"""The specification of a single run, a value that is sent to the machine that trains it, and its training methods.

Nothing here imports PyTorch, so that `--help` is fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from triaccel_ray.config import ControlConfig, LrRule, check_fields, in_bounds, knob, require
from triaccel_ray.decide.paper import paper_rules
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.trainables.registry import load_task
from triaccel_ray.trainables.task import Purpose, Recipe, Task

if TYPE_CHECKING:
    import torch

FIXED: Final = "fixed"
"""Name of the method with fixed settings, and of a comparison's row for the best of these."""
PROBE: Final = "probe"
"""Name of the method that only searches use."""
BASELINES: Final = ("fp32", "amp", "amp-best")
"""Methods without this product's engine."""
IN_FP32: Final = ("fp32", "engine-fp32", "dynamic-batch")
"""Methods whose layers all compute in FP32."""
TUNE_BATCH: Final = "tune-batch"
"""Name of the method that times batch sizes; `triaccel tune-batch` alone uses it."""
METHODS: Mapping[str, str] = {
    "fp32": "FP32, as a tutorial writes it",
    "amp": "automatic mixed precision, as a tutorial writes it",
    "amp-best": "automatic mixed precision, as an expert writes it: BF16, torch.compile, channels_last",
    "engine-fp32": "FP32 for all layers, on this product's engine",
    "engine-amp": "one low precision for all layers, on this product's engine",
    "dynamic-batch": "FP32 with the elastic batch size alone",
    "dynamic-precision": "precision per layer alone",
    "dynamic-both": "precision per layer and elastic batch size, without curvature",
    "triaccel": "the full control loop",
    "paper": "the control loop by the paper's printed rules: no smoothing, no dwell time, nothing undone",
    "fixed": "one precision and batch size on this product's engine, nothing adapted",
    "tune-batch": "the time of a step at each batch size, nothing adapted",
    "probe": "one low precision, statistics and curvature recorded, batch size and precision kept",
}
"""Name of a training method -> its description."""
MAX_TRIALS_PER_GPU = 16
"""With more, CUDA contexts alone would fill the smaller GPUs."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One run: a task, a method, a seed, and every setting in force."""

    task: str
    """Name of a bundled task, or `package.module:Class`."""
    method: str = "triaccel"
    """How to train."""
    purpose: Purpose = Purpose.SEARCH
    """Which data the run may use."""
    seed: int = knob(0, "[0, 2147483647]")
    """Seed of initialization, sample order and augmentation. The validation split does not depend on it."""
    recipe: Recipe = field(default_factory=Recipe)
    control: ControlConfig = field(default_factory=ControlConfig)
    memory_budget_bytes: int | None = knob(None, "[1, inf)", option="memory_budget", unit="bytes")
    """Memory limit of the process on its device, such as 2GiB. The CUDA context counts. Not given: the whole device."""
    memory_headroom_bytes: int | None = knob(None, "[1, inf)", option="memory_headroom", unit="bytes")
    """Memory limit above what the idle process holds, such as 500MiB. Replaces the budget."""
    data_dir: str | None = knob(None, unit="folder")
    """Folder of the data files: CIFAR's, in torchvision's or the binary layout, or text. Not given: the task's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""
    lean_memory: bool = True
    """Hold less GPU memory outside of tensors: small stacks, expandable segments. Turn off for kernels of your own that
    recurse or call by pointers. No effect on fp32 and amp, which hold what any other program would."""
    trials_per_gpu: int = knob(1, f"[1, {MAX_TRIALS_PER_GPU}]")
    """Runs that share a GPU. Each gets an equal part of its memory. Timings are marked, and energy is not measured."""
    gpus: str = knob("1", unit="count or range")
    """GPUs that train the run together, such as 4. A range, such as 2..8, is elastic: the run continues with as many as
    there are. Without GPUs, as many processes on CPUs. The batch size is that of all together."""
    goal: Goal = field(default_factory=Goal)
    """The metric that the task is judged by."""
    target: float | None = knob(None, "(-inf, inf)")
    """Value of the task's metric to reach on validation samples, such as 94. Reports then have the seconds and joules
    until the first epoch that does. Final runs and comparisons train without these samples and still read the test set
    once."""
    keep: Literal["last", "best"] | None = None
    """Weights to keep in model.pt: of the last epoch, or of the one that was best on the validation samples. Trials and
    comparisons keep none."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.method in METHODS, "method", self.method, f"must be one of {', '.join(METHODS)}")
        rule = "a run on the CPU has no GPU to share; leave it out, or --device cpu"
        require(self.trials_per_gpu == 1 or self.device != "cpu", "trials-per-gpu", self.trials_per_gpu, rule)
        self._check_gpus()
        if self.target is not None:
            bounds = "[0, 100]" if self.goal.unit == "%" else "(-inf, inf)" if self.goal.maximize else "[0, inf)"
            rule = f"no value that {self.goal.words} can have; give one in {bounds}"
            require(in_bounds(self.target, bounds), "target", self.target, rule)
        rule = "a final run has no validation samples to choose an epoch by: leave out --final, or --keep best"
        require(self.keep != "best" or self.purpose is not Purpose.FINAL, "keep", self.keep, rule)
        rule = "give a budget or a headroom, not both"
        both = self.memory_budget_bytes is not None and self.memory_headroom_bytes is not None
        require(not both, "memory headroom", self.memory_headroom_bytes, rule)

    def _check_gpus(self) -> None:
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", self.gpus)
        rule = "must be a number of at least 1, such as 4, or a range of such, such as 2..8"
        is_range = match is not None and 1 <= int(match[1]) <= int(match[2] or match[1])
        require(is_range, "gpus", self.gpus, rule)
        if not self.is_distributed:
            return
        rule = "runs that share a GPU train on one each; give one of --gpus and --trials-per-gpu"
        require(self.trials_per_gpu == 1, "gpus", self.gpus, rule)
        one_process = (*BASELINES, TUNE_BATCH)
        rule = f"method {self.method} trains in one process, as {', '.join(one_process)} do; leave it out"
        require(self.method not in one_process, "gpus", self.gpus, rule)
        minimum, max_gpus = self.method_control.batch.minimum, self.gpu_range[1]
        rule = f"must be at least the number of GPUs, {max_gpus}: each has a sample of every whole batch"
        require(minimum >= max_gpus, "batch minimum (batch_min)", minimum, rule)

    @property
    def gpu_range(self) -> tuple[int, int]:
        """Fewest and most GPUs, or processes on CPUs, that train the run together."""
        first, _, last = self.gpus.partition("..")
        return int(first), int(last or first)

    @property
    def ranks_text(self) -> str:
        """The number of ranks that train the run together, as text; empty for one."""
        return f"{self.gpus.replace('..', ' to ')} ranks" if self.is_distributed else ""

    @property
    def is_distributed(self) -> bool:
        """Whether a process group trains the run; an elastic one may shrink to one process."""
        return self.gpu_range[1] > 1

    def load_task(self) -> Task:
        """Returns the task; raises as `registry.load_task`."""
        return load_task(self.task, None if self.data_dir is None else Path(self.data_dir))

    @property
    def torch_device(self) -> torch.device:
        """The device that the run uses; raises ValueError if `cuda` is requested, and no CUDA device is visible."""
        import torch

        available = torch.cuda.is_available()
        require(self.device != "cuda" or available, "device", self.device, "no CUDA device is visible; leave it out")
        if available and self.device != "cpu":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def validates(self) -> bool:
        """Whether the validation samples are kept apart from training, and judge the model after each epoch."""
        return self.purpose is Purpose.SEARCH or self.target is not None

    @property
    def is_baseline(self) -> bool:
        """Whether the run is FP32 or AMP without this engine."""
        return self.method in BASELINES

    @property
    def method_control(self) -> ControlConfig:
        """The control configuration, with the parts turned off that the method does not use."""
        if self.method == "triaccel":
            return self.control
        if self.method == "paper":
            return paper_rules(self.control)
        precision, batch = self.control.precision, self.control.batch
        # AdaScale and the noise bound need the per-sample gradients of curvature.
        rule: LrRule = "sqrt" if batch.lr_rule == "adascale" else batch.lr_rule
        batch = replace(batch, lr_rule=rule, bound_by_noise_scale=False)
        if self.method not in ("dynamic-precision", "dynamic-both"):
            initial = Precision.FP32 if self.method in IN_FP32 else precision.initial
            precision = replace(precision, enabled=False, initial=initial, initial_layers={})
        if self.method not in ("dynamic-batch", "dynamic-both"):
            batch = replace(batch, enabled=False, lr_rule="none")
        curvature = replace(self.control.curvature, enabled=self.method == "probe" and self.control.curvature.enabled)
        execution = self.control.execution
        if self.is_baseline:
            execution = replace(execution, data_on="device")
        return replace(self.control, precision=precision, curvature=curvature, batch=batch, execution=execution)


def run_spec(task_name: str, data_dir: Path | None = None) -> RunSpec:
    """Returns the spec of a run of `task_name`, with the task's own recipe and thresholds; raises as `load_task`."""
    task, folder = load_task(task_name, data_dir), None if data_dir is None else str(data_dir)
    return RunSpec(task=task_name, data_dir=folder, goal=task.goal, recipe=task.recipe, control=task.control)
