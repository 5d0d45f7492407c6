"""Rules about step times: a change that slows steps down is undone, and a captured batch grows only to save time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.plan import FaultKind, Plan, Precision, Reason, ReasonCode, compiles_anew
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import BatchState, Change, LayerState, Stored, ThroughputState, Timing

_TOLERANCE = 0.25
"""Relative increase of the time per sample above which a plan is slower: more than the noise of medians on a busy
machine."""
_CAPTURED_TOLERANCE = 0.03
"""The same for a lower precision or memory plan in captured steps, whose medians vary by less than 1 %."""
EFFICIENT_SHARE = 0.97
"""A batch size is efficient if its samples per second reach this share of the best size's (AccUDNN)."""
_EXPECTED_SHARE = 0.2
"""Saving expected before a second batch size is timed: a share of what the largest size would save if step times did
not depend on size."""
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

    It compares step times per sample: the median of the last intervals under the old plan with the better of two under
    the new one. A batch that has grown before is compared with the fastest of its sizes, so that small slowdowns do not
    add up. Promotions serve accuracy and smaller batches save memory: neither is judged. Layers whose lower precision
    was refused leave the change.
    """
    state, change = _with_spent(state, observation.adapting_ms), state.change
    failed = observation.apply_fault is not None
    if any(fault.kind is FaultKind.PLAN_REPLACED for fault in observation.faults):
        state, change = _without_change(state), None
    if change is not None and (refused := observation.refused_layers):
        change = _without_layers(change, refused)
        state = _without_change(state) if change is None else replace(state, change=change)
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
    tolerance = _TOLERANCE
    if _is_captured(observation):
        tolerance = 0.0 if is_growth else _CAPTURED_TOLERANCE
    before = max(change.ms_per_sample, 1e-9)  # coarse clocks of a CPU may read 0
    slowdown = ms_per_sample / before * (state.slowdown if is_growth else 1.0)
    is_slower = slowdown > 1.0 + tolerance
    if is_slower and change.num_slower + 1 < _JUDGING_TICKS:
        return Judgement(state=replace(state, change=replace(change, num_slower=change.num_slower + 1)))
    state = _without_change(state)
    if is_growth or (change.stored and change.stored.num_micro_batches != observation.plan.num_micro_batches):
        state = replace(state, growth_ms=observation.adapting_ms - change.adapting_ms)
    if not is_slower:
        slowdown = max(slowdown, 1.0) if is_growth else state.slowdown
        return Judgement(state=replace(state, intervals=(ms_per_sample,), slowdown=slowdown))
    state = replace(state, other_timing=Timing(batch_size=observation.plan.batch_size, ms_per_sample=ms_per_sample))
    return Judgement(state=state, undo=change, reasons=(_reason(observation.plan, change, ms_per_sample, slowdown),))


def size_that_pays(
    config: ControlConfig, observation: Observation, state: ThroughputState, sizes: Sequence[int]
) -> int | Reason:
    """Returns which of `sizes` the batch should grow to; a reason if none of them saves more time than it costs.

    `sizes` are those that fit, in ascending order, all above the current one. A step's time is taken as affine in the
    batch size, through the current size and another one. If the current size is not efficient (`EFFICIENT_SHARE`), the
    smallest efficient one is chosen, or the largest that fits. Until a second size is timed, at most twice the current
    one is chosen, and `_EXPECTED_SHARE` estimates what is saved. The saving is that on the samples left, the cost is
    `expected_cost_ms`.

    Where no steps are captured, as on a CPU, new sizes cost nothing. The first of `sizes` is chosen, once steps under
    the current plan are timed.
    """
    if not config.revert_slowdowns:
        return sizes[0]
    if not state.intervals:
        return batch_reason(ReasonCode.HELD_UNJUDGED, "waits: no step time under this plan yet")
    if not _is_captured(observation):
        return sizes[0]
    size, ms_per_sample = observation.plan.batch_size, median(state.intervals)
    timing, largest = state.other_timing, max(config.batch.maximum, sizes[-1])
    if timing is None or timing.batch_size == size:
        chosen, expected = max((each for each in sizes if each <= 2 * size), default=sizes[0]), "is expected to"
        potential = saved_share = _EXPECTED_SHARE * (1.0 - size / largest)
    else:
        fixed_ms = _fixed_ms(Timing(batch_size=size, ms_per_sample=ms_per_sample), timing)
        shares = {each: (fixed_ms / size - fixed_ms / each) / ms_per_sample for each in (*sizes, largest)}
        potential, expected = shares[largest], "would"
        chosen = min(efficient_size({each: 1.0 - share for each, share in shares.items()}), sizes[-1])
        saved_share = shares[chosen]
    if potential <= 1.0 - EFFICIENT_SHARE:
        text = f"the largest batch would make steps only {potential:.1%} faster a sample"
        return batch_reason(ReasonCode.HELD_COST, text, potential, 1.0 - EFFICIENT_SHARE)
    saved_ms = saved_share * observation.samples_left * ms_per_sample
    cost_ms = expected_cost_ms(observation, state, has_new_sizes=True)
    if saved_ms > cost_ms:
        return chosen
    text = f"a batch of {chosen} {expected} save {saved_ms / 1e3:.2g} s, and a new size costs {cost_ms / 1e3:.2g} s"
    return batch_reason(ReasonCode.HELD_COST, text, saved_ms, cost_ms)


def expected_cost_ms(
    observation: Observation, state: ThroughputState, *, has_new_sizes: bool, compiles: bool = False
) -> float:
    """Returns what a new plan is expected to cost in milliseconds.

    For a new size of batch or micro-batch, this is what the last one cost. Otherwise, and before the first, it is the
    most that one interval has spent on new plans. An epoch's short last batch costs about as much as a new size. The
    first plan does not count, because it also loads libraries, unless new sizes may recompile the model.

    If it `compiles` regions for another storage, this is what the last such plan cost, or the most of any interval.
    """
    if compiles:
        return max(state.first_ms, state.later_ms) if state.compile_ms is None else state.compile_ms
    if has_new_sizes and state.growth_ms is not None:
        return state.growth_ms
    is_known = state.later_ms > 0.0 and not (has_new_sizes and observation.is_compiled)
    return state.later_ms if is_known else max(state.first_ms, state.later_ms)


def efficient_size(ms_per_sample: Mapping[int, float]) -> int:
    """Returns the smallest batch size whose samples per second reach `EFFICIENT_SHARE` of the best of these sizes."""
    shortest = min(ms_per_sample.values())
    return min(size for size, ms in ms_per_sample.items() if shortest >= EFFICIENT_SHARE * ms)


def bar_undone(
    config: ControlConfig, change: Change, layers: Mapping[str, LayerState], batch: BatchState
) -> tuple[dict[str, LayerState], BatchState]:
    """Returns the states after a change was undone, which bar it for a number of ticks that doubles each time."""
    barred = dict(layers)
    for name, before in change.precision.items():
        layer = barred[name]
        barred[name] = replace(
            layer,
            too_slow=list(Precision)[before.rank - 1],  # of several steps down, the first may be to blame
            slow_bar_ticks=config.precision.overflow_bar_ticks * 2**layer.times_slow,
            times_slow=layer.times_slow + 1,
        )
    if change.batch_size is not None:
        ticks = config.batch.oom_cooldown_ticks * 2**batch.times_slow
        batch = replace(batch, cap=change.batch_size, cap_ticks_left=ticks, times_slow=batch.times_slow + 1)
    return barred, batch


def watch(
    state: ThroughputState, observation: Observation, new: Plan, *, is_undo: bool, is_stored_faster: bool
) -> ThroughputState:
    """Returns the state after `new` replaces the plan, with the change and its reference if it is to be judged.

    With `is_undo` a change is undone. With `is_stored_faster` the memory plan was changed to save time.
    """
    old = observation.plan
    if new.steps_as(old):
        return state
    before = median(state.intervals) if state.intervals else None
    timings = [state.other_timing]
    if before is not None:
        timings.append(Timing(batch_size=old.batch_size, ms_per_sample=before))
    usable = [each for each in timings if each is not None and each.batch_size != new.batch_size]
    slowdown = state.slowdown if is_undo or new.batch_size >= old.batch_size else 1.0
    if new.precision != old.precision or Stored.under(new) != Stored.under(old):
        usable, slowdown = [], 1.0
    # The farthest: noise counts least.
    other = max(usable, key=lambda timing: abs(timing.batch_size - new.batch_size), default=None)
    is_compiling = compiles_anew(new.storage, old.storage)
    state = replace(_without_change(state), other_timing=other, slowdown=slowdown, is_compiling=is_compiling)
    lowered = {name: level for name, level in old.precision.items() if new.precision[name].rank < level.rank}
    grown = new.batch_size > old.batch_size
    promoted = any(new.precision[name].rank > level.rank for name, level in old.precision.items())
    if promoted or not (lowered or grown or is_stored_faster) or before is None:
        return state
    change = Change(
        ms_per_sample=before,
        precision=lowered,
        batch_size=old.batch_size if grown else None,
        stored=Stored.under(old) if is_stored_faster else None,
        adapting_ms=observation.adapting_ms,
    )
    return replace(state, change=change)


def _with_spent(state: ThroughputState, adapting_ms: float) -> ThroughputState:
    """Returns the state after a tick by which this time was spent on new plans since the run began."""
    spent_ms = adapting_ms - state.adapting_ms
    if spent_ms <= 0:
        return state
    if not state.adapting_ms:
        return replace(state, adapting_ms=adapting_ms, first_ms=spent_ms)
    if state.is_compiling:
        return replace(state, adapting_ms=adapting_ms, compile_ms=spent_ms, is_compiling=False)
    return replace(state, adapting_ms=adapting_ms, later_ms=max(spent_ms, state.later_ms))


def _without_change(state: ThroughputState) -> ThroughputState:
    return replace(state, intervals=(), change=None)


def _fixed_ms(one: Timing, other: Timing) -> float:
    """Returns the part of a step's milliseconds that does not depend on its number of samples."""
    ms, other_ms = (timing.batch_size * timing.ms_per_sample for timing in (one, other))
    rate = max((ms - other_ms) / (one.batch_size - other.batch_size), 0.0)  # no step is shorter for more samples
    return ms - rate * one.batch_size


def _is_captured(observation: Observation) -> bool:
    """Returns whether steps are captured, so that new plans cost time and step times vary little."""
    return observation.adapting_ms > 0


def _without_layers(change: Change, refused: Collection[str]) -> Change | None:
    """Returns the change without these layers; None if nothing is left."""
    lowered = {name: level for name, level in change.precision.items() if name not in refused}
    is_nothing = not lowered and change.batch_size is None and change.stored is None
    return None if is_nothing else replace(change, precision=lowered)


def _is_in_force(change: Change, plan: Plan) -> bool:
    is_lowered = all(plan.precision[name].rank < level.rank for name, level in change.precision.items())
    is_stored = change.stored is None or change.stored != Stored.under(plan)
    return is_lowered and is_stored and (change.batch_size is None or plan.batch_size > change.batch_size)


def _reason(plan: Plan, change: Change, ms_per_sample: float, slowdown: float) -> Reason:
    lowered = sorted(change.precision)
    parts = []
    if lowered:
        names = ", ".join(lowered[:3])
        if len(lowered) > 3:
            names += f" and {len(lowered) - 3} more"
        parts.append(f"the lower precision of {names}")
    if change.batch_size is not None:
        parts.append(f"a batch of {plan.batch_size} in place of {change.batch_size}")
    if change.stored is not None:
        parts.append("the new memory plan")
    before = ms_per_sample / slowdown
    text = f"{' and '.join(parts)} is slower, {ms_per_sample:.3g} ms a sample against at best {before:.3g}: undone"
    return Reason(code=ReasonCode.SLOWER, subject="throughput", text=text, value=ms_per_sample, threshold=before)


def batch_reason(code: ReasonCode, text: str, value: float | None = None, threshold: float | None = None) -> Reason:
    """Returns a reason of the batch rule."""
    return Reason(code=code, subject="batch", text=text, value=value, threshold=threshold)


def barred_precision(state: LayerState) -> Precision | None:
    """Returns the precision that a layer must stay above because it was slower there, or None."""
    return state.too_slow if state.slow_bar_ticks else None
