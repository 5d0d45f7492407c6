"""The rule that reverts slowdowns: a lower precision or a larger batch that slows steps down is undone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.plan import Plan, Precision, Reason, ReasonCode
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import BatchState, Change, LayerState, ThroughputState

TOLERANCE = 0.25
"""A plan counts as slower if its time per sample is longer by more than this share, which exceeds the noise of medians
on a machine with other load."""
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
        state, change = ThroughputState(), None  # the plan with this change could not be applied
    if not config.revert_slowdowns or failed or observation.step_ms is None:
        if change is None or failed:
            return Judgement(state=state)
        if change.num_waited >= _PATIENCE_TICKS:
            return Judgement(state=ThroughputState())
        return Judgement(state=replace(state, change=replace(change, num_waited=change.num_waited + 1)))
    ms_per_sample = observation.step_ms / observation.plan.batch_size
    if change is None:
        return Judgement(state=replace(state, intervals=(*state.intervals, ms_per_sample)[-_NUM_INTERVALS:]))
    if ms_per_sample <= change.ms_per_sample * (1.0 + TOLERANCE):
        return Judgement(state=ThroughputState(intervals=(ms_per_sample,)))
    if change.num_slower + 1 < _JUDGING_TICKS:
        return Judgement(state=replace(state, change=replace(change, num_slower=change.num_slower + 1)))
    return Judgement(state=ThroughputState(), undo=change, reasons=(_reason(observation.plan, change, ms_per_sample),))


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


def watch(state: ThroughputState, old: Plan, new: Plan) -> ThroughputState:
    """Returns the state after `new` replaces `old`, with the change and its reference time if it is to be judged."""
    if new.steps_as(old):
        return state
    lowered = {name: level for name, level in old.precision.items() if new.precision[name].rank < level.rank}
    grown = new.batch_size > old.batch_size
    promoted = any(new.precision[name].rank > level.rank for name, level in old.precision.items())
    if promoted or not (lowered or grown) or not state.intervals:
        return ThroughputState()
    change = Change(
        ms_per_sample=median(state.intervals), precision=lowered, batch_size=old.batch_size if grown else None
    )
    return ThroughputState(change=change)


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
