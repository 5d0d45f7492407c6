"""The memory plan in the tick: when the planner runs, which of its plans are barred, and what they were worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide.batch import GIB, memory_share
from triaccel_ray.decide.calibration import (
    budget_bytes,
    compare,
    forget_shortage,
    is_not_capturable,
    is_tight,
    measure,
    timed_pass_ms,
)
from triaccel_ray.decide.initial import storage_of_all
from triaccel_ray.decide.memory import (
    JOIN,
    OFFLOAD,
    RECOMPUTE,
    MemoryPlan,
    Prediction,
    least_plan,
    modeled_bytes,
)
from triaccel_ray.decide.planner import Planner
from triaccel_ray.decide.throughput import Judgement
from triaccel_ray.records.plan import FaultKind, Plan, Reason, ReasonCode, Storage, recomputing_all
from triaccel_ray.records.signals import Observation
from triaccel_ray.records.state import MemoryState, Stored

_MAX_TIMES_SHORT = 2
"""Number of plans in a row that may run short although predicted to fit, before no other is tried during the bar."""
_FASTER_SHARE = 0.97
"""A plan replaces the one in force if its predicted time is at most this share of the time now: medians vary by 1 %.
One that keeps everything of the undivided batch must only be no slower."""
_MAX_DOUBLINGS = 5
"""How often the ticks for which plans are barred double at most."""
_ROOM_TOLERANCE = 0.02
"""Relative change of the room for saved tensors from which on a search is repeated that found nothing."""


@dataclass(frozen=True, kw_only=True)
class MemoryDecision:
    """The storage of the next interval, the new state, and the reasons."""

    storage: Mapping[str, Storage]
    state: MemoryState
    num_micro_batches: int | None = None
    """None: as the batch rule decides."""
    is_faster: bool = False
    """Whether the plan was changed to save time, which is to be judged."""
    is_mispredicted: bool = False
    """Whether the cost of the plan before was not as predicted."""
    reasons: tuple[Reason, ...] = ()


def stores_least(config: ControlConfig, observation: Observation) -> bool:
    """Returns whether a batch that cannot shrink ran out of memory, and passed once all regions were recomputed."""
    plan_may_change = config.execution.activations == "auto" and _is_smallest(config.batch, observation.plan)
    out_of_memory = (fault for fault in observation.faults if fault.kind is FaultKind.OUT_OF_MEMORY)
    return plan_may_change and any(fault.stores_least and fault.batch_size > 0 for fault in out_of_memory)


def decide_storage(
    config: ControlConfig,
    observation: Observation,
    state: MemoryState,
    judged: Judgement,
    *,
    lacks_memory: bool,
    may_change: bool,
) -> MemoryDecision:
    """Returns what becomes of saved tensors in the next interval (AccUDNN's memory optimizer).

    With `lacks_memory`, the batch rule retreats after a failure of this interval. A faster plan is tried only with
    `may_change`: no precision changes at this tick, and no plan failed to apply.

    Only a batch that cannot shrink is planned: an elastic one above its smallest size shrinks and keeps everything.

    - After an out-of-memory error that passed once all regions were recomputed, all stay recomputed.
    - A plan whose steps are slower than before is undone. No other is tried for a while, unless its timing was the
      first to show what a micro-batch costs.
    - Where memory is nearly exhausted, because other processes took it, the cheapest plan that still fits is chosen.
    - Otherwise the cheapest plan is chosen if it is faster and saves more time than it costs. It is chosen anyway if it
      undoes micro-batches that change the results, as far as `cheapest_plan` prefers this. So is one that keeps
      everything of an elastic batch that memory lets grow.
    - After plans ran short although predicted to fit, the margin grows. After two in a row, none is tried for the ticks
      of the bar.

    Without `revert_slowdowns` timings decide nothing: what an error has led to stays.
    """
    plan, mode, undo = observation.plan, config.execution.activations, judged.undo
    if mode != "auto":
        return MemoryDecision(storage=storage_of_all(mode, observation.regions), state=state)
    state = forget_shortage(observation.memory, _after_tick(state))
    if state.awaits_comparison and observation.apply_fault is not None:
        state = _held(config, state)
    state, reasons = compare(observation, state)
    unchanged = MemoryDecision(storage=plan.storage, state=state, reasons=reasons, is_mispredicted=bool(reasons))
    if lacks_memory:
        return _after_failure(config, observation, unchanged)
    if undo is not None and undo.stored is not None:
        # A change of precision at this tick would drop the timing.
        is_first_timing = state.pass_ms is None and may_change and timed_pass_ms(observation, judged, state) is not None
        return replace(
            unchanged,
            storage=undo.stored.storage,
            num_micro_batches=undo.stored.num_micro_batches,
            state=replace(state, predicted_bytes=None, predicted_ms=None) if is_first_timing else _held(config, state),
            reasons=(*reasons, _plan_reason(observation, undo.stored, "the faster plan was slower")),
        )
    if _may_plan(config, observation):
        return _planned(config, observation, unchanged, judged, may_change=may_change)
    return unchanged


def plans_memory(config: ControlConfig, observation: Observation) -> bool:
    """Returns whether the planner may decide: for a batch that cannot shrink, once the costs of regions are known."""
    return _may_plan(config, observation) and observation.profile is not None


def is_planned(config: ControlConfig, observation: Observation) -> bool:
    """Returns whether the batch is stored otherwise than asked for, and the planner decides how."""
    plan = observation.plan
    is_split = plan.num_micro_batches > config.batch.accumulate and observation.profile is not None
    return _may_plan(config, observation) and (bool(plan.storage) or is_split)


def _may_plan(config: ControlConfig, observation: Observation) -> bool:
    may_change = config.execution.activations == "auto" and config.revert_slowdowns and bool(observation.regions)
    return may_change and _is_smallest(config.batch, observation.plan)


def growth_hold(config: ControlConfig, observation: Observation, decided: MemoryDecision) -> Reason | None:
    """Returns why neither the batch nor its micro-batches may grow: the memory plan comes first; None if they may."""
    if not is_planned(config, observation) and decided.num_micro_batches is None:
        return None
    text = "waits: memory does not suffice to keep what the regions of the undivided batch save"
    return Reason(code=ReasonCode.HELD_STORAGE, subject="batch", text=text)


def _planned(
    config: ControlConfig, observation: Observation, unchanged: MemoryDecision, judged: Judgement, *, may_change: bool
) -> MemoryDecision:
    """Returns a smaller plan if memory is nearly exhausted, or a faster one."""
    profile, in_use = observation.profile, is_planned(config, observation)
    if profile is None:
        return unchanged
    measured = measure(observation, profile, judged, unchanged.state)
    planner = Planner(config, observation, profile, measured, judged.state)
    is_high = memory_share(config.batch, observation.memory) > config.batch.rho_high
    if (is_high and is_tight(observation.memory)) or is_not_capturable(observation):
        return _smaller(planner, unchanged)
    if in_use and may_change and not judged.is_open:
        return _faster(planner, unchanged)
    return unchanged


def _is_smallest(config: BatchConfig, plan: Plan) -> bool:
    return not config.enabled or plan.batch_size == config.minimum


def _after_tick(state: MemoryState) -> MemoryState:
    cap_ticks_left = max(state.cap_ticks_left - 1, 0)
    return replace(
        state,
        cap_ticks_left=cap_ticks_left,
        hold_ticks=max(state.hold_ticks - 1, 0),
        examined_bytes=None if state.cap_ticks_left == 1 else state.examined_bytes,  # the bar ends: search again
    )


def _after_failure(config: ControlConfig, observation: Observation, unchanged: MemoryDecision) -> MemoryDecision:
    """Returns all regions recomputed if that is what passed after an out-of-memory error, and bars the failed plan."""
    plan, state = observation.plan, unchanged.state
    kinds = {FaultKind.OUT_OF_MEMORY, FaultKind.CAPTURE_OUT_OF_MEMORY}
    ran_short = any(fault.kind in kinds for fault in observation.faults)
    state = replace(state, predicted_bytes=None, predicted_ms=None)
    if ran_short and _is_smallest(config.batch, plan):
        state = _barred(config, state, observation)
    least = recomputing_all(observation.regions, plan.storage)
    if not stores_least(config, observation) or plan.storage == least:
        return replace(unchanged, state=state)
    stored = Stored(storage=least, num_micro_batches=plan.num_micro_batches)
    reason = _plan_reason(observation, stored, "the step that ran out of memory passed so")
    return replace(unchanged, storage=least, state=state, reasons=(*unchanged.reasons, reason))


def _smaller(planner: Planner, unchanged: MemoryDecision) -> MemoryDecision:
    """Returns the cheapest plan that fits what is attainable now; if none does, the one that takes least."""
    observation, measured = planner.observation, planner.measured
    state = _barred(planner.config, unchanged.state, observation)
    chosen, _ = planner.cheapest(state)
    chosen = chosen or least_plan(planner.profile, measured, changeable=observation.regions)
    if chosen.prediction.peak_bytes >= measured.peak_bytes:
        return unchanged
    why = f"{observation.memory.attainable_bytes / GIB:.2f} GiB are attainable"
    return _changed(observation, replace(unchanged, state=state), chosen, why)


def _faster(planner: Planner, unchanged: MemoryDecision) -> MemoryDecision:
    """Returns the cheapest plan that fits if it saves more time on the samples left than a new plan costs."""
    config, observation, measured = planner.config, planner.observation, planner.measured
    state, plan, profile = unchanged.state, observation.plan, planner.profile
    room = budget_bytes(observation, state) - measured.peak_bytes
    room += modeled_bytes(profile, plan.storage, plan.micro_batch_size)
    seen = state.examined_bytes
    is_barred = state.cap_ticks_left > 0 and state.times_short >= _MAX_TIMES_SHORT
    if observation.step_ms is None or measured.step_ms is None or state.hold_ticks or is_barred:
        return unchanged
    if seen is not None and abs(room - seen) <= _ROOM_TOLERANCE * abs(seen):
        unpaid = [each for each in (state.unpaid, state.other_unpaid) if each is not None]
        if all(planner.saved_ms(each.ms) <= planner.cost_ms(each) for each in unpaid):
            return unchanged
    chosen, other = planner.cheapest(state)
    unchanged = replace(unchanged, state=replace(state, examined_bytes=room, unpaid=None, other_unpaid=None))
    if chosen is None or chosen.prediction.ms is None:
        return unchanged
    if not profile.can_split and chosen.num_micro_batches < plan.num_micro_batches:
        return _changed(observation, unchanged, chosen, "micro-batches change the results")
    is_plain = not chosen.storage and chosen.num_micro_batches == config.batch.accumulate
    if is_plain and config.batch.enabled and memory_share(config.batch, observation.memory) < config.batch.rho_low:
        return _changed(observation, unchanged, chosen, "the batch may grow then")
    most_ms = _FASTER_SHARE * measured.step_ms
    if other is not None and (other.prediction.ms is None or other.prediction.ms > most_ms):
        other = None
    if chosen.prediction.ms > (measured.step_ms if is_plain else most_ms):
        if other is None:
            return unchanged
        chosen, other = other, None
    saved_ms = planner.saved_ms(chosen.prediction.ms or 0.0)
    cost_ms = planner.cost_ms(planner.unpaid(chosen))
    if saved_ms > cost_ms:
        if not profile.can_split and chosen.num_micro_batches > plan.num_micro_batches:
            unchanged = replace(unchanged, state=_held(config, unchanged.state))  # or it might go to and fro
        return replace(_changed(observation, unchanged, chosen, "it is faster"), is_faster=True)
    text = f"a faster memory plan would save {saved_ms / 1e3:.2g} s, and a new one costs {cost_ms / 1e3:.2g} s"
    reason = Reason(code=ReasonCode.HELD_COST, subject="memory", text=text, value=saved_ms, threshold=cost_ms)
    other_unpaid = None if other is None else planner.unpaid(other)
    state = replace(unchanged.state, unpaid=planner.unpaid(chosen), other_unpaid=other_unpaid)
    return replace(unchanged, state=state, reasons=(*unchanged.reasons, reason))


def _barred(config: ControlConfig, state: MemoryState, observation: Observation) -> MemoryState:
    return replace(
        state,
        failed=Stored.under(observation.plan),
        short_at_bytes=observation.memory.attainable_bytes,
        cap_ticks_left=_backoff_ticks(config, state.times_failed),
        times_failed=state.times_failed + 1,
        examined_bytes=None,
    )


def _backoff_ticks(config: ControlConfig, times: int) -> int:
    return config.batch.oom_cooldown_ticks << min(times, _MAX_DOUBLINGS)


def _held(config: ControlConfig, state: MemoryState) -> MemoryState:
    return replace(
        state,
        predicted_bytes=None,
        predicted_ms=None,
        hold_ticks=_backoff_ticks(config, state.times_held),
        times_held=state.times_held + 1,
        examined_bytes=None,
    )


def _changed(observation: Observation, unchanged: MemoryDecision, chosen: MemoryPlan, why: str) -> MemoryDecision:
    prediction = chosen.prediction
    stored = Stored(storage=chosen.storage, num_micro_batches=chosen.num_micro_batches)
    return replace(
        unchanged,
        storage=chosen.storage,
        num_micro_batches=chosen.num_micro_batches,
        state=replace(
            unchanged.state,
            predicted_ms=prediction.ms,
            predicted_bytes=prediction.peak_bytes,
            is_compared=False,
            examined_bytes=None,
        ),
        reasons=(*unchanged.reasons, _plan_reason(observation, stored, why, prediction)),
    )


def _plan_reason(observation: Observation, new: Stored, why: str, prediction: Prediction | None = None) -> Reason:
    """Returns the reason for a memory plan, such as `memory plan: 12 of 50 regions recomputed, 3 offloaded: ...`."""
    kinds = list(new.storage.values())
    in_part = sum(kind.is_selective for kind in kinds)
    num_recomputed = sum(kind.repeats for kind in kinds)
    text = f"memory plan: {num_recomputed} of {len(observation.regions)} regions recomputed"
    text += f" in {kinds.count(RECOMPUTE)} segments" if JOIN in kinds else ""
    text += f", {in_part} of them in part" if in_part else ""
    text += f", {kinds.count(OFFLOAD)} offloaded" if OFFLOAD in kinds else ""
    text += f", {new.num_micro_batches} micro-batches" if new.num_micro_batches > 1 else ""
    peak = observation.memory.window_peak_bytes
    before = _described(peak, observation.step_ms)
    if prediction is None:
        return Reason(code=ReasonCode.MEMORY_PLAN, subject="memory", text=f"{text}: {why}; before {before}")
    text += f": {why}: predicted {_described(prediction.peak_bytes, prediction.ms)}; before {before}"
    code, value = ReasonCode.MEMORY_PLAN, prediction.peak_bytes
    return Reason(code=code, subject="memory", text=text, value=value, threshold=peak)


def _described(peak_bytes: int, ms: float | None) -> str:
    return f"{peak_bytes / GIB:.2f} GiB" + ("" if ms is None else f" and {ms:.1f} ms")
