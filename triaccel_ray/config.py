"""Every knob of the control loop: declared once, with its default, its range and what it does, checked on construction.

The command line, its reference, files of settings and MLflow's parameters are made from these fields.
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

MINIMUM_LOSS_SCALE = 1.0
"""Below it a gradient would be made smaller, against overflow in the backward pass alone."""

CurvatureMethod = Literal["fisher", "ggn", "hessian"]
LrRule = Literal["none", "sqrt", "linear", "adascale"]
AmpPrecision = Literal["fp16", "bf16"]
"""What automatic mixed precision, a baseline, computes in on a GPU: FP16 under a gradient scaler, or BF16 without."""
Compile = Literal["auto", "on", "off"]
Weights = Literal["fp32", "split"]
OptimizerState = Literal["fp32", "8bit"]
DataPlace = Literal["device", "host"]
"""Where samples that are held whole in tensors lie while a GPU trains on them."""


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ValueError naming the option, the value found and the rule it breaks, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name} = {value!r}: {rule}")


def knob(default: T, bounds: str = "", *, option: str = "", unit: str = "") -> T:
    """Returns a dataclass field that `check_fields` checks and the command line offers.

    Args:
        default: its value where none is given.
        bounds: the interval of a number, as mathematics writes it: `[0, 1)`, `(0, inf]`.
        option: its name on the command line, with underscores, where that is not the field's.
        unit: `bytes` of an amount of memory, which may be given as `2GiB`; `folder` of a path.
    """
    made: T = field(default=default, metadata={"bounds": bounds, "option": option, "unit": unit})
    return made


def check_fields(config: Any) -> None:
    """Returns if every field of the dataclass has its type, lies in its bounds, or is one of its words.

    Raises:
        ValueError: one does not; the message names it as the code and the command line do, its value, and the rule.
        TypeError: a group of settings is not of its class.
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
    """Raises ValueError, which calls it `name`, unless `value` is of the type `kind` and within `bounds`."""
    if kind is bool:
        require(isinstance(value, bool), name, value, "must be True or False")
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
    """Returns `value` if it is a `kind`.

    Raises:
        TypeError: it is something else; the message shows how a mapping is given instead.
    """
    if not isinstance(value, kind):
        way_out = f"; write {kind.__name__}(**{name})" if isinstance(value, dict) else ""
        raise TypeError(f"{name} = {value!r}: must be a {kind.__name__}, not a {type(value).__name__}{way_out}")
    return value


def _require_ascending(low_name: str, low: float, high_name: str, high: float, way_out: str) -> None:
    rule = f"{low_name} must be smaller than {high_name}; exchange them. To {way_out}"
    require(low < high, f"{low_name}, {high_name}", (low, high), rule)


class _Checked:
    """A dataclass whose fields are checked when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(_Checked):
    """Rules 1 and 2: which precision each layer computes in (Tri-Accel, section 3.1)."""

    enabled: bool = knob(True, option="adapt_precision")
    """Whether precision adapts. If not, every layer stays at the first, except when FP16 overflows for good."""
    initial: Precision = knob(Precision.BF16, option="precision")
    """Precision before any statistic exists, and of every layer where precision does not adapt."""
    initial_layers: Mapping[str, Precision] = field(default_factory=dict)
    """Precision of single layers before any statistic, in place of that of all."""
    tau_low: float = knob(1e-7, "[0, inf)")
    """Gradient variance below which a layer computes in FP16."""
    tau_high: float = knob(math.inf, "[0, inf]")
    """Gradient variance from which a layer computes in FP32; > tau_low. Infinite: none does for its variance. FP32
    takes time and memory, and was worth neither where we looked; a search on your own task may find otherwise."""
    allow_slow_precisions: bool = False
    """Whether layers may compute in a precision that gains nothing: one that the device merely emulates (FP16 on most
    CPUs, at a tenth of FP32's speed), or FP16 where compiled code is as fast in BF16."""
    beta: float = knob(0.9, "[0, 1)")
    """Smoothing of the variance. The paper gives none; 0.9 averages over about 10 steps, well inside one
    control interval, so that a tick sees the interval it ends and not the ones before."""
    dwell_ticks: int = knob(2, "[0, inf)", option="precision_dwell_ticks")
    """Ticks a layer keeps a precision at least, unless curvature moves it."""
    patience_ticks: int = knob(2, "[1, inf)")
    """Consecutive ticks that must ask for a lower precision before a layer is demoted. Promotion needs one."""
    overflow_bar_ticks: int = knob(20, "[1, inf)")
    """Ticks for which a layer stays out of FP16 after most steps of an interval overflowed at the least loss scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for level in self.initial_layers.values():
            require(isinstance(level, Precision), "initial_layers", level, "must be a Precision")
        way_out = "keep one precision: --method engine-amp, or PrecisionConfig(enabled=False)"
        _require_ascending("tau_low", self.tau_low, "tau_high", self.tau_high, way_out)


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig(_Checked):
    """Rules 3 to 5: eigenvalues, the learning rates that follow them, and promotion (Tri-Accel, section 3.2)."""

    enabled: bool = knob(True, option="adapt_curvature")
    """Whether curvature is measured. If not, every lr scale is 1 and nothing is promoted."""
    method: CurvatureMethod = knob("fisher", option="curvature")
    """`fisher` (one column a sample), `ggn` (one a sample and class) or `hessian` (the paper's power iteration)."""
    top_k: int = knob(5, "[1, inf)")
    """Eigenvalues per layer, k."""
    every_steps: int = knob(200, "[1, inf)", option="t_curv")
    """T_curv: optimizer steps between measurements."""
    num_samples: int = knob(32, "[2, inf)", option="b_curv")
    """b_curv: training samples a measurement uses."""
    alpha: float = knob(0.02, "[0, inf)")
    """Strength of the lr scaling; 0 switches it off. The paper gives none; with eigenvalues of 5 to 50 after a
    few epochs, 0.02 halves the rate of the steepest layers and leaves the flat ones alone."""
    tau_curv: float = knob(math.inf, "(0, inf]")
    """Largest eigenvalue above which a layer is held one precision higher; infinite: never."""
    smoothing: float = knob(0.5, "[0, 1)", option="curvature_smoothing")
    """Weight of the past in the moving average over measurements: sampling noise between batches of 32 is
    larger than the error of the cheap estimates. 0: each measurement acts as it is, the first one, too."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig(_Checked):
    """Rule 6: the elastic batch size and the learning rate that follows it (Tri-Accel, section 3.3)."""

    enabled: bool = knob(True, option="adapt_batch")
    """Whether the batch size adapts. If not, it stays at the first, except while it does not fit."""
    start: int = knob(96, "[1, inf)", option="batch_size")
    """Batch size of the first step; the learning rate is meant for it."""
    minimum: int = knob(32, "[1, inf)", option="batch_min")
    """Smallest batch size."""
    maximum: int = knob(512, "[1, inf)", option="batch_max")
    """Largest batch size."""
    accumulate: int = knob(1, "[1, inf)")
    """Parts in which each batch passes through the model, their gradients added up. A batch that does not fit
    passes in more."""
    granularity: int = knob(32, "[1, inf)")
    """Step between batch sizes. Few sizes mean few captured graphs and tuned kernels."""
    step_up: int = knob(32, "[1, inf)")
    """Samples added when memory use is below rho_low; a multiple of `granularity`."""
    step_down: int = knob(64, "[1, inf)")
    """Samples removed when memory use is above rho_high; a multiple of `granularity`."""
    rho_low: float = knob(0.70, "[0, 1]")
    """Share of the memory limit below which the batch grows; in [0, rho_high)."""
    rho_high: float = knob(0.90, "[0, 1]")
    """Share of the memory limit above which the batch shrinks; in (rho_low, 1]."""
    dwell_ticks: int = knob(1, "[0, inf)", option="batch_dwell_ticks")
    """Ticks a batch size is kept before it grows again. Shrinking never waits."""
    oom_cooldown_ticks: int = knob(20, "[1, inf)")
    """Ticks for which a size that ran out of memory stays excluded."""
    lr_rule: LrRule = "sqrt"
    """How the lr follows the batch size B from B_0, the first: not at all, sqrt(B/B_0), B/B_0, or AdaScale's gain."""
    bound_by_noise_scale: bool = knob(False, option="noise_bound")
    """Whether the batch also stops growing at `noise_share` of the gradient noise scale tr(Cov)/|g|^2 (McCandlish et
    al. 2018), which rises as training goes on. The batch does not grow before measurements have half of the moving
    average's weight: with smoothing 0.8, four."""
    noise_share: float = knob(1.0, "(0, inf)")
    """B / B_noise up to which the batch may grow. Steps of batch B need 1 + B / B_noise times the samples that the
    smallest batch needs to get as far (ibid., section 2)."""
    noise_smoothing: float = knob(0.8, "[0, 1)")
    """Weight of the past in the moving average of |g|^2 / tr(Cov), in [0, 1): from 32 samples, one estimate of |g|^2 in
    four lay below zero (ResNet-18 on CIFAR-10, 62 measurements of two runs)."""

    def around(self, size: int, *, accumulate: int = 1) -> Self:
        """Returns the same with `size` as the first batch, on a ladder from half of it to eight times as much.

        The smallest batch holds two samples, or one for each of `accumulate` parts.

        Raises:
            ValueError: `size` is no whole number of at least 1, or smaller than `accumulate`.
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
        require(sorted(sizes) == list(sizes), names, sizes, "must be in ascending order")
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
    """The one dynamic loss scale, in use while any layer computes in FP16 (Micikevicius et al. 2018)."""

    initial: float = knob(2.0**16, "[1, 16777216]", option="loss_scale")
    """Scale of the first step; a power of two costs no rounding."""
    growth_interval: int = knob(2000, "[1, inf)", option="loss_scale_growth_interval")
    """Finite steps in a row after which the scale doubles; it halves at every overflow."""


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig(_Checked):
    """How steps are run on a GPU; what they compute does not depend on it, up to rounding."""

    capture: bool = True
    """Whether steps are captured as CUDA graphs. Python code in the model and the loss then runs at captures only:
    switch it off for a model whose forward pass depends on Python state that changes."""
    compile: Compile = "auto"
    """`auto`: on a GPU `torch.compile` compiles a model without fused norms: its repeated blocks, or the whole of it.
    `on`: the whole of any model, in place of fused norms, on a CPU, too. `off`: none."""
    fuse: bool = True
    """Whether batch normalisation with sum and activation becomes one kernel, squeeze-and-excitation's gate another,
    and depthwise convolutions run Triton kernels."""
    recompute: bool = True
    """Whether a convolution that alone reads such a kernel's output has it computed again in the backward pass, where
    keeping it would take memory. Without effect where nothing is fused."""
    activation_checkpointing: bool = False
    """Whether blocks of the model keep their inputs alone and are computed again in the backward pass: less memory for
    longer steps. Captured steps leave out blocks that draw random numbers, dropout's for example."""
    autotune: bool = False
    """Whether cuDNN times its algorithms for every new batch size and precision: 1 to 4 seconds each, for steps that
    are 2 to 7% faster. Pays in runs of minutes at one batch size."""
    data_on: DataPlace = "device"
    """`device`: training samples held in tensors lie on the device. `host`: in pinned memory of the host, out of which
    a GPU reads each batch ("zero-copy"): less memory of the device, and for small samples hardly more time."""


@dataclass(frozen=True, kw_only=True)
class ControlConfig(_Checked):
    """The whole control loop: its rules' thresholds and its clock (Tri-Accel, section 3.4)."""

    every_steps: int = knob(50, "[1, inf)", option="t_ctrl")
    """T_ctrl: optimizer steps between ticks."""
    revert_slowdowns: bool = True
    """Whether a lower precision, or a larger batch, is undone where steps then take over 25 % longer per sample. Time
    differs from run to run: without this rule two equal runs on a CPU decide alike."""
    max_overhead: float = knob(0.02, "(0, 1]")
    """Share of the training time that control may take on a GPU: a measurement of curvature, or a lower
    precision, waits until what they have taken so far is within it. Without effect where `revert_slowdowns` is off."""
    clip_norm: float | None = knob(None, "(0, inf]")
    """Global L2 norm to which larger gradients are scaled down. None: no bound."""
    max_skipped_steps: int = knob(50, "[1, inf)")
    """Steps in a row with a NaN or infinite gradient after which training ends. Such steps are never made."""
    weights: Weights = "fp32"
    """How weights of layers that compute in BF16 are kept. `split`: as the BF16 word that computes and the 16 bits that
    complete the FP32 number, exactly; their gradients are BF16, half as large. SGD, Adam and AdamW."""
    optimizer_state: OptimizerState = "fp32"
    """How the momentum of SGD and the moments of Adam and AdamW are kept. `8bit`: as companded codes of 8 bits with a
    scale for each 64 of them, a quarter of the memory; not exact. Of parameters of at least 4096 elements."""
    step_in_backward: bool = False
    """Whether SGD, Adam or AdamW steps a parameter as soon as its gradient exists, which is then freed. Gradients are
    clipped by the norm of the step before; parameters stepped before a NaN appears keep their step."""
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
