"""Rule 6: sets the batch size by memory use, reduces it after failures, and scales the learning rate with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from triaccel_ray.config import BatchConfig
from triaccel_ray.decide.throughput import batch_reason, efficient_size
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Reason, ReasonCode
from triaccel_ray.records.signals import MemorySignal, NoiseSignal, Observation
from triaccel_ray.records.state import BatchState, Change

GIB = 2.0**30
_SMALLEST_SPLIT = 4
"""Smaller micro-batches are not split just for speed: batch normalization cannot take single samples."""
_MAX_REFINEMENTS = 3
"""Batch sizes that are timed between two doublings: each halves the interval that holds the efficient size."""


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """The batch of the next interval, the new state, and the reasons."""

    batch_size: int
    num_micro_batches: int
    state: BatchState
    reasons: tuple[Reason, ...] = ()


def ladder(config: BatchConfig) -> tuple[int, ...]:
    """Returns all batch sizes that can occur, in ascending order."""
    return tuple(range(config.minimum, config.maximum + 1, config.granularity))


def next_size_to_time(config: BatchConfig, timed: Mapping[int, float | None]) -> int | None:
    """Returns which size of the ladder to time next, to find the efficient one; None if that is found.

    First the initial size and those that double from the smallest one, in ascending order, up to the first that does
    not fit. Then sizes between the smallest efficient one (`efficient_size`) and the next smaller one, by bisection.

    Args:
        config: the ladder of batch sizes.
        timed: batch size -> milliseconds per sample; None for a size that does not fit.
    """
    sizes = ladder(config)
    ms_per_sample = {size: ms for size, ms in timed.items() if ms is not None}
    coarse = _coarse_sizes(config)
    if len(ms_per_sample) == len(timed):
        following = next((size for size in coarse if size not in timed), None)
        if following is not None:
            return following
    if not ms_per_sample or len(timed.keys() - set(coarse)) >= _MAX_REFINEMENTS:
        return None
    efficient = efficient_size(ms_per_sample)
    below = max((size for size in ms_per_sample if size < efficient), default=efficient)
    between = [size for size in sizes if below < size < efficient and size not in timed]
    return between[len(between) // 2] if between else None


def _coarse_sizes(config: BatchConfig) -> list[int]:
    """Returns the initial size, the smallest, the largest, and sizes that at most double in between, ascending."""
    sizes = ladder(config)
    doubling = [sizes[0]]
    while doubling[-1] < sizes[-1]:
        larger = [size for size in sizes if size > doubling[-1]]
        doubling.append(max((size for size in larger if size <= 2 * doubling[-1]), default=larger[0]))
    return sorted({*doubling, config.start})


def retreat(
    config: BatchConfig, observation: Observation, state: BatchState, *, keeps_size: bool = False, plans: bool = False
) -> BatchDecision | None:
    """Returns a smaller batch, or one in micro-batches, if failures of this interval require it; else None.

    The new size is the largest of the ladder that fits on the device, below the size that failed and not above the
    current one. It caps the batch size for `oom_cooldown_ticks`. If the smallest size fits only in micro-batches, it
    keeps micro-batches that are no larger than those. A step that ran, but lacked the memory to be a CUDA graph, counts
    as failed if an elastic batch can still shrink. A batch of fixed size is split into halves instead, unless the
    memory planner finds a better plan (`plans`). If the interval also has an out-of-memory error, only that counts.

    With `keeps_size` the batch stays, in micro-batches of the size that passed: recomputation saves the memory.
    """
    plan = observation.plan
    failed = [fault for fault in observation.faults if _concerns_batch(config, fault, plan, plans=plans)]
    if any(fault.kind is FaultKind.OUT_OF_MEMORY for fault in failed):
        failed = [fault for fault in failed if fault.kind is not FaultKind.CAPTURE_OUT_OF_MEMORY]
    if not failed:
        return None
    smallest = min(failed, key=lambda fault: fault.batch_size)
    fitting_sizes = [fault.micro_batch_size for fault in failed if fault.micro_batch_size > 0]
    fitting_size = min(fitting_sizes, default=plan.batch_size)
    if smallest.kind is FaultKind.CAPTURE_OUT_OF_MEMORY and not config.enabled:
        size, parts = plan.batch_size, 2 * plan.num_micro_batches
    elif keeps_size:
        size, parts = plan.batch_size, max(math.ceil(plan.batch_size / fitting_size), plan.num_micro_batches)
    else:
        size = _round_down(config, min(smallest.batch_size - 1, fitting_size * config.accumulate, plan.batch_size))
        parts = max(math.ceil(size / fitting_size), config.accumulate)
        if size == plan.batch_size:
            parts = max(parts, plan.num_micro_batches)
    text = f"{smallest.kind.value} in {smallest.phase} at batch {smallest.batch_size}"
    if fitting_sizes and fitting_size < smallest.batch_size:
        text += f", {fitting_size} at once passed"
    text += f": {plan.batch_size} -> {size}" if size != plan.batch_size else ": the batch stays"
    if parts > config.accumulate:
        text += f" in {parts} parts"
    reason = batch_reason(ReasonCode(smallest.kind.value), text, value=smallest.batch_size, threshold=size)
    return BatchDecision(
        batch_size=size,
        num_micro_batches=parts,
        state=replace(state, ticks_since_change=0, cap=size, cap_ticks_left=config.oom_cooldown_ticks),
        reasons=(reason,),
    )


def undo_growth(plan: Plan, change: Change | None, state: BatchState) -> BatchDecision | None:
    """Returns the batch from before the growth that is to be undone; None if there is none."""
    if change is None or change.batch_size is None:
        return None
    return BatchDecision(
        batch_size=change.batch_size,
        num_micro_batches=plan.num_micro_batches,
        state=replace(state, ticks_since_change=0),
    )


def decide_batch(
    config: BatchConfig,
    observation: Observation,
    state: BatchState,
    *,
    enlarged: bool,
    is_unjudged: bool = False,
    hold: Reason | None = None,
    choose_size: Callable[[Sequence[int]], int | Reason] = itemgetter(0),
) -> BatchDecision:
    """Returns the batch of the next interval (Tri-Accel, section 3.3).

    It shrinks by one step. `choose_size` gets the sizes that fit, and returns the one to grow to, by one step, as in
    the paper, or further. If it returns a reason, the batch stays.

    Growth waits with `is_unjudged`: the last change of plan is not judged by its step times yet. It also waits with
    `enlarged`: a precision was raised at this tick, or could not be. A larger batch would then take other memory than
    measured. And it waits for the reason `hold`, if there is one. A size that used too much memory is barred for
    `oom_cooldown_ticks`, as after an out-of-memory error. Otherwise, a step wider than the band between rho_low and
    rho_high would oscillate forever.
    """
    plan, memory = observation.plan, observation.memory
    has_waited = state.waits_for_storage
    state = replace(
        state,
        ticks_since_change=state.ticks_since_change + 1,
        cap_ticks_left=max(state.cap_ticks_left - 1, 0),
        cap=state.cap if state.cap_ticks_left > 1 else None,
        waits_for_storage=False,
        waits_for_noise=False,
    )
    unchanged = BatchDecision(batch_size=plan.batch_size, num_micro_batches=plan.num_micro_batches, state=state)
    share = memory_share(config, memory)
    if config.enabled and share > config.rho_high:
        return _shrink(config, plan, memory, state)
    if config.enabled and share >= config.rho_low:
        return unchanged
    size, parts = _step_up(config, plan)
    at_top = (size, parts) == (plan.batch_size, plan.num_micro_batches)
    if at_top or state.ticks_since_change < config.dwell_ticks:
        return unchanged
    size = min(size, state.cap or size)
    hold = hold or _reason_to_hold(plan, state, enlarged=enlarged, is_unjudged=is_unjudged)
    if hold is None and config.enabled and size > plan.batch_size:
        chosen = choose_size(_candidate_sizes(size, config, plan, memory, state))
        size, hold = (size, chosen) if isinstance(chosen, Reason) else (chosen, None)
    hold = hold or _reason_of_noise(config, plan, state, size)
    if hold is not None:
        waits = hold.code is ReasonCode.HELD_STORAGE
        state = replace(state, waits_for_storage=waits, waits_for_noise=hold.code is ReasonCode.HELD_NOISE_SCALE)
        return replace(unchanged, state=state, reasons=() if waits and has_waited else (hold,))
    return _grow(config, plan, memory, state, size, parts)


def batch_lr_scale(config: BatchConfig, batch_size: int, noise: NoiseSignal | None) -> float:
    """Returns the factor on the learning rate at `batch_size`, relative to the starting size.

    `sqrt` keeps the noise of a step constant (Krizhevsky 2014), `linear` the path per sample (Goyal et al. 2017).
    `adascale` lies between 1 and linear, by how much of the gradient is noise (Johnson et al. 2020, eq. 5):

        (s2 + m2) / (s2 / S + m2)    with S = B / B_0, s2 = tr Cov / B_0, m2 = |E g|^2

    It is 1 before the first measurement. An unbiased estimate of a moment may be negative and then counts as zero.
    """
    ratio = batch_size / config.start
    if config.lr_rule == "none":
        return 1.0
    if config.lr_rule == "sqrt":
        return math.sqrt(ratio)
    if config.lr_rule == "linear":
        return ratio
    if noise is None:
        return 1.0
    variance = max(noise.trace_covariance, 0.0) / config.start
    square = max(noise.mean_square_norm, 0.0)
    if variance + square > 0:
        return (variance + square) / (variance / ratio + square)
    return 1.0


def noise_scale(noise: NoiseSignal | None) -> float:
    """Returns tr Cov / |E g|^2, the batch size beyond which averaging buys little; infinite before a measurement."""
    if noise is None or noise.mean_square_norm <= 0:
        return math.inf
    return noise.trace_covariance / noise.mean_square_norm


def _concerns_batch(config: BatchConfig, fault: Fault, plan: Plan, *, plans: bool) -> bool:
    if fault.kind is FaultKind.OUT_OF_MEMORY:
        return fault.batch_size > 0
    if fault.kind is FaultKind.CAPTURE_OUT_OF_MEMORY:
        # Only slower: worth one smaller size or a split into halves, unless it was an epoch's short last batch.
        if (fault.batch_size, fault.micro_batch_size) != (plan.batch_size, plan.micro_batch_size):
            return False
        if config.enabled:
            return plan.batch_size > config.minimum
        is_undivided = plan.num_micro_batches == config.accumulate and plan.micro_batch_size >= _SMALLEST_SPLIT
        return is_undivided and not plans
    # The fault of a plan that could not be applied because of its larger batch has the size of that batch.
    return fault.kind is FaultKind.APPLY_FAILED and fault.batch_size > plan.batch_size


def _round_down(config: BatchConfig, size: int) -> int:
    """Returns the largest size of the ladder that is not above `size`; the smallest one if all are."""
    return max((each for each in ladder(config) if each <= size), default=config.minimum)


def _shrink(config: BatchConfig, plan: Plan, memory: MemorySignal, state: BatchState) -> BatchDecision:
    size = _round_down(config, plan.batch_size - config.step_down)
    if size == plan.batch_size:
        outcome = f", and {size} is the smallest batch"
    else:
        outcome = f": {plan.batch_size} -> {size}"
        cap = min(plan.batch_size - config.granularity, state.cap or config.maximum)
        state = replace(state, ticks_since_change=0, cap=cap, cap_ticks_left=config.oom_cooldown_ticks)
    text = f"memory {_describe_use(config, memory)} > rho_high {config.rho_high:.3g}{outcome}"
    reason = batch_reason(ReasonCode.MEMORY_HIGH, text, value=memory_share(config, memory), threshold=config.rho_high)
    return BatchDecision(batch_size=size, num_micro_batches=plan.num_micro_batches, state=state, reasons=(reason,))


def _step_up(config: BatchConfig, plan: Plan) -> tuple[int, int]:
    """Returns the batch size and number of micro-batches one step up in memory use, before any limit."""
    if plan.num_micro_batches > config.accumulate:
        return plan.batch_size, max(plan.num_micro_batches // 2, config.accumulate)
    size = plan.batch_size + config.step_up if config.enabled else config.start
    if plan.batch_size < config.start:
        size = min(size, config.start)  # a wide step would skip it, to a size that the noise scale may forbid
    return max(_round_down(config, size), plan.batch_size), config.accumulate


def _candidate_sizes(size: int, config: BatchConfig, plan: Plan, memory: MemorySignal, state: BatchState) -> list[int]:
    """Returns `size`, one step up, and the larger sizes that the batch may grow to at once."""
    most = min(config.rho_low / max(memory_share(config, memory), 1e-9) * plan.batch_size, state.cap or config.maximum)
    if plan.batch_size < config.start:
        most = min(most, config.start)
    if config.bound_by_noise_scale and _is_known(state.noise):
        most = min(most, max(config.noise_share * noise_scale(state.noise), config.start))
    return [size, *(each for each in ladder(config) if size < each <= most)]


def _reason_to_hold(plan: Plan, state: BatchState, *, enlarged: bool, is_unjudged: bool) -> Reason | None:
    """Returns why neither the batch nor its micro-batches must grow now, whatever it saves; None if they may."""
    if is_unjudged:
        return batch_reason(ReasonCode.HELD_UNJUDGED, "waits: the last change of plan is not judged yet")
    if enlarged:
        text = "waits: at this tick a precision was raised or could not be, so the memory measured is stale"
        return batch_reason(ReasonCode.HELD_ENLARGED, text)
    if state.cap is not None and plan.batch_size >= state.cap:
        text = f"capped at {state.cap} for {state.cap_ticks_left} more ticks after too large a batch"
        return batch_reason(ReasonCode.HELD_CAPPED, text, threshold=state.cap)
    return None


def _reason_of_noise(config: BatchConfig, plan: Plan, state: BatchState, size: int) -> Reason | None:
    """Returns why the gradient noise scale forbids a batch of `size`; None if it allows it, or does not bound it.

    Asked last: the scale is worth measuring only for a larger batch that pays.
    """
    # A return to the undivided batch, or to the initial size, does not depend on the noise scale.
    if not (config.bound_by_noise_scale and size > max(plan.batch_size, config.start)):
        return None
    if not _is_known(state.noise):
        text = f"no batch of {size} before the gradient noise scale is known"
        return batch_reason(ReasonCode.HELD_NOISE_SCALE, text, value=size)
    scale = noise_scale(state.noise)
    bound = config.noise_share * scale
    if size > bound:
        share = "" if config.noise_share == 1.0 else f" x {config.noise_share:.3g}"
        text = f"gradient noise scale {scale:.3g}{share}: a batch of {size} would average little more"
        return batch_reason(ReasonCode.HELD_NOISE_SCALE, text, value=size, threshold=bound)
    return None


def _is_known(noise: NoiseSignal | None) -> bool:
    """Returns whether measurements have half of the moving average's weight.

    Single ones are as often negative as they are a hundred times too large.
    """
    return noise is not None and noise.trace_covariance >= 0.5


def _grow(
    config: BatchConfig, plan: Plan, memory: MemorySignal, state: BatchState, size: int, parts: int
) -> BatchDecision:
    change = f"{plan.batch_size} -> {size}" if size != plan.batch_size else f"{plan.num_micro_batches} -> {parts} parts"
    if config.enabled:
        text = f"memory {_describe_use(config, memory)} < rho_low {config.rho_low:.3g}: {change}"
    else:
        text = f"the cap after an out-of-memory error is lifted: {change}"
    reason = batch_reason(ReasonCode.MEMORY_LOW, text, value=memory_share(config, memory), threshold=config.rho_low)
    state = replace(state, ticks_since_change=0)
    return BatchDecision(batch_size=size, num_micro_batches=parts, state=state, reasons=(reason,))


def memory_share(config: BatchConfig, memory: MemorySignal) -> float:
    """Returns the share of the memory limit in use, counted as configured."""
    return memory.share(counts_idle=config.counts_idle_memory)


def _describe_use(config: BatchConfig, memory: MemorySignal) -> str:
    idle, above = (0, "") if config.counts_idle_memory else (memory.idle_bytes, " above the idle process")
    taken, room = memory.window_peak_bytes - idle, memory.attainable_bytes - idle
    return f"{memory_share(config, memory):.3f} ({taken / GIB:.2f} of {room / GIB:.2f} GiB{above})"
