"""Everything the control loop remembers between ticks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.plan import Plan, Precision, Reason
from triaccel_ray.records.signals import NoiseSignal


@dataclass(frozen=True, kw_only=True)
class LayerState:
    """What is remembered of one layer."""

    by_variance: Precision
    """Precision that the variance rule has settled on, before curvature promotes it."""
    ticks_since_change: int = 0
    """Ticks since the precision in force last changed."""
    lower_votes: int = 0
    """Consecutive ticks whose variance asked for a lower precision."""
    eigenvalues: tuple[float, ...] | None = None
    """Moving average over measurements, descending; None before the first."""
    measured_once: bool = False
    """Whether the eigenvalues are those of a single measurement."""
    held: bool = False
    """Whether curvature holds the layer one precision higher."""
    fp16_bar_ticks: int = 0
    """Ticks during which the layer still stays out of FP16 after it overflowed there for good."""
    too_slow: Precision | None = None
    """The precision in which steps were last measured to be slower than in the one above."""
    slow_bar_ticks: int = 0
    """Ticks during which the layer still stays above `too_slow`."""
    times_slow: int = 0
    """How often a lower precision of the layer was undone for its time."""

    def a_tick_later(self) -> LayerState:
        """Returns the same with bars that end one tick sooner."""
        fp16, slow = max(self.fp16_bar_ticks - 1, 0), max(self.slow_bar_ticks - 1, 0)
        return replace(self, fp16_bar_ticks=fp16, slow_bar_ticks=slow)


@dataclass(frozen=True, kw_only=True)
class BatchState:
    """What is remembered of the batch size."""

    ticks_since_change: int = 0
    """Ticks since the batch size last changed."""
    cap: int | None = None
    """Largest size allowed after a failure; None: the ladder's own maximum."""
    cap_ticks_left: int = 0
    """Ticks until the cap is lifted."""
    noise: NoiseSignal | None = None
    """Moving average over measurements, in units of each one's variance; None before the first."""
    times_slow: int = 0
    """How often a larger batch was undone for its time."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of plan that is to show whether it pays."""

    ms_per_sample: float
    """Milliseconds of a step per sample before it."""
    precision: Mapping[str, Precision] = field(default_factory=dict)
    """Layers that it lowered -> their precision before."""
    batch_size: int | None = None
    """The batch size before; None where it did not grow."""
    num_slower: int = 0
    """Intervals since that were slower."""
    num_waited: int = 0
    """Ticks since without a step time."""


@dataclass(frozen=True, kw_only=True)
class ThroughputState:
    """What is remembered of the time that steps take."""

    intervals: tuple[float, ...] = ()
    """Milliseconds of a step per sample, medians of the last intervals under the plan in force."""
    change: Change | None = None
    """The change not yet judged."""


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """The whole memory of the loop; JSON-serialisable, part of every checkpoint."""

    layers: Mapping[str, LayerState]
    batch: BatchState = field(default_factory=BatchState)
    throughput: ThroughputState = field(default_factory=ThroughputState)
    step: int = 0
    """Optimizer steps done at the last tick."""
    num_skipped: int = 0
    """Of these, skipped for a non-finite gradient."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a tick decided: the plan, what to remember, and why."""

    plan: Plan
    state: ControlState
    reasons: tuple[Reason, ...] = ()


def initial_decision(config: ControlConfig, layers: Iterable[tuple[str, tuple[Precision, ...]]]) -> Decision:
    """Returns the plan and state of the first step, from the layers' names and supported precisions."""
    own, shared = config.precision.initial_layers, config.precision.initial
    precision = {name: nearest_supported(own.get(name, shared), supported) for name, supported in layers}
    plan = Plan(
        batch_size=config.batch.start,
        num_micro_batches=config.batch.accumulate,
        precision=precision,
        lr_scale=dict.fromkeys(precision, 1.0),
    )
    # A fresh layer has kept its precision long enough: the first statistic may act at the first tick.
    state = LayerState(by_variance=config.precision.initial, ticks_since_change=config.precision.dwell_ticks)
    batch = BatchState(ticks_since_change=config.batch.dwell_ticks)
    return Decision(
        plan=plan,
        state=ControlState(
            layers={name: replace(state, by_variance=level) for name, level in precision.items()}, batch=batch
        ),
    )


def nearest_supported(wanted: Precision, supported: tuple[Precision, ...]) -> Precision:
    """Returns the lowest supported precision that is not below `wanted`; FP32 when there is none."""
    return min(
        (level for level in supported if level.rank >= wanted.rank),
        key=lambda level: level.rank,
        default=Precision.FP32,
    )
