"""Every knob of the control loop, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from triaccel_ray.records.plan import Precision

T = TypeVar("T")

MINIMUM_LOSS_SCALE = 1.0
"""Smallest loss scale: below it a gradient would be made smaller, against overflow in the backward pass alone."""

CurvatureMethod = Literal["fisher", "ggn", "hessian"]
LrRule = Literal["none", "sqrt", "linear", "adascale"]
AmpPrecision = Literal["fp16", "bf16"]
"""What automatic mixed precision, a baseline, computes in on a GPU: FP16 under a gradient scaler, or BF16 without."""
Compile = Literal["auto", "on", "off"]
DataPlace = Literal["device", "host"]
"""Where samples that are held whole in tensors lie while a GPU trains on them."""


def require(condition: bool, name: str, value: Any, rule: str) -> None:
    """Raises ValueError naming the option, the value found and the rule it breaks, unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name} = {value!r}: {rule}")


def require_number(name: str, value: float, rule: str, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ValueError unless `low <= value <= high`; NaN never passes, infinity only where a bound is infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and low <= value <= high, name, value, rule)


def require_integer(name: str, value: int, *, low: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `low`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer and value >= low, name, value, f"must be an integer >= {low}")


def require_flag(name: str, value: bool) -> None:
    """Raises ValueError unless `value` is True or False."""
    require(isinstance(value, bool), name, value, "must be True or False")


def require_instance(name: str, value: T, kind: type[T]) -> T:
    """Returns `value` if it is a `kind`.

    Raises:
        TypeError: it is something else; the message shows how a mapping is given instead.
    """
    if not isinstance(value, kind):
        way_out = f"; write {kind.__name__}(**{name})" if isinstance(value, dict) else ""
        raise TypeError(f"{name} = {value!r}: must be a {kind.__name__}, not a {type(value).__name__}{way_out}")
    return value


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Rules 1 and 2: which precision each layer computes in (Tri-Accel, section 3.1)."""

    enabled: bool = True
    """False: every layer stays at `initial`, except when FP16 overflows for good."""
    initial: Precision = Precision.BF16
    """Precision before any statistic exists, and of every layer when not enabled."""
    initial_layers: Mapping[str, Precision] = field(default_factory=dict)
    """Layer name -> its own precision before any statistic, in place of `initial`."""
    tau_low: float = 1e-7
    """Gradient variance below which a layer computes in FP16; >= 0."""
    tau_high: float = math.inf
    """Gradient variance from which a layer computes in FP32; > tau_low. Infinite: none does for its variance. FP32
    takes time and memory, and was worth neither where we looked; a search on your own task may find otherwise."""
    offer_useless: bool = False
    """Whether layers may compute in a precision that gains nothing: one that the device merely emulates (FP16 on most
    CPUs, at a tenth of FP32's speed), or FP16 where compiled code is as fast in BF16."""
    beta: float = 0.9
    """Smoothing of the variance, in [0, 1). The paper gives none; 0.9 averages over about 10 steps, well inside one
    control interval, so that a tick sees the interval it ends and not the ones before."""
    dwell_ticks: int = 2
    """Ticks a layer keeps a precision at least, unless curvature moves it; >= 0."""
    patience_ticks: int = 2
    """Consecutive ticks that must ask for a lower precision before a layer is demoted; >= 1. Promotion needs one."""
    overflow_bar_ticks: int = 20
    """Ticks during which a layer stays out of FP16 after most steps of an interval overflowed in it although the loss
    scale stood at its minimum; >= 1."""

    def __post_init__(self) -> None:
        require_flag("precision enabled", self.enabled)
        require_flag("offer_useless", self.offer_useless)
        for level in (self.initial, *self.initial_layers.values()):
            require(isinstance(level, Precision), "initial", level, "must be a Precision")
        require_number("tau_low", self.tau_low, "must be a number >= 0", low=0.0)
        require(not math.isinf(self.tau_low), "tau_low", self.tau_low, "must be finite")
        require_number("tau_high", self.tau_high, "must be a number >= 0", low=0.0)
        require(
            self.tau_low < self.tau_high,
            "tau_low, tau_high",
            (self.tau_low, self.tau_high),
            "tau_low must be smaller than tau_high; exchange them. To keep one precision: --method engine-amp, or "
            "PrecisionConfig(enabled=False)",
        )
        require_number("beta", self.beta, "must lie in [0, 1)", low=0.0, high=math.nextafter(1.0, 0.0))
        require_integer("dwell_ticks", self.dwell_ticks, low=0)
        require_integer("patience_ticks", self.patience_ticks, low=1)
        require_integer("overflow_bar_ticks", self.overflow_bar_ticks, low=1)


@dataclass(frozen=True, kw_only=True)
class CurvatureConfig:
    """Rules 3 to 5: eigenvalues, the learning rates that follow them, and promotion (Tri-Accel, section 3.2)."""

    enabled: bool = True
    """False: nothing is measured, every lr scale is 1, nothing is promoted."""
    method: CurvatureMethod = "fisher"
    """`fisher` (one column a sample), `ggn` (one a sample and class) or `hessian` (the paper's power iteration)."""
    top_k: int = 5
    """Eigenvalues per layer, k; >= 1."""
    every_steps: int = 200
    """T_curv: optimizer steps between measurements; >= 1."""
    num_samples: int = 32
    """b_curv: training samples a measurement uses; >= 2."""
    alpha: float = 0.02
    """Strength of the lr scaling, >= 0; 0 switches it off. The paper gives none; with eigenvalues of 5 to 50 after a
    few epochs, 0.02 halves the rate of the steepest layers and leaves the flat ones alone."""
    tau_curv: float = math.inf
    """Largest eigenvalue above which a layer is held one precision higher; > 0, infinite: never."""
    smoothing: float = 0.5
    """Weight of the past in the moving average over measurements, in [0, 1): sampling noise between batches of 32 is
    larger than the error of the cheap estimates. 0: each measurement acts as it is, the first one, too."""

    def __post_init__(self) -> None:
        require_flag("curvature enabled", self.enabled)
        require(
            self.method in ("fisher", "ggn", "hessian"),
            "curvature method",
            self.method,
            "must be one of fisher, ggn, hessian",
        )
        require_integer("top_k", self.top_k, low=1)
        require_integer("curvature every_steps (T_curv)", self.every_steps, low=1)
        require_integer("curvature num_samples (b_curv)", self.num_samples, low=2)
        require_number("alpha", self.alpha, "must be a finite number >= 0", low=0.0, high=1e300)
        require_number("tau_curv", self.tau_curv, "must be > 0", low=math.nextafter(0.0, 1.0))
        require_number("smoothing", self.smoothing, "must lie in [0, 1)", low=0.0, high=math.nextafter(1.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Rule 6: the elastic batch size and the learning rate that follows it (Tri-Accel, section 3.3)."""

    enabled: bool = True
    """False: the batch size stays at `start`, except while it does not fit."""
    start: int = 96
    """Batch size of the first step, and the reference of the lr rule."""
    minimum: int = 32
    """Smallest rung of the ladder."""
    maximum: int = 512
    """Largest rung of the ladder."""
    accumulate: int = 1
    """Parts in which each batch passes through the model, their gradients added up; >= 1. A batch that does not fit
    passes in more."""
    granularity: int = 32
    """Distance between rungs; the ladder is finite so that captured steps and autotuned kernels are."""
    step_up: int = 32
    """Samples added when memory use is below rho_low; a multiple of `granularity`."""
    step_down: int = 64
    """Samples removed when memory use is above rho_high; a multiple of `granularity`."""
    rho_low: float = 0.70
    """Share of the memory limit below which the batch grows; in [0, rho_high)."""
    rho_high: float = 0.90
    """Share of the memory limit above which the batch shrinks; in (rho_low, 1]."""
    dwell_ticks: int = 1
    """Ticks a batch size is kept before it grows again; >= 0. Shrinking never waits."""
    cap_ticks: int = 20
    """Ticks during which the ladder stays capped below a size that ran out of memory; >= 1."""
    lr_rule: LrRule = "sqrt"
    """How the lr follows the batch size B from B_0 = `start`: not at all, sqrt(B/B_0), B/B_0, or AdaScale's gain."""
    bound_by_noise_scale: bool = False
    """Whether the batch also stops growing at `noise_share` of the gradient noise scale tr(Cov)/|g|^2 (McCandlish et
    al. 2018), which rises as training goes on. The batch does not grow before measurements have half of the moving
    average's weight: with smoothing 0.8, four."""
    noise_share: float = 1.0
    """B / B_noise up to which the batch may grow; > 0. Steps of batch B need 1 + B / B_noise times the samples that the
    smallest batch needs to get as far (ibid., section 2)."""
    noise_smoothing: float = 0.8
    """Weight of the past in the moving average of |g|^2 / tr(Cov), in [0, 1): from 32 samples, one estimate of |g|^2 in
    four lay below zero (ResNet-18 on CIFAR-10, 62 measurements of two runs)."""

    def around(self, size: int, *, accumulate: int = 1) -> Self:
        """Returns the same with `size` as the first batch, on a ladder from half of it to eight times as much.

        The smallest batch holds two samples, or one for each of `accumulate` parts.

        Raises:
            ValueError: `size` is no whole number of at least 1, or smaller than `accumulate`.
        """
        require_integer("batch start", size, low=1)
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
        require_flag("batch enabled", self.enabled)
        require_flag("bound_by_noise_scale", self.bound_by_noise_scale)
        require_integer("granularity", self.granularity, low=1)
        require_integer("batch minimum", self.minimum, low=1)
        require_integer("batch start", self.start, low=1)
        require_integer("batch maximum", self.maximum, low=1)
        require_integer("accumulate", self.accumulate, low=1)
        require(
            self.minimum <= self.start <= self.maximum,
            "batch minimum, start, maximum",
            (self.minimum, self.start, self.maximum),
            "must be in ascending order",
        )
        require(
            self.accumulate <= self.minimum,
            "accumulate",
            self.accumulate,
            f"must be at most the smallest batch, {self.minimum}: each part holds at least one sample",
        )
        for name, value in (("step_up", self.step_up), ("step_down", self.step_down)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            require(
                is_number and value % self.granularity == 0 and value >= 0,
                f"batch {name}",
                value,
                f"must be a multiple of granularity = {self.granularity}",
            )
        require(
            (self.start - self.minimum) % self.granularity == 0,
            "batch minimum, start",
            (self.minimum, self.start),
            f"must be a multiple of granularity = {self.granularity} apart",
        )
        require_number("rho_low", self.rho_low, "must lie in [0, 1]", low=0.0, high=1.0)
        require_number("rho_high", self.rho_high, "must lie in [0, 1]", low=0.0, high=1.0)
        require(
            self.rho_low < self.rho_high,
            "rho_low, rho_high",
            (self.rho_low, self.rho_high),
            "rho_low must be smaller than rho_high; exchange them. To keep one size: --method dynamic-precision, or "
            "BatchConfig(enabled=False)",
        )
        require_integer("batch step_up", self.step_up, low=1)
        require_integer("batch step_down", self.step_down, low=1)
        require_integer("batch dwell_ticks", self.dwell_ticks, low=0)
        require_integer("batch cap_ticks", self.cap_ticks, low=1)
        require_number(
            "noise_share", self.noise_share, "must be a finite number > 0", low=math.nextafter(0.0, 1.0), high=1e300
        )
        require_number(
            "noise_smoothing", self.noise_smoothing, "must lie in [0, 1)", low=0.0, high=math.nextafter(1.0, 0.0)
        )
        require(
            self.lr_rule in ("none", "sqrt", "linear", "adascale"),
            "lr_rule",
            self.lr_rule,
            "must be one of none, sqrt, linear, adascale",
        )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """The one dynamic loss scale, in use while any layer computes in FP16 (Micikevicius et al. 2018)."""

    initial: float = 2.0**16
    """Scale of the first step; a power of two costs no rounding."""
    growth_interval: int = 2000
    """Finite steps in a row after which the scale doubles; it halves at every overflow."""

    def __post_init__(self) -> None:
        require_number("loss scale initial", self.initial, "must lie in [1, 2**24]", low=1.0, high=2.0**24)
        require_integer("loss scale growth_interval", self.growth_interval, low=1)


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How steps are run on a GPU; what they compute does not depend on it, up to rounding."""

    capture: bool = True
    """Whether steps are captured as CUDA graphs. Python code in the model and the loss then runs at captures only:
    switch it off for a model whose forward pass depends on Python state that changes."""
    compile: Compile = "auto"
    """`auto`: on a GPU `torch.compile` compiles a model without fused norms: its repeated blocks, or the whole of it.
    `on`: the whole of any model, in place of fused norms, on a CPU, too. `off`: none."""
    fuse: bool = True
    """Whether batch normalisation, the sum and the activation that follow it become one kernel."""
    recompute: bool = True
    """Whether a convolution that alone reads such a kernel's output has it computed again in the backward pass, where
    keeping it would take memory. Without effect where nothing is fused."""
    autotune: bool = False
    """Whether cuDNN times its algorithms for every new batch size and precision: 1 to 4 seconds each, for steps that
    are 2 to 7% faster. Pays in runs of minutes at one batch size."""
    data_on: DataPlace = "device"
    """`device`: training samples held in tensors lie on the device. `host`: in pinned memory of the host, out of which
    a GPU reads each batch ("zero-copy"): less memory of the device, and for small samples hardly more time."""

    def __post_init__(self) -> None:
        require(self.compile in ("auto", "on", "off"), "compile", self.compile, "must be auto, on or off")
        for name in ("capture", "fuse", "recompute", "autotune"):
            require_flag(name, getattr(self, name))
        require(self.data_on in ("device", "host"), "data_on", self.data_on, "must be device or host")


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """The whole control loop: its rules' thresholds and its clock (Tri-Accel, section 3.4)."""

    every_steps: int = 50
    """T_ctrl: optimizer steps between ticks; >= 1."""
    do_no_harm: bool = True
    """Whether a lower precision, or a larger batch, is undone where steps then take over 25 % longer per sample. Time
    differs from run to run: without this rule two equal runs on a CPU decide alike."""
    control_share: float = 0.02
    """Share of the training time that control may take on a GPU, in (0, 1]: a measurement of curvature, or a lower
    precision, waits until what they have taken so far is within it. Without effect where `do_no_harm` is off."""
    clip_norm: float | None = None
    """Global L2 norm to which larger gradients are scaled down; > 0, None: no bound."""
    max_skipped_steps: int = 50
    """Steps in a row with a NaN or infinite gradient after which training ends; >= 1. Such steps are never made."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        require_integer("every_steps (T_ctrl)", self.every_steps, low=1)
        require_flag("do_no_harm", self.do_no_harm)
        require_number(
            "control_share", self.control_share, "must lie in (0, 1]", low=math.nextafter(0.0, 1.0), high=1.0
        )
        require_integer("max_skipped_steps", self.max_skipped_steps, low=1)
        if self.clip_norm is not None:
            require_number("clip_norm", self.clip_norm, "must be > 0", low=math.nextafter(0.0, 1.0))
        require_instance("precision", self.precision, PrecisionConfig)
        require_instance("curvature", self.curvature, CurvatureConfig)
        require_instance("batch", self.batch, BatchConfig)
        require_instance("loss_scale", self.loss_scale, LossScaleConfig)
        require_instance("execution", self.execution, ExecutionConfig)
        needs_noise = self.batch.lr_rule == "adascale" or self.batch.bound_by_noise_scale
        require(
            not needs_noise or (self.curvature.enabled and self.curvature.method == "fisher"),
            "lr_rule, bound_by_noise_scale (noise_bound)",
            (self.batch.lr_rule, self.batch.bound_by_noise_scale),
            "need the per-sample gradients that curvature method 'fisher' measures; use it, with curvature on",
        )
