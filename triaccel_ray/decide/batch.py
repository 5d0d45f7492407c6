"""Rule 6: the batch size from memory, its retreat after failures, and the learning rate that follows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from triaccel_ray.config import BatchConfig
from triaccel_ray.decide.state import BatchState
from triaccel_ray.plan import Fault, FaultKind, Plan, Reason, ReasonCode
from triaccel_ray.signals import MemorySignal, NoiseSignal, Observation

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class BatchDecision:
    """The next interval's batch, what to remember, and why."""

    batch_size: int
    num_micro_batches: int
    state: BatchState
    reasons: tuple[Reason, ...] = ()


def ladder(config: BatchConfig) -> tuple[int, ...]:
    """Returns all batch sizes that can ever be in force, ascending: the finite set of steps to build."""
    return tuple(range(config.minimum, config.maximum + 1, config.granularity))


def retreat(config: BatchConfig, observation: Observation, state: BatchState) -> BatchDecision | None:
    """Returns the smaller batch that this interval's failures ask for, or None when nothing failed.

    The new size is the largest rung that both passed through the device and lies below the one that failed; the
    ladder stays capped there for `cap_ticks`. When even the smallest rung passed only in parts, the parts stay.
    """
    plan = observation.plan
    failed = [fault for fault in observation.faults if _speaks_of_batch(fault, plan)]
    if not failed:
        return None
    smallest_failed = min(fault.batch_size for fault in failed)
    survived = min((fault.micro_batch_size or fault.batch_size for fault in failed), default=plan.batch_size)
    below = [size for size in ladder(config) if size < smallest_failed]
    fitting = [size for size in below if size <= max(survived, config.minimum)]
    size = max(fitting, default=config.minimum)
    parts = max(math.ceil(size / survived), 1) if survived < size else 1
    parts = max(parts, plan.num_micro_batches if size == plan.batch_size else 1)
    text = (
        f"{failed[0].kind.value} in {failed[0].phase} at batch {smallest_failed}, {survived} at once passed: "
        f"{plan.batch_size} -> {size}" + (f" in {parts} parts" if parts > 1 else "")
    )
    code = ReasonCode.OUT_OF_MEMORY if failed[0].kind is FaultKind.OUT_OF_MEMORY else ReasonCode.APPLY_FAILED
    return BatchDecision(
        batch_size=size,
        num_micro_batches=parts,
        state=replace(state, ticks_since_change=0, cap=size, cap_ticks_left=config.cap_ticks),
        reasons=(Reason(code=code, subject="batch", text=text, value=float(smallest_failed), threshold=float(size)),),
    )


def decide_batch(config: BatchConfig, observation: Observation, state: BatchState, *, enlarged: bool) -> BatchDecision:
    """Returns the next interval's batch (Tri-Accel, section 3.3), moved by at most one step.

    `enlarged` says that this tick already raised the bytes a sample takes: growth then waits, for its measurement
    would be stale. A size left because it used too much memory is closed for `cap_ticks`, as after an out-of-memory
    error: otherwise a ladder step wider than the band between rho_low and rho_high would swing forever.
    """
    plan, memory = observation.plan, observation.memory
    state = replace(
        state,
        ticks_since_change=state.ticks_since_change + 1,
        cap_ticks_left=max(state.cap_ticks_left - 1, 0),
        cap=state.cap if state.cap_ticks_left > 1 else None,
    )
    keep = BatchDecision(batch_size=plan.batch_size, num_micro_batches=plan.num_micro_batches, state=state)
    if config.enabled and memory.share > config.rho_high:
        return _shrink(config, plan, memory, state)
    if memory.share >= config.rho_low and config.enabled:
        return keep
    held = _growth_is_held(config, plan, state, enlarged=enlarged)
    if held is not None:
        return replace(keep, reasons=(held,) if held.text else ())
    if plan.num_micro_batches > 1:
        return _grown(plan.batch_size, max(plan.num_micro_batches // 2, 1), plan, memory, config, state)
    target = min(plan.batch_size + config.step_up, config.maximum) if config.enabled else config.start
    target = max(size for size in ladder(config) if size <= max(target, plan.batch_size))
    if state.cap is not None:
        target = min(target, max(state.cap, plan.batch_size))
    if target <= plan.batch_size:
        return keep
    return _grown(target, 1, plan, memory, config, state)


def batch_lr_scale(config: BatchConfig, batch_size: int, noise: NoiseSignal | None) -> float:
    """Returns the factor on the learning rate at `batch_size`, relative to the starting size.

    `sqrt` keeps the noise of a step constant (Krizhevsky 2014), `linear` the path per sample (Goyal et al. 2017).
    `adascale` lies between 1 and linear, by how much of the gradient is noise: its gain is
    (s2 + m2) / (s2 / S + m2) with S = B / B_0, s2 = tr Cov / B_0, m2 = |E g|^2 (Johnson et al. 2020, eq. 5); 1 before
    the first measurement.
    """
    ratio = batch_size / config.start
    if config.lr_rule == "none":
        return 1.0
    if config.lr_rule == "sqrt":
        return math.sqrt(ratio)
    if config.lr_rule == "linear":
        return ratio
    if noise is None or noise.trace_covariance + noise.mean_square_norm <= 0:
        return 1.0
    variance = noise.trace_covariance / config.start
    return (variance + noise.mean_square_norm) / (variance / ratio + noise.mean_square_norm)


def noise_scale(noise: NoiseSignal | None) -> float:
    """Returns tr Cov / |E g|^2, the batch size beyond which averaging buys little; infinite before a measurement."""
    if noise is None or noise.mean_square_norm <= 0:
        return math.inf
    return noise.trace_covariance / noise.mean_square_norm


def _speaks_of_batch(fault: Fault, plan: Plan) -> bool:
    if fault.kind is FaultKind.OUT_OF_MEMORY:
        return fault.batch_size > 0
    # A plan that could not be applied for want of a larger batch names the size it wanted.
    return fault.kind is FaultKind.APPLY_FAILED and fault.batch_size > plan.batch_size


def _shrink(config: BatchConfig, plan: Plan, memory: MemorySignal, state: BatchState) -> BatchDecision:
    target = max(plan.batch_size - config.step_down, config.minimum)
    target = max(size for size in ladder(config) if size <= max(target, config.minimum))
    parts = plan.num_micro_batches
    text = f"memory {_share(memory)} > rho_high {config.rho_high:.3g}: {plan.batch_size} -> {target}"
    if target == plan.batch_size:
        text = f"memory {_share(memory)} > rho_high {config.rho_high:.3g}, and {target} is the smallest batch"
    else:
        cap = min(plan.batch_size - config.granularity, state.cap or config.maximum)
        state = replace(state, ticks_since_change=0, cap=max(cap, target), cap_ticks_left=config.cap_ticks)
    reason = Reason(
        code=ReasonCode.MEMORY_HIGH, subject="batch", text=text, value=memory.share, threshold=config.rho_high
    )
    return BatchDecision(batch_size=target, num_micro_batches=parts, state=state, reasons=(reason,))


def _growth_is_held(config: BatchConfig, plan: Plan, state: BatchState, *, enlarged: bool) -> Reason | None:
    """Returns why the batch must not grow now, or None; a reason without text is too ordinary to record."""
    at_top = plan.batch_size >= (config.maximum if config.enabled else config.start) and plan.num_micro_batches == 1
    if at_top:
        return Reason(code=ReasonCode.HELD_CAPPED, subject="batch", text="")
    if enlarged:
        text = "waits: a precision was raised at this tick, so the memory measured is stale"
        return Reason(code=ReasonCode.HELD_ENLARGED, subject="batch", text=text)
    if state.cap is not None and plan.batch_size >= state.cap:
        text = f"capped at {state.cap} for {state.cap_ticks_left} more ticks after too large a batch"
        return Reason(code=ReasonCode.HELD_CAPPED, subject="batch", text=text, threshold=float(state.cap))
    if state.ticks_since_change < config.dwell_ticks:
        return Reason(code=ReasonCode.HELD_DWELL, subject="batch", text="")
    bound = noise_scale(state.noise) if config.bound_by_noise_scale else math.inf
    if plan.batch_size + config.step_up > bound:
        text = f"gradient noise scale {bound:.3g}: a larger batch would average nothing more"
        return Reason(code=ReasonCode.HELD_NOISE_SCALE, subject="batch", text=text, threshold=bound)
    return None


def _grown(
    size: int, parts: int, plan: Plan, memory: MemorySignal, config: BatchConfig, state: BatchState
) -> BatchDecision:
    change = f"{plan.batch_size} -> {size}" if size != plan.batch_size else f"{plan.num_micro_batches} -> {parts} parts"
    text = f"memory {_share(memory)} < rho_low {config.rho_low:.3g}: {change}"
    if not config.enabled:
        text = f"the cap after an out-of-memory error is lifted: {change}"
    reason = Reason(
        code=ReasonCode.MEMORY_LOW, subject="batch", text=text, value=memory.share, threshold=config.rho_low
    )
    return BatchDecision(
        batch_size=size,
        num_micro_batches=parts,
        state=replace(state, ticks_since_change=0),
        reasons=(reason,),
    )


def _share(memory: MemorySignal) -> str:
    return f"{memory.share:.3f} ({memory.window_peak_bytes / GIB:.2f} of {memory.attainable_bytes / GIB:.2f} GiB)"
