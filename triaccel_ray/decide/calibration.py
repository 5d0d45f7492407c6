"""Measurements of memory plans: they calibrate predictions, and are compared with them."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from triaccel_ray.decide.batch import GIB
from triaccel_ray.decide.memory import Measured, added_ms, modeled_bytes, sums_bytes
from triaccel_ray.decide.throughput import Judgement
from triaccel_ray.records.plan import FaultKind, Plan, Reason, ReasonCode, largest_micro_batch
from triaccel_ray.records.signals import MemoryProfile, MemorySignal, Observation
from triaccel_ray.records.state import MemoryState, PassTiming, PeakReading, Stored

_TIGHT_SHARE = 0.99
"""Share of the attainable memory above which a smaller plan is chosen: more than `BUDGET_SHARE`, or small errors would
undo each plan."""
BARRED_SHARE = 0.95
"""After a plan failed, others must take less than this share of its bytes by the model."""
BUDGET_SHARE = 0.97
"""Share of the attainable memory that a plan, or a step with weights in the plain form, may be predicted to take."""
_SHARE_PER_FAILURE = 0.04
"""Reduction of that share for each plan that ran short although predicted to fit; three cover errors of 12 %."""
_MIN_BUDGET_SHARE = 0.8
"""Lower bound of that share, however many plans ran short."""
_RECOVERED_RATIO = 1.05
"""Attainable memory, as a multiple of that at an earlier failure, from which on the failure no longer counts."""
_BYTES_TOLERANCE, _MS_TOLERANCE = 0.05, 0.10
"""Relative differences between prediction and measurement from which on they are reported."""


def measure(observation: Observation, profile: MemoryProfile, judged: Judgement, state: MemoryState) -> Measured:
    """Returns what calibrates the predictions of this tick."""
    return Measured(
        plan=observation.plan,
        peak_bytes=observation.memory.window_peak_bytes,
        step_ms=_step_ms(observation, judged),
        pass_ms=timed_pass_ms(observation, judged, state),
        bytes_per_sample=_bytes_per_sample(observation, profile, state.other_peak),
    )


def timed_pass_ms(observation: Observation, judged: Judgement, state: MemoryState) -> float | None:
    """Returns what a further micro-batch adds to a step, from two timings; what it last did without a second one.

    None if it was never timed.
    """
    plan, other, base_ms = observation.plan, state.other_timing, _base_ms(observation, judged)
    if base_ms is None or other is None or other.batch_size != plan.batch_size:
        return state.pass_ms
    further = plan.num_micro_batches - other.num_micro_batches
    return max((base_ms - other.ms) / further, 0.0) if further else state.pass_ms


def _bytes_per_sample(observation: Observation, profile: MemoryProfile, other: PeakReading | None) -> int:
    """Returns what a sample of a micro-batch takes beyond the model, from two peaks; never less than nothing.

    A plan that ran out of memory counts as a peak of what was attainable, a lower bound.
    """
    plan = observation.plan
    if other is None or other.batch_size != plan.batch_size:
        return 0
    further = plan.micro_batch_size - largest_micro_batch(plan.batch_size, other.stored.num_micro_batches)
    beyond = observation.memory.window_peak_bytes - bytes_of(profile, Stored.under(plan), plan)
    other_beyond = other.peak_bytes - bytes_of(profile, other.stored, plan)
    return max(math.ceil((beyond - other_beyond) / further), 0) if further else 0


def budget_bytes(observation: Observation, state: MemoryState) -> int:
    """Returns what a plan may be predicted to take, which is less after plans that ran short."""
    share = max(BUDGET_SHARE - _SHARE_PER_FAILURE * state.times_short, _MIN_BUDGET_SHARE)
    return math.floor(share * observation.memory.attainable_bytes)


def forget_shortage(memory: MemorySignal, state: MemoryState) -> MemoryState:
    """Returns the state without plans that failed or ran short if clearly more memory is attainable than then."""
    is_past = memory.attainable_bytes > _RECOVERED_RATIO * state.short_at_bytes
    if not (is_past and (state.times_short or state.failed)):
        return state
    return replace(state, times_short=0, failed=None, cap_ticks_left=0, times_failed=0, examined_bytes=None)


def compare(observation: Observation, state: MemoryState) -> tuple[MemoryState, tuple[Reason, ...]]:
    """Returns the state and reasons after comparing the last prediction, if that is due, with what was measured since.

    A plan that takes as much as the one that failed, and passes, ends the bar: other processes had the memory.
    The failed plan's number of micro-batches must be the same or larger, for the model knows least about those.
    """
    step_ms, plan, profile, failed = observation.step_ms, observation.plan, observation.profile, state.failed
    peak, peak_before, ms_before = observation.memory.window_peak_bytes, state.predicted_bytes, state.predicted_ms
    if peak_before is None or not state.awaits_comparison:
        return state, ()
    if _ran_short(observation):
        return _after_shortage(observation, state, peak_before), ()
    if step_ms is None or any(fault.kind is FaultKind.OUT_OF_MEMORY for fault in observation.faults):
        return state, ()
    if is_tight(observation.memory):
        state = _after_shortage(observation, state, peak_before)
    reasons = []
    if abs(peak - peak_before) > _BYTES_TOLERANCE * peak_before:
        reasons.append(
            _mispredicted(f"peak {peak / GIB:.2f} GiB, predicted {peak_before / GIB:.2f}", peak, peak_before)
        )
    if ms_before is not None and abs(step_ms - ms_before) > _MS_TOLERANCE * ms_before:
        reasons.append(_mispredicted(f"step {step_ms:.1f} ms, predicted {ms_before:.1f}", step_ms, ms_before))
    state = replace(state, is_compared=True)
    if profile is not None and failed is not None and not is_tight(observation.memory):
        taken = bytes_of(profile, Stored.under(plan), plan)
        is_as_large = taken >= bytes_of(profile, failed, plan)
        if is_as_large and plan.num_micro_batches <= failed.num_micro_batches:
            state = replace(state, failed=None, cap_ticks_left=0, times_failed=0, times_short=0)
    return state, tuple(reasons)


def _after_shortage(observation: Observation, state: MemoryState, predicted_bytes: int) -> MemoryState:
    """Returns the state after memory ran short under a new plan; the margin grows if it was predicted to fit."""
    plan, memory = observation.plan, observation.memory
    state = replace(state, predicted_bytes=None, predicted_ms=None)
    if predicted_bytes > memory.attainable_bytes:
        return state  # other processes took the memory
    peak_bytes = max(memory.attainable_bytes, memory.window_peak_bytes)
    return replace(
        state,
        times_short=state.times_short + 1,
        short_at_bytes=memory.attainable_bytes,
        other_peak=PeakReading(batch_size=plan.batch_size, stored=Stored.under(plan), peak_bytes=peak_bytes),
    )


def _ran_short(observation: Observation) -> bool:
    """Returns whether memory did not suffice for the plan in force, or for its capture."""
    out_of_memory = (fault for fault in observation.faults if fault.kind is FaultKind.OUT_OF_MEMORY)
    return is_not_capturable(observation) or any(fault.batch_size > 0 for fault in out_of_memory)


def is_not_capturable(observation: Observation) -> bool:
    """Returns whether memory did not suffice to capture the step of the plan in force, which runs eagerly."""
    plan = observation.plan
    sizes = plan.batch_size, plan.micro_batch_size
    faults = (each for each in observation.faults if each.kind is FaultKind.CAPTURE_OUT_OF_MEMORY)
    return any((fault.batch_size, fault.micro_batch_size) == sizes for fault in faults)


def is_tight(memory: MemorySignal) -> bool:
    """Returns whether memory is nearly exhausted."""
    return memory.window_peak_bytes > _TIGHT_SHARE * memory.attainable_bytes


def remember_plan(observation: Observation, judged: Judgement, new: Plan, state: MemoryState) -> MemoryState:
    """Returns the state after `new` replaces the plan, with time and memory of the old number of micro-batches."""
    old = observation.plan
    if (new.batch_size, new.precision) != (old.batch_size, old.precision):
        unknown = replace(state, other_timing=None, pass_ms=None, other_peak=None, examined_bytes=None)
        return replace(unknown, predicted_bytes=None, predicted_ms=None)
    if new.num_micro_batches == old.num_micro_batches:
        return state
    if not _ran_short(observation):
        peak_bytes = observation.memory.window_peak_bytes
        peak = PeakReading(batch_size=old.batch_size, stored=Stored.under(old), peak_bytes=peak_bytes)
        state = replace(state, other_peak=peak)
    state = replace(state, pass_ms=timed_pass_ms(observation, judged, state))
    base_ms = _base_ms(observation, judged)
    if base_ms is None:
        return state
    timing = PassTiming(batch_size=old.batch_size, num_micro_batches=old.num_micro_batches, ms=base_ms)
    return replace(state, other_timing=timing)


def bytes_of(profile: MemoryProfile, stored: Stored, plan: Plan) -> int:
    """Returns the model's bytes, sums of gradients included, of the batch of `plan` when stored as `stored` says."""
    saved = modeled_bytes(profile, stored.storage, largest_micro_batch(plan.batch_size, stored.num_micro_batches))
    return saved + sums_bytes(profile, stored.num_micro_batches)


def _step_ms(observation: Observation, judged: Judgement) -> float | None:
    """Returns the median of the last intervals under the plan in force; None if none was timed, or another plan ran."""
    if _ran_short(observation):
        return None
    intervals = judged.state.intervals
    return median(intervals) * observation.plan.batch_size if intervals else observation.step_ms


def _base_ms(observation: Observation, judged: Judgement) -> float | None:
    """Returns the milliseconds of a step without those that recomputation and transfers add; None if unknown."""
    plan, profile, step_ms = observation.plan, observation.profile, _step_ms(observation, judged)
    if step_ms is None or not plan.storage:
        return step_ms
    return None if profile is None else step_ms - added_ms(profile, plan.storage, plan.batch_size)


def _mispredicted(text: str, value: float, predicted: float) -> Reason:
    code = ReasonCode.MEMORY_MISPREDICTED
    return Reason(code=code, subject="memory", text=f"memory plan: {text}", value=value, threshold=predicted)
