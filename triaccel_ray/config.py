"""All settings of the control loop as dataclasses; each field declares its default, its range and its meaning.

Construction checks the values. Command-line options, their reference, settings files and MLflow parameters are
generated from these fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from triaccel_ray.records.plan import Precision

T = TypeVar("T")

CurvatureMethod = Literal["fisher", "ggn", "hessian"]
LrRule = Literal["none", "sqrt", "linear", "adascale"]
Compile = Literal["auto", "on", "off"]
Weights = Literal["fp32", "split", "auto"]
Switch = bool | Literal["auto"]
OptimizerState = Literal["fp32", "8bit"]
Activations = Literal["auto", "keep", "recompute", "offload"]
DataPlace = Literal["device", "host"]


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ValueError naming the option, the value found and the rule it breaks, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name} = {value!r}: {rule}")


def knob(default: T, bounds: str = "", *, option: str = "", unit: str = "") -> T:
    """Returns a dataclass field that `check_fields` checks and the command line offers.

    Args:
        default: default value of the field.
        bounds: interval of a number in mathematical notation: `[0, 1)`, `(0, inf]`.
        option: name on the command line, with underscores, if it differs from the field's name.
        unit: `bytes` for memory, such as `2GiB`; `folder` for a path; `count or range` for `4` or `2..8`.
    """
    made: T = field(default=default, metadata={"bounds": bounds, "option": option, "unit": unit})
    return made


def check_fields(config: Any) -> None:
    """Checks that every field of the dataclass has its declared type and an allowed value.

    Raises:
        ValueError: a field fails; the message has its name in code and on the command line, its value, and the rule.
        TypeError: a group of settings is not an instance of its class.
    """
    kinds = get_type_hints(type(config))
    for each in fields(config):
        value, kind = getattr(config, each.name), kinds[each.name]
        if is_dataclass(kind):
            require_instance(each.name, value, kind)  # type: ignore[arg-type]  # a class
            continue
        name = f"{each.name} ({option})" if (option := each.metadata.get("option")) else each.name
        if NoneType in get_args(kind):
            if value is None:
                continue
            kind = next(alternative for alternative in get_args(kind) if alternative is not NoneType)
        check_field(name, value, kind, each.metadata.get("bounds", ""))


def check_field(name: str, value: Any, kind: Any, bounds: str = "") -> None:
    """Raises ValueError, with `name` in its message, unless `value` has the type `kind` and lies within `bounds`."""
    if kind is bool:
        require(isinstance(value, bool), name, value, "must be True or False")
    elif bool in get_args(kind):  # or one of several words
        words = get_args(get_args(kind)[1])
        require(isinstance(value, bool) or value in words, name, value, f"must be True, False or {', '.join(words)}")
    elif get_origin(kind) is Literal:
        words = get_args(kind)
        require(isinstance(value, str) and value in words, name, value, f"must be one of {', '.join(words)}")
    elif kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        is_allowed = is_number and (not bounds or in_bounds(value, bounds))
        require(is_allowed, name, value, _number_rule(kind, bounds))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        require(isinstance(value, kind), name, value, f"must be a {kind.__name__}")


def in_bounds(value: float, bounds: str) -> bool:
    """Returns whether the number lies in an interval such as `[0, 1)`; NaN never does."""
    low, high = (float(bound) for bound in bounds[1:-1].split(","))
    above = value > low if bounds[0] == "(" else value >= low
    return above and (value < high if bounds[-1] == ")" else value <= high)


def _number_rule(kind: type, bounds: str) -> str:
    noun = "an integer" if kind is int else "a number"
    if not bounds:
        return f"must be {noun}"
    low, high = bounds[1:-1].split(", ")
    if high != "inf":
        return f"must be an integer in {bounds}" if kind is int else f"must lie in {bounds}"
    if kind is float and bounds[-1] == ")":
        noun = "a finite number"
    return f"must be {noun} {'>' if bounds[0] == '(' else '>='} {low}"


def require_instance(name: str, value: T, kind: type[T]) -> T:
    """Returns `value` if it is an instance of `kind`.

    Raises:
        TypeError: it is not; for a dict, the message shows how to build a `kind` from it.
    """
    if not isinstance(value, kind):
        way_out = f"; write {kind.__name__}(**{name})" if isinstance(value, dict) else ""
        raise TypeError(f"{name} = {value!r}: must be a {kind.__name__}, not a {type(value).__name__}{way_out}")
    return value


def _require_ascending(low_name: str, low: float, high_name: str, high: float, way_out: str) -> None:
    rule = f"{low_name} must be smaller than {high_name}. To {way_out}"
    require(low < high, f"{low_name}, {high_name}", (low, high), rule)


class _Checked:
    """Base class of dataclasses whose fields are checked on construction."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(_Checked):
    """Rules 1 and 2: which precision each layer computes in (Tri-Accel, section 3.1)."""

    enabled: bool = knob(True, option="adapt_precision")
    """Whether precision adapts. If not, layers keep the initial one, unless it is not offered or overflows."""
    initial: Precision = knob(Precision.BF16, option="precision")
    """Precision of all layers before statistics exist, and throughout if precision does not adapt."""
    initial_layers: Mapping[str, Precision] = field(default_factory=dict)
    """Initial precision of single layers, by name; overrides the common one."""
    tau_low: float = knob(1e-7, "[0, inf)")
    """Gradient variance below which a layer computes in FP16, or FP8."""
    tau_high: float = knob(math.inf, "[0, inf]")
    """Gradient variance from which on a layer computes in FP32; > tau_low. Infinite: none does for its variance."""
    fp8: bool = False
    """Whether linear layers with at least 2048 inputs and outputs use FP8, not FP16, in code compiled for a GPU."""
    allow_slow_precisions: bool = False
    """Whether layers may use a precision that brings no speedup, such as FP16 on CPUs or in compiled code."""
    beta: float = knob(0.9, "[0, 1)")
    """Weight of the past in the moving average of the gradient variance: 0.9 averages over about 10 steps."""
    dwell_ticks: int = knob(2, "[0, inf)", option="precision_dwell_ticks")
    """Minimum number of ticks for which a layer keeps a precision, unless curvature changes it."""
    patience_ticks: int = knob(2, "[1, inf)")
    """Consecutive ticks that must ask for a lower precision before a layer is demoted. Promotion needs one."""
    overflow_bar_ticks: int = knob(20, "[1, inf)")
    """Ticks for which a layer stays out of a precision that overflowed, was slower or was refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.initial_layers, Mapping), "initial_layers", self.initial_layers, "must be a mapping")
        levels = [("precision", self.initial), *(("initial_layers", each) for each in self.initial_layers.values())]
        for name, level in levels:
            require(isinstance(level, Precision), name, level, "must be a Precision")
            require(self.fp8 or level is not Precision.FP8, name, level.value, "needs --fp8 on, or fp8=True")
        way_out = "keep one precision: --method engine-amp, or PrecisionConfig(enabled=False)"
        _require_ascending("tau_low", self.tau_low, "tau_high", self.tau_high, way_out)


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(_Checked):
    """Rules 3 to 5: eigenvalues, the learning rates that follow them, and promotion (Tri-Accel, section 3.2)."""

    enabled: bool = knob(True, option="adapt_curvature")
    """Whether curvature is measured. If not, every lr scale is 1 and nothing is promoted."""
    method: CurvatureMethod = knob("fisher", option="curvature")
    """`fisher` (a column per sample), `ggn` (one per sample and class) or `hessian` (power iteration, slow)."""
    top_k: int = knob(5, "[1, inf)")
    """Number of eigenvalues per layer, k."""
    every_steps: int = knob(200, "[1, inf)", option="t_curv")
    """T_curv: optimizer steps between measurements."""
    num_samples: int = knob(32, "[2, inf)", option="b_curv")
    """b_curv: training samples a measurement uses."""
    alpha: float = knob(0.0, "[0, inf)")
    """Strength of the lr scaling; 0 switches it off. The paper gives no value; six seeds showed no gain from 0.02."""
    tau_curv: float = knob(math.inf, "(0, inf]")
    """A layer whose largest eigenvalue exceeds this value is held one precision higher; infinite: never."""
    smoothing: float = knob(0.5, "[0, 1)", option="curvature_smoothing")
    """Weight of the past in the moving average over measurements, which scatter between batches of 32. 0: no smoothing;
    each measurement takes effect, including the first."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(_Checked):
    """Rule 6: the elastic batch size and the learning rate that follows it (Tri-Accel, section 3.3)."""

    enabled: bool = knob(True, option="adapt_batch")
    """Whether the batch size adapts. If not, it stays at the initial one, except while that does not fit in memory."""
    start: int = knob(96, "[1, inf)", option="batch_size")
    """Initial batch size, for which the learning rate is given."""
    minimum: int = knob(32, "[1, inf)", option="batch_min")
    """Smallest batch size."""
    maximum: int = knob(512, "[1, inf)", option="batch_max")
    """Largest batch size. If the number of samples is known, it is a limit, too; in a task, a quarter of it is."""
    accumulate: int = knob(1, "[1, inf)")
    """Micro-batches per batch (gradient accumulation), each of at least two samples with batch normalization."""
    granularity: int = knob(32, "[1, inf)")
    """Difference between neighboring batch sizes. Fewer sizes mean fewer captured graphs and tuned kernels."""
    step_up: int = knob(32, "[1, inf)")
    """Samples added when memory use is below rho_low; a multiple of `granularity`."""
    step_down: int = knob(64, "[1, inf)")
    """Samples removed when memory use is above rho_high; a multiple of `granularity`."""
    rho_low: float = knob(0.70, "[0, 1]")
    """Share of the memory limit below which the batch grows; in [0, rho_high)."""
    rho_high: float = knob(0.90, "[0, 1]")
    """Share of the memory limit above which the batch shrinks; in (rho_low, 1]."""
    counts_idle_memory: bool = False
    """Whether memory use and limit count from zero, as in the paper. If not, both count above the idle process."""
    dwell_ticks: int = knob(1, "[0, inf)", option="batch_dwell_ticks")
    """Minimum number of ticks for which a batch size is kept before it grows. Shrinking never waits."""
    oom_cooldown_ticks: int = knob(20, "[1, inf)")
    """Ticks for which a batch size or memory plan that lacked memory or was slower stays excluded."""
    lr_rule: LrRule = "sqrt"
    """Factor on the lr at batch size B, relative to the initial B_0: 1, sqrt(B/B_0), B/B_0, or AdaScale's gain."""
    bound_by_noise_scale: bool = knob(False, option="noise_bound")
    """Whether the batch also stops growing at `noise_share` times the gradient noise scale tr(Cov)/|g|^2 (McCandlish
    et al. 2018), which rises during training. The batch waits for four measurements at smoothing 0.8. On a GPU, they
    may take a quarter of `max_overhead`, and all of it once only the noise scale holds the batch."""
    noise_share: float = knob(1.0, "(0, inf)")
    """Largest batch size B, as a multiple of the noise scale B_noise. Training at batch size B takes 1 + B / B_noise
    times the samples that the smallest batch takes for the same progress (McCandlish et al., section 2)."""
    noise_smoothing: float = knob(0.8, "[0, 1)")
    """Weight of the past in the moving average of |g|^2 / tr(Cov): of single estimates, one in four was negative."""

    def around(self, size: int, *, accumulate: int = 1) -> Self:
        """Returns a copy with `size` as the initial batch size, and sizes from about half to eight times that.

        The smallest size is `size` itself if half of it would be below 2, or below `accumulate`.

        Raises:
            ValueError: `size` is not an integer of at least 1, or is smaller than `accumulate`.
        """
        check_field("batch start", size, int, "[1, inf)")
        half = -(-size // 2)
        minimum = size % half or half
        return replace(
            self,
            start=size,
            minimum=minimum if minimum >= max(accumulate, 2) else size,
            maximum=8 * size,
            accumulate=accumulate,
            granularity=half,
            step_up=half,
            step_down=half,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = (self.minimum, self.start, self.maximum)
        names = "batch minimum, start, maximum (batch_min, batch_size, batch_max)"
        require(sorted(sizes) == list(sizes), names, sizes, "must be in ascending order: see BatchConfig.around")
        rule = f"must be at most the smallest batch, {self.minimum}: each part holds at least one sample"
        require(self.accumulate <= self.minimum, "accumulate", self.accumulate, rule)
        multiple = f"must be a multiple of granularity = {self.granularity}"
        for name, value in (("step_up", self.step_up), ("step_down", self.step_down)):
            require(value % self.granularity == 0, name, value, multiple)
        apart, names = self.start - self.minimum, "batch minimum, start (batch_min, batch_size)"
        require(apart % self.granularity == 0, names, (self.minimum, self.start), f"{multiple} apart")
        way_out = "keep one size: --method dynamic-precision, or BatchConfig(enabled=False)"
        _require_ascending("rho_low", self.rho_low, "rho_high", self.rho_high, way_out)


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(_Checked):
    """The dynamic loss scale of all layers, in use while any of them computes in FP16 (Micikevicius et al. 2018)."""

    initial: float = knob(2.0**16, "[1, 16777216]", option="loss_scale")
    """Initial scale; a power of two adds no rounding error."""
    growth_interval: int = knob(2000, "[1, inf)", option="loss_scale_growth_interval")
    """Consecutive finite steps after which the scale doubles; it halves at every overflow."""


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(_Checked):
    """How steps are executed on a GPU. Apart from rounding, results do not depend on it."""

    capture: bool = True
    """Whether steps are captured as CUDA graphs. Python code of the model and the loss then runs only during capture:
    switch this off for a model whose forward pass depends on changing Python state."""
    compile: Compile = "auto"
    """When to use `torch.compile`. `auto`: on a GPU, for a model whose norms are not fused: its repeated blocks, or all
    of it. `on`: for the whole of any model, on a CPU, too. `off`: never."""
    fuse: bool = True
    """Whether fused kernels run batch normalization with residual sum and activation, the gate of
    squeeze-and-excitation, and depthwise convolutions. With `compile` `auto`, not if few layers have a BatchNorm2d."""
    recompute: bool = True
    """Whether a fused kernel's output that only one convolution reads is recomputed in the backward pass."""
    activations: Activations = "auto"
    """What becomes of tensors that blocks of the model save. `keep` them, `recompute` them in the backward pass, or
    `offload` them to the host. `auto`: kept while memory suffices, else what costs the least time."""
    autotune: bool = False
    """Whether cuDNN benchmarks its algorithms for every new batch size and precision. This takes 1 to 4 seconds each
    and makes steps 2 to 7% faster. It pays off in runs of minutes at one batch size."""
    data_on: DataPlace = "device"
    """Where training samples given as tensors are stored: on the `device`, or in pinned memory of the `host`. From
    there, a GPU reads each batch (zero-copy). `host` saves device memory, at hardly more time for small samples."""


@dataclass(frozen=True, kw_only=True)
class ControlConfig(_Checked):
    """Settings of the whole control loop: the thresholds of its rules and its intervals (Tri-Accel, section 3.4)."""

    every_steps: int = knob(50, "[1, inf)", option="t_ctrl")
    """T_ctrl: optimizer steps between ticks."""
    revert_slowdowns: bool = True
    """Whether changes must pay. A lower precision or a larger batch is undone if steps take 25 % longer per sample (3 %
    and 0 % if captured). A precision that raises the loss or changes outputs of some samples by 10 % is refused.
    Captured batches grow only to save time. Without this rule, decisions on a CPU do not depend on timings."""
    max_overhead: float = knob(0.02, "(0, 1]")
    """Share of the training time that adaptation may take on a GPU; curvature that changes nothing has a quarter of it.
    Measurements wait until it allows them, in captured steps lower precisions, too. Only with `revert_slowdowns`."""
    clip_norm: float | None = knob(None, "(0, inf)")
    """Maximum global L2 norm of gradients; larger ones are scaled down to it. None: no clipping."""
    max_skipped_steps: int = knob(50, "[1, inf)")
    """Consecutive steps with a NaN or infinite gradient after which the next tick ends training. All are skipped."""
    weights: Weights = "fp32"
    """How weights of layers in BF16 are stored. `split`: as the BF16 number used to compute and the 16 bits that
    complete the exact FP32 number; their gradients are BF16, half as large. For SGD, Adam and AdamW. `auto`: split if
    the memory budget may not suffice for FP32 weights."""
    optimizer_state: OptimizerState = "fp32"
    """How the momentum of SGD and the moments of Adam and AdamW are stored. `8bit`: as 8-bit codes, finer near zero
    and with a scale per 64, in a quarter of the memory; not exact. Only for parameters of at least 4096 elements."""
    step_in_backward: Switch = False
    """Whether SGD, Adam or AdamW updates parameters as soon as their gradients exist, and then frees the gradients.
    These are clipped by the norm of the previous step; parameters updated before a NaN appears keep their update.
    `auto`: if the memory budget may not suffice otherwise, and nothing is clipped."""
    shard_optimizer: Switch = False
    """Whether ranks share the optimizer's state (ZeRO, stage 1). `auto`: if the memory budget may not suffice."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = (self.batch.lr_rule, self.batch.bound_by_noise_scale)
        has_noise = self.curvature.enabled and self.curvature.method == "fisher"
        rule = "need the per-sample gradients that curvature method 'fisher' measures; use it, with curvature on"
        needs_none = asked[0] != "adascale" and not asked[1]
        require(has_noise or needs_none, "lr_rule, bound_by_noise_scale (noise_bound)", asked, rule)
