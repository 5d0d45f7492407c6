"""The command line's options, as dataclasses that the commands share; help texts are the fields' docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from triaccel_ray.config import AmpPrecision, ControlConfig, CurvatureMethod, DataPlace, ExecutionConfig, LrRule
from triaccel_ray.plan import Precision
from triaccel_ray.service.storage.place import Place

DEFAULT_STORAGE = Place("triaccel-runs")
_PLACE: PrimitiveConstructorSpec[Place] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="FOLDER|URI",
    instance_from_str=lambda words: Place(words[0]),
    is_instance=lambda value: isinstance(value, Place),
    str_from_instance=lambda place: [place.storage],
)
_T = TypeVar("_T")
Flat = Annotated[_T, tyro.conf.OmitArgPrefixes]
"""A group of options without a prefix to their names."""
Given = Annotated[_T | None, tyro.conf.arg(help_behavior_hint="")]
"""An option that is None where it is not given; its group, or its own text, says what then holds."""
TaskName = Annotated[str, tyro.conf.arg(metavar="TASK")]
RunName = Annotated[str, tyro.conf.arg(metavar="NAME")]
JobName = Annotated[str, tyro.conf.arg(metavar="JOB")]


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where work is done and recorded."""

    storage_path: Annotated[Place, _PLACE] = DEFAULT_STORAGE
    """Folder of runs, searches and checkpoints, shared by all machines of a cluster; or the URI of a store, such as
    s3://BUCKET/FOLDER, gs://, abfs://, hdfs://HOST:PORT/FOLDER or file:///FOLDER, of which each has a working copy."""
    tracking_uri: Given[str] = None
    """MLflow store: http://HOST:PORT of a server, or sqlite:///FILE. Default: mlflow.db in the storage folder;
    has to be given where that is a URI. What is resumed goes on in the store in which it is recorded. User and
    password belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which `ps` does not show."""
    address: Given[str] = None
    """Ray cluster: HOST:PORT or `auto`. Default: Ray is started on this machine."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a run trains; what is not given comes from the task."""

    epochs: Given[int] = None
    """Passes over the training samples."""
    lr: Given[float] = None
    """Peak learning rate at the starting batch size."""
    weight_decay: Given[float] = None
    """L2 penalty on weights."""
    warmup_epochs: Given[float] = None
    """Epochs of linear warm-up."""
    norm_bias_lr_factor: Given[float] = None
    """Factor on the learning rate of biases and of norms' weights."""
    label_smoothing: Given[float] = None
    """Probability mass spread over the classes, in [0, 1)."""
    amp: Given[AmpPrecision] = None
    """What method amp computes in on a GPU, bf16 for models that overflow in FP16; of engine-amp: --precision."""
    batch_size: Given[int] = None
    """Batch size of the first step."""
    memory_budget: Given[str] = None
    """Memory the process may hold on its device, e.g. 2GiB; the CUDA context counts."""
    memory_headroom: Given[str] = None
    """In place of a budget: memory on top of what the process holds before its first batch, e.g. 500MiB."""
    data_dir: Given[Path] = None
    """Folder of data files, in torchvision's layout or CIFAR's binary one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    capture: Given[Literal["on", "off"]] = None
    """Whether steps on a GPU are captured as CUDA graphs; off for models whose Python code acts at every step."""
    fuse: Given[Literal["on", "off"]] = None
    """Whether batch normalisation and what follows it become one kernel on a GPU."""
    recompute: Given[Literal["on", "off"]] = None
    """Whether a backward pass computes again what --fuse's kernels gave to convolutions: less memory, more time."""
    autotune: Given[Literal["on", "off"]] = None
    """Whether cuDNN times its algorithms for every new batch size: pays in long runs at one size."""
    lean_memory: Given[Literal["on", "off"]] = None
    """Whether the process holds little of a GPU beside what it computes with (small stacks, expandable segments); no
    effect on fp32 and amp. Off for kernels of your own that recurse or call by pointers."""
    data_on: Given[DataPlace] = None
    """Where samples held in tensors lie while a GPU trains: on the host they take none of its memory, and a batch a
    little more time. No effect on fp32 and amp, which have them on the device."""

    def execution(self, execution: ExecutionConfig) -> ExecutionConfig:
        """Returns `execution` with what was given."""
        names = ("capture", "fuse", "recompute", "autotune", "lean_memory")
        switched = {name: value == "on" for name in names if (value := getattr(self, name)) is not None}
        return replace(execution, **switched, **_given({"data_on": self.data_on}))


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The control loop's thresholds; what is not given comes from the task."""

    precision: Given[Literal["fp16", "bf16", "fp32"]] = None
    """Precision of all layers before anything is measured; to the end, with the methods fixed and engine-amp."""
    tau_low: Given[float] = None
    """Gradient variance below which a layer computes in FP16."""
    tau_high: Given[float] = None
    """Gradient variance from which a layer computes in FP32."""
    rho_low: Given[float] = None
    """Share of the memory limit below which the batch grows."""
    rho_high: Given[float] = None
    """Share of the memory limit above which the batch shrinks."""
    tau_curv: Given[float] = None
    """Largest eigenvalue above which a layer is held one precision higher."""
    alpha: Given[float] = None
    """Strength of the curvature's effect on learning rates."""
    t_ctrl: Given[int] = None
    """Optimizer steps between ticks."""
    t_curv: Given[int] = None
    """Optimizer steps between curvature measurements."""
    b_curv: Given[int] = None
    """Samples a curvature measurement uses."""
    curvature: Given[CurvatureMethod] = None
    """How curvature is measured."""
    batch_min: Given[int] = None
    """Smallest batch size."""
    batch_max: Given[int] = None
    """Largest batch size."""
    step_up: Given[int] = None
    """Samples added when memory use is low."""
    step_down: Given[int] = None
    """Samples removed when memory use is high."""
    lr_rule: Given[LrRule] = None
    """How the learning rate follows the batch size."""
    noise_bound: Given[Literal["on", "off"]] = None
    """Whether the batch also stops growing at the gradient noise scale; needs curvature method fisher."""

    def onto(self, control: ControlConfig, *, batch_size: int | None = None) -> ControlConfig:
        """Returns `control` with the thresholds that were given.

        A starting batch size outside the ladder, or off its rungs, moves the ladder with it. A way to measure curvature
        that does not measure the noise scale takes a task's own bound by it away.
        """
        noise_bound = self.noise_bound
        if noise_bound is None and self.curvature not in (None, "fisher"):
            noise_bound = "off"
        batch = {
            "rho_low": self.rho_low,
            "rho_high": self.rho_high,
            "minimum": self.batch_min,
            "maximum": self.batch_max,
            "step_up": self.step_up,
            "step_down": self.step_down,
            "lr_rule": self.lr_rule,
            "bound_by_noise_scale": None if noise_bound is None else noise_bound == "on",
            "start": batch_size,
        }
        if batch_size is not None and batch_size > 0:
            old = control.batch
            rungs_below = min((batch_size - 1) // old.granularity, (old.start - old.minimum) // old.granularity)
            batch["minimum"] = batch_size - rungs_below * old.granularity if self.batch_min is None else self.batch_min
            batch["maximum"] = max(old.maximum, batch_size) if self.batch_max is None else self.batch_max
        initial = None if self.precision is None else Precision(self.precision)
        precision = {"initial": initial, "tau_low": self.tau_low, "tau_high": self.tau_high}
        curvature = {
            "tau_curv": self.tau_curv,
            "alpha": self.alpha,
            "every_steps": self.t_curv,
            "num_samples": self.b_curv,
            "method": self.curvature,
        }
        return replace(
            control,
            precision=replace(control.precision, **_given(precision)),
            curvature=replace(control.curvature, **_given(curvature)),
            batch=replace(control.batch, **_given(batch)),
            **_given({"every_steps": self.t_ctrl}),
        )


_Hidden = Annotated[_T | None, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class SearchThresholds(Thresholds):
    """Thresholds that a search does not look for; what is not given comes from the task."""

    tau_low: _Hidden[float] = None
    tau_high: _Hidden[float] = None
    rho_low: _Hidden[float] = None
    rho_high: _Hidden[float] = None


@dataclass(frozen=True, kw_only=True)
class ReplayThresholds(Thresholds):
    """Thresholds to decide by; what is not given comes from the run.

    When it ticked and how it measured curvature is in its log, and no decision depends on it otherwise.
    """

    t_ctrl: _Hidden[int] = None
    t_curv: _Hidden[int] = None
    b_curv: _Hidden[int] = None
    curvature: _Hidden[CurvatureMethod] = None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
