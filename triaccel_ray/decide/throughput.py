"""Rules about step times: a change that slows steps down is undone, and a batch grows only where that saves time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.plan import Plan, Precision, Reason, ReasonCode
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import BatchState, Change, LayerState, ThroughputState, Timing

TOLERANCE = 0.25
"""A plan counts as slower if its time per sample is longer by more than this share, which exceeds the noise of medians
on a machine with other load."""
GPU_TOLERANCE = 0.03
"""The same for a lower precision on a GPU, whose medians vary by less than 1 %. A larger batch must not be slower."""
EFFICIENT_SHARE = 0.97
"""A batch size is efficient if its samples per second reach this share of the largest size's (AccUDNN)."""
_EXPECTED_SHARE = 0.2
"""What a larger batch is expected to save before any is timed, as a share of the most it can: all that a step takes
whatever its size. On an H200, the largest batch saved 0.5 of it with ResNet-18, and 0.2 with GPT and ViT."""
_JUDGING_TICKS = 2
"""Consecutive intervals that must be slower before a change is undone."""
_PATIENCE_TICKS = 5
"""Ticks for which a change waits for a step time before it is kept without being judged."""
_NUM_INTERVALS = 5
"""Last intervals under one plan, whose median is the reference for the next plan."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Verdict of the rule at a tick."""

    state: ThroughputState
    undo: Change | None = None
    """The change to be undone now."""
    reasons: tuple[Reason, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether a change is not judged yet: meanwhile no precision is lowered for variance, and no batch grows."""
        return self.state.change is not None


def judge(config: ControlConfig, observation: Observation, state: ThroughputState) -> Judgement:
    """Returns whether the last change is kept, undone, or waits for another interval.

    It compares median step times per sample: the median of the last intervals under the old plan, and the better of
    two intervals under the new one. Promotions serve accuracy and smaller batches save memory: neither is judged.
    """
    change = state.change
    failed = observation.apply_fault is not None
    if change is not None and not (failed or _is_in_force(change, observation.plan)):
        state, change = _without_change(state), None  # the plan with this change could not be applied
    if not config.revert_slowdowns or failed or observation.step_ms is None:
        if change is None or failed:
            return Judgement(state=state)
        if change.num_waited >= _PATIENCE_TICKS:
            return Judgement(state=_without_change(state))
        return Judgement(state=replace(state, change=replace(change, num_waited=change.num_waited + 1)))
    ms_per_sample = observation.step_ms / observation.plan.batch_size
    if change is None:
        return Judgement(state=replace(state, intervals=(*state.intervals, ms_per_sample)[-_NUM_INTERVALS:]))
    is_growth = change.batch_size is not None
    tolerance = TOLERANCE
    if observation.adapting_ms:  # on a GPU
        tolerance = 0.0 if is_growth else GPU_TOLERANCE
    is_slower = ms_per_sample > change.ms_per_sample * (1.0 + tolerance)
    if is_slower and change.num_slower + 1 < _JUDGING_TICKS:
        return Judgement(state=replace(state, change=replace(change, num_slower=change.num_slower + 1)))
    state = _without_change(state)
    if is_growth:
        state = replace(state, growth_ms=observation.adapting_ms - change.adapting_ms)
    if not is_slower:
        return Judgement(state=replace(state, intervals=(ms_per_sample,)))
    state = replace(state, other=Timing(batch_size=observation.plan.batch_size, ms_per_sample=ms_per_sample))
    return Judgement(state=state, undo=change, reasons=(_reason(observation.plan, change, ms_per_sample),))


def size_that_pays(
    config: ControlConfig, observation: Observation, state: ThroughputState, sizes: Sequence[int]
) -> int | Reason:
    """Returns which of `sizes` the batch should grow to; a reason if none of them saves more time than it costs.

    `sizes` are those that fit, in ascending order, all above the current one. A step's time is taken as affine in the
    batch size, through the current size and the one timed before. The choice is the smallest size whose samples per
    second reach `EFFICIENT_SHARE` of the largest size's. It pays if it saves more time on the samples that are left
    than the last growth took. If their number is unknown, as many are assumed as have been trained.

    If only one size is timed, at most twice that is tried: `_EXPECTED_SHARE` of what the largest size could save must
    exceed the cost of all new plans so far. Where new sizes cost nothing, as on a CPU, the first of `sizes` pays.
    """
    if not (config.revert_slowdowns and observation.adapting_ms and state.intervals):
        return sizes[0]
    size, ms_per_sample = observation.plan.batch_size, median(state.intervals)
    cost_ms = observation.adapting_ms if state.growth_ms is None else state.growth_ms
    if state.other is None:
        chosen = max((each for each in sizes if each <= 2 * size), default=sizes[0])
        saved_share = _EXPECTED_SHARE * (1.0 - size / sizes[-1])
    else:
        fixed_ms, rate = _affine(Timing(batch_size=size, ms_per_sample=ms_per_sample), state.other)
        fastest = fixed_ms / sizes[-1] + rate
        if fastest >= EFFICIENT_SHARE * ms_per_sample:
            text = f"a larger batch would make steps less than {1 - EFFICIENT_SHARE:.0%} faster a sample"
            return Reason(code=ReasonCode.HELD_COST, subject="batch", text=text, value=ms_per_sample, threshold=fastest)
        chosen = next(each for each in sizes if fastest >= EFFICIENT_SHARE * (fixed_ms / each + rate))
        saved_share = 1.0 - (fixed_ms / chosen + rate) / ms_per_sample
    num_samples = observation.step * size if observation.samples_left is None else observation.samples_left
    saved_ms = saved_share * num_samples * ms_per_sample
    if saved_ms > cost_ms:
        return chosen
    text = f"a batch of {chosen} would save {saved_ms / 1e3:.2g} s, and cost {cost_ms / 1e3:.2g} s"
    return Reason(code=ReasonCode.HELD_COST, subject="batch", text=text, value=saved_ms, threshold=cost_ms)


def bar_undone(
    config: ControlConfig, change: Change, layers: Mapping[str, LayerState], batch: BatchState
) -> tuple[dict[str, LayerState], BatchState]:
    """Returns the states after a change was undone, which bar it for a number of ticks that doubles each time."""
    barred = dict(layers)
    for name, before in change.precision.items():
        layer = barred[name]
        barred[name] = replace(
            layer,
            too_slow=_next_lower(before),
            slow_bar_ticks=config.precision.overflow_bar_ticks * 2**layer.times_slow,
            times_slow=layer.times_slow + 1,
        )
    if change.batch_size is not None:
        ticks = config.batch.oom_cooldown_ticks * 2**batch.times_slow
        batch = replace(batch, cap=change.batch_size, cap_ticks_left=ticks, times_slow=batch.times_slow + 1)
    return barred, batch


def watch(state: ThroughputState, observation: Observation, new: Plan) -> ThroughputState:
    """Returns the state after `new` replaces the plan, with the change and its reference if it is to be judged."""
    old = observation.plan
    if new.steps_as(old):
        return state
    before = median(state.intervals) if state.intervals else None
    other = state.other if before is None else Timing(batch_size=old.batch_size, ms_per_sample=before)
    is_comparable = new.precision == old.precision and new.num_micro_batches == old.num_micro_batches
    if not is_comparable or (other is not None and other.batch_size == new.batch_size):
        other = None
    state = replace(_without_change(state), other=other)
    lowered = {name: level for name, level in old.precision.items() if new.precision[name].rank < level.rank}
    grown = new.batch_size > old.batch_size
    promoted = any(new.precision[name].rank > level.rank for name, level in old.precision.items())
    if promoted or not (lowered or grown) or before is None:
        return state
    change = Change(
        ms_per_sample=before,
        precision=lowered,
        batch_size=old.batch_size if grown else None,
        adapting_ms=observation.adapting_ms,
    )
    return replace(state, change=change)


def _without_change(state: ThroughputState) -> ThroughputState:
    return replace(state, intervals=(), change=None)


def _affine(one: Timing, other: Timing) -> tuple[float, float]:
    """Returns the milliseconds of a step that do not depend on its number of samples, and those of each sample."""
    ms, other_ms = (timing.batch_size * timing.ms_per_sample for timing in (one, other))
    rate = (ms - other_ms) / (one.batch_size - other.batch_size)
    return ms - rate * one.batch_size, rate


def _is_in_force(change: Change, plan: Plan) -> bool:
    is_lowered = all(plan.precision[name].rank < level.rank for name, level in change.precision.items())
    return is_lowered and (change.batch_size is None or plan.batch_size > change.batch_size)


def _next_lower(precision: Precision) -> Precision:
    return Precision.BF16 if precision is Precision.FP32 else Precision.FP16


def _reason(plan: Plan, change: Change, ms_per_sample: float) -> Reason:
    lowered = sorted(change.precision)
    parts = []
    if lowered:
        names = ", ".join(lowered[:3])
        if len(lowered) > 3:
            names += f" and {len(lowered) - 3} more"
        parts.append(f"the lower precision of {names}")
    if change.batch_size is not None:
        parts.append(f"a batch of {plan.batch_size} in place of {change.batch_size}")
    before = change.ms_per_sample
    text = f"{' and '.join(parts)} is slower, {ms_per_sample:.3g} against {before:.3g} ms a sample: undone"
    return Reason(code=ReasonCode.SLOWER, subject="throughput", text=text, value=ms_per_sample, threshold=before)


def barred_precision(state: LayerState) -> Precision | None:
    """Returns the precision that a layer must stay above because it was slower there, or None."""
    return state.too_slow if state.slow_bar_ticks else None
