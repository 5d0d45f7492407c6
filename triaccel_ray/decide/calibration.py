"""Measurements of memory plans: they calibrate predictions, and are compared with them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from triaccel_ray.decide.batch import GIB
from triaccel_ray.decide.memory import Measured, added_ms, modelled_bytes
from triaccel_ray.decide.throughput import Judgement
from triaccel_ray.records.plan import FaultKind, Plan, Reason, ReasonCode
from triaccel_ray.records.signals import MemoryProfile, MemorySignal, Observation
from triaccel_ray.records.state import MemoryState, PassTiming, Stored

_TIGHT_SHARE = 0.99
"""Share of the attainable memory above which a smaller plan is chosen: more than what plans are made for, or a small
error of prediction would undo each."""
BARRED_SHARE = 0.95
"""After a plan failed, others must take less than this share of its bytes by the model."""
_BYTES_TOLERANCE, _MS_TOLERANCE = 0.05, 0.10
"""Relative differences between prediction and measurement from which on they are reported."""


def measure(observation: Observation, judged: Judgement, state: MemoryState) -> Measured:
    """Returns what calibrates the predictions of this tick."""
    plan, other, base_ms = observation.plan, state.other_timing, _base_ms(observation, judged)
    pass_ms = 0.0
    if base_ms is not None and other is not None and other.batch_size == plan.batch_size:
        further = plan.num_micro_batches - other.num_micro_batches
        pass_ms = max((base_ms - other.ms) / further, 0.0) if further else 0.0
    peak_bytes = observation.memory.window_peak_bytes
    return Measured(plan=plan, peak_bytes=peak_bytes, step_ms=_step_ms(observation, judged), pass_ms=pass_ms)


def compare(observation: Observation, state: MemoryState) -> tuple[MemoryState, tuple[Reason, ...]]:
    """Returns the state and reasons after comparing the last prediction with what was measured since.

    A plan that takes about as much as the one that failed, and passes, ends the bar: other processes had the memory.
    """
    step_ms, plan, profile, failed = observation.step_ms, observation.plan, observation.profile, state.failed
    ran_out = any(fault.kind is FaultKind.OUT_OF_MEMORY for fault in observation.faults)
    if state.predicted_bytes is None or step_ms is None or ran_out:
        return state, ()
    peak, peak_before, ms_before = observation.memory.window_peak_bytes, state.predicted_bytes, state.predicted_ms
    reasons = []
    if abs(peak - peak_before) > _BYTES_TOLERANCE * peak_before:
        reasons.append(
            _mispredicted(f"peak {peak / GIB:.2f} GiB, predicted {peak_before / GIB:.2f}", peak, peak_before)
        )
    if ms_before is not None and abs(step_ms - ms_before) > _MS_TOLERANCE * ms_before:
        reasons.append(_mispredicted(f"step {step_ms:.1f} ms, predicted {ms_before:.1f}", step_ms, ms_before))
    state = replace(state, predicted_bytes=None, predicted_ms=None)
    if profile is not None and failed is not None and not is_tight(observation.memory):
        taken = modelled_bytes(profile, plan.storage, plan.micro_batch_size)
        if taken >= BARRED_SHARE * bytes_of(profile, failed, plan):
            state = replace(state, failed=None, cap_ticks_left=0, times_failed=0)
    return state, tuple(reasons)


def is_tight(memory: MemorySignal) -> bool:
    """Returns whether memory is nearly exhausted."""
    return memory.window_peak_bytes > _TIGHT_SHARE * memory.attainable_bytes


def remember_timing(observation: Observation, judged: Judgement, new: Plan, state: MemoryState) -> MemoryState:
    """Returns the state after `new` replaces the plan, with the time of the old number of micro-batches."""
    old = observation.plan
    if (new.batch_size, new.precision) != (old.batch_size, old.precision):
        return replace(state, other_timing=None, predicted_bytes=None, predicted_ms=None, examined_bytes=None)
    base_ms = _base_ms(observation, judged)
    if new.num_micro_batches == old.num_micro_batches or base_ms is None:
        return state
    timing = PassTiming(batch_size=old.batch_size, num_micro_batches=old.num_micro_batches, ms=base_ms)
    return replace(state, other_timing=timing)


def bytes_of(profile: MemoryProfile, stored: Stored, plan: Plan) -> int:
    """Returns the model's bytes of the batch of `plan` when stored as `stored` says."""
    return modelled_bytes(profile, stored.storage, -(-plan.batch_size // stored.num_micro_batches))


def _step_ms(observation: Observation, judged: Judgement) -> float | None:
    """Returns the median of the last intervals under the plan in force; None if none was timed."""
    intervals = judged.state.intervals
    return median(intervals) * observation.plan.batch_size if intervals else observation.step_ms


def _base_ms(observation: Observation, judged: Judgement) -> float | None:
    """Returns the milliseconds of a step without those that recomputation and transfers add; None if unknown."""
    plan, profile, step_ms = observation.plan, observation.profile, _step_ms(observation, judged)
    if step_ms is None or not plan.storage:
        return step_ms
    return None if profile is None else step_ms - added_ms(profile, plan.storage, plan.batch_size)


def _mispredicted(text: str, value: float, predicted: float) -> Reason:
    code, value, predicted = ReasonCode.MEMORY_MISPREDICTED, float(value), float(predicted)
    return Reason(code=code, subject="memory", text=f"memory plan: {text}", value=value, threshold=predicted)
