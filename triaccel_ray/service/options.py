"""The command line's options, as dataclasses that the commands share; help texts are the fields' docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from triaccel_ray.config import AmpPrecision, ControlConfig, CurvatureMethod, DataPlace, ExecutionConfig, LrRule
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.storage.place import Place
from triaccel_ray.service.units import parse_bytes
from triaccel_ray.trainables.task import Recipe

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
Size = Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")]
"""An amount of memory."""
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
"""An option without a value."""
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""What a user calls a result."""
NewName = Annotated[str, tyro.conf.arg(metavar="NAME")]
CHOICES = ConstructorRegistry()
"""How options are read beside tyro's own rules."""


@CHOICES.primitive_rule
def _choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str | None] | None:
    """Reads an option that is one of several words where it is given; None, which is not typed, is no choice."""
    literals = [kind for kind in get_args(info.type) if get_origin(kind) is Literal]
    if len(literals) != 1 or set(get_args(info.type)) != {*literals, NoneType}:
        return None
    words: tuple[str, ...] = get_args(literals[0])
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(words)}}}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: value is None or value in words,
        str_from_instance=lambda value: [str(value)],
        choices=words,
    )


TaskName = Annotated[str, tyro.conf.arg(metavar="TASK")]
RunName = Annotated[str, tyro.conf.arg(metavar="NAME")]
JobName = Annotated[str, tyro.conf.arg(metavar="JOB")]
JobsAddress = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="ADDRESS",
        help="Ray cluster: http://HOST:8265, HOST:PORT or auto. Default: RAY_ADDRESS, or this machine's cluster.",
        help_behavior_hint="",
    ),
]


# Texts of more than one line: of a field's docstring tyro would keep the line breaks.
LEAN_HELP = (
    "Hold less GPU memory outside of tensors: small stacks, expandable segments. Turn off for kernels of your own that "
    "recurse or call by pointers. No effect on fp32 and amp. Default: on."
)
DATA_HELP = (
    "Where samples held in tensors stay while a GPU trains. host saves GPU memory and costs a little time. No effect "
    "on fp32 and amp. Default: device."
)
STORAGE_HELP = (
    "Folder for runs, searches and checkpoints; all machines of a cluster must share it. Or the URI of a store: "
    "s3://BUCKET/FOLDER, gs://, abfs://, hdfs:// or file:///FOLDER."
)
TRACKING_HELP = (
    "MLflow store: http://HOST:PORT of a server, or sqlite:///FILE. Default: mlflow.db in the storage folder. Required "
    "where the storage path is a URI. User and password belong in MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, which `ps` does not show."
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where results are kept, and where work is done."""

    storage_path: Annotated[Place, _PLACE, tyro.conf.arg(help=STORAGE_HELP)] = DEFAULT_STORAGE
    tracking_uri: Annotated[str | None, tyro.conf.arg(metavar="URI", help=TRACKING_HELP, help_behavior_hint="")] = None
    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Ray cluster to join: HOST:PORT or auto. Default: starts Ray on this machine."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a run trains. Defaults are the task's."""

    epochs: Given[int] = None
    """Passes over the training samples."""
    lr: Given[float] = None
    """Peak learning rate at the starting batch size."""
    weight_decay: Given[float] = None
    """L2 penalty on weights of two or more dimensions."""
    warmup_epochs: Given[float] = None
    """Epochs of linear warm-up."""
    norm_bias_lr_factor: Given[float] = None
    """Factor on the learning rate of norms and biases."""
    label_smoothing: Given[float] = None
    """Label smoothing, in [0, 1)."""
    amp: Given[AmpPrecision] = None
    """Precision of --method amp on a GPU. Use bf16 for models that overflow in FP16."""
    batch_size: Given[int] = None
    """Samples in the first batch."""
    memory_budget: Size = None
    """Memory limit of the process on its device, such as 2GiB. The CUDA context counts. Default: the whole device."""
    memory_headroom: Size = None
    """Memory limit above what the idle process holds, such as 500MiB. Replaces the budget."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Folder of the data files: CIFAR's, in torchvision's or the binary layout, or text. Default: the task's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""
    capture: Given[Literal["on", "off"]] = None
    """Run steps on a GPU as CUDA graphs. Turn off if the model's Python code must run at every step. Default: on."""
    compile: Given[Literal["auto", "on", "off"]] = None
    """Use torch.compile: on any model, or on a GPU on those without fused batch normalization. Default: auto."""
    fuse: Given[Literal["on", "off"]] = None
    """Fuse batch normalization with the operations after it, on a GPU. Default: on."""
    recompute: Given[Literal["on", "off"]] = None
    """Recompute the fused outputs in the backward pass: less memory, more time. Default: on."""
    autotune: Given[Literal["on", "off"]] = None
    """Let cuDNN time its algorithms at every new batch size. Pays in long runs at one size. Default: off."""
    lean_memory: Annotated[Literal["on", "off"] | None, tyro.conf.arg(help=LEAN_HELP, help_behavior_hint="")] = None
    data_on: Annotated[DataPlace | None, tyro.conf.arg(help=DATA_HELP, help_behavior_hint="")] = None

    @property
    def recipe(self) -> dict[str, Any]:
        """The fields of the task's recipe that were given."""
        names = ("epochs", "lr", "weight_decay", "warmup_epochs", "norm_bias_lr_factor", "label_smoothing", "amp")
        return _given({name: getattr(self, name) for name in names})

    @property
    def memory(self) -> dict[str, Any]:
        """What was given of the process's memory, limits in bytes, by the names of `RunSpec`."""
        amounts = {"memory_budget_bytes": self.memory_budget, "memory_headroom_bytes": self.memory_headroom}
        is_lean = {} if self.lean_memory is None else {"lean_memory": self.lean_memory == "on"}
        return {name: None if text is None else parse_bytes(text) for name, text in amounts.items()} | is_lean

    def check(self) -> None:
        """Returns if these options can be used with any task; does not wait for PyTorch.

        Raises:
            ValueError: one breaks its rule; the message names it.
        """
        Recipe(**self.recipe)
        _ = self.memory

    def execution(self, execution: ExecutionConfig) -> ExecutionConfig:
        """Returns `execution` with what was given."""
        names = ("capture", "fuse", "recompute", "autotune")
        switched = {name: value == "on" for name in names if (value := getattr(self, name)) is not None}
        return replace(execution, **switched, **_given({"data_on": self.data_on, "compile": self.compile}))


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds and intervals of the control loop. Defaults are the task's."""

    precision: Given[Literal["fp16", "bf16", "fp32"]] = None
    """Precision of all layers at the start. Methods fixed and engine-amp keep it."""
    tau_low: Given[float] = None
    """A layer computes in FP16 while its gradient variance is below this."""
    tau_high: Given[float] = None
    """A layer computes in FP32 from this gradient variance on."""
    rho_low: Given[float] = None
    """The batch grows below this share of the memory limit, in [0, 1]."""
    rho_high: Given[float] = None
    """The batch shrinks above this share of the memory limit, in [0, 1]."""
    tau_curv: Given[float] = None
    """A layer gets the next higher precision above this eigenvalue of its curvature."""
    alpha: Given[float] = None
    """How much curvature lowers a layer's learning rate: lr / (1 + alpha * eigenvalue)."""
    t_ctrl: Given[int] = None
    """Optimizer steps between decisions."""
    t_curv: Given[int] = None
    """Optimizer steps between curvature measurements."""
    b_curv: Given[int] = None
    """Samples in a curvature measurement."""
    curvature: Given[CurvatureMethod] = None
    """How to measure curvature."""
    batch_min: Given[int] = None
    """Smallest batch size."""
    batch_max: Given[int] = None
    """Largest batch size."""
    step_up: Given[int] = None
    """Samples added when the batch grows."""
    step_down: Given[int] = None
    """Samples removed when the batch shrinks."""
    lr_rule: Given[LrRule] = None
    """How the learning rate follows the batch size."""
    noise_bound: Given[Literal["on", "off"]] = None
    """Stop growing the batch at the gradient noise scale. Needs --curvature fisher."""
    accumulate: Given[int] = None
    """Parts in which each batch passes, their gradients added up. Default: one, more where a batch does not fit."""
    clip_norm: Given[float] = None
    """Global norm to which larger gradients are scaled down."""

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
            "accumulate": self.accumulate,
            "start": batch_size,
            "bound_by_noise_scale": None if noise_bound is None else noise_bound == "on",
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
            **_given({"every_steps": self.t_ctrl, "clip_norm": self.clip_norm}),
        )


_Hidden = Annotated[_T | None, tyro.conf.Suppress]


@dataclass(frozen=True, kw_only=True)
class SearchThresholds(Thresholds):
    """Settings that the search keeps fixed. Defaults are the task's."""

    tau_low: _Hidden[float] = None
    tau_high: _Hidden[float] = None
    rho_low: _Hidden[float] = None
    rho_high: _Hidden[float] = None


@dataclass(frozen=True, kw_only=True)
class ReplayThresholds(Thresholds):
    """Thresholds to decide by. Defaults are the run's."""

    # When it ticked and how it measured curvature is in its log, and no decision depends on it otherwise.
    t_ctrl: _Hidden[int] = None
    t_curv: _Hidden[int] = None
    b_curv: _Hidden[int] = None
    curvature: _Hidden[CurvatureMethod] = None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
