"""Rules 2 and 5: chooses each layer's precision, and bars precisions that overflowed or were refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from triaccel_ray.config import PrecisionConfig
from triaccel_ray.decide.throughput import barred_precision
from triaccel_ray.records.plan import MINIMUM_LOSS_SCALE, Precision, Reason, ReasonCode, nearest_supported
from triaccel_ray.records.signals import LayerSignal, Observation
from triaccel_ray.records.state import ControlState, LayerState


def precision_for_variance(
    config: PrecisionConfig, variance: float, supported: Collection[Precision], *, has_bf16: bool = True
) -> Precision:
    """Returns FP16 below tau_low, FP32 from tau_high on, BF16 between (Tri-Accel, section 3.1).

    FP8 replaces FP16 in a layer that supports it. Without `has_bf16`, no layer supports BF16, and FP16 replaces it.
    """
    if variance < config.tau_low:
        return Precision.FP8 if Precision.FP8 in supported else Precision.FP16
    return bf16_or_fp16(supported, has_bf16=has_bf16) if variance < config.tau_high else Precision.FP32


def bf16_or_fp16(supported: Collection[Precision], *, has_bf16: bool) -> Precision:
    """Returns BF16, or FP16 if that is supported and no layer has BF16: on GPUs older than Ampere, as AMP does."""
    return Precision.FP16 if Precision.FP16 in supported and not has_bf16 else Precision.BF16


def promoted(precision: Precision) -> Precision:
    """Returns BF16 for FP8 and FP16, else FP32."""
    return Precision.BF16 if precision.rank < Precision.BF16.rank else Precision.FP32


def decide_precision(
    config: PrecisionConfig, observation: Observation, layers: Mapping[str, LayerState], *, may_lower: bool = True
) -> tuple[dict[str, Precision], dict[str, LayerState], list[Reason]]:
    """Returns each layer's precision and state for the next interval, and why any changed.

    The variance rule changes a precision only after `dwell_ticks`, and lowers it only after `patience_ticks`
    consecutive votes. Each change requires a new step to be built, and a variance that drifts through a threshold
    crosses it more than once. Curvature promotes and releases at once, because it is measured rarely anyway.

    Without `may_lower`, for example because the last change is not judged yet, the variance rule demotes no layer. Nor
    does a layer return to a precision in which it was slower.
    """
    if not config.enabled:
        return _keep_but_leave_fp16(observation, layers)
    has_bf16 = any(Precision.BF16 in signal.supported for signal in observation.layers)
    precision: dict[str, Precision] = {}
    updated: dict[str, LayerState] = {}
    reasons: list[Reason] = []
    for signal in observation.layers:
        name = signal.name
        in_force = observation.plan.precision[name]
        before = replace(layers[name], ticks_since_change=layers[name].ticks_since_change + 1)
        would_retry = before.too_slow is not None and not before.slow_bar_ticks and in_force.rank > before.too_slow.rank
        if would_retry and not may_lower:
            before = replace(before, slow_bar_ticks=1)  # a retry waits like any other lower precision
        after = _after_vote(config, signal, before, may_lower=may_lower, has_bf16=has_bf16)
        precision[name] = _precision_of(signal, after)
        if precision[name] is not in_force:
            reasons.append(_reason(config, signal, before, after, in_force, precision[name]))
            after = replace(after, ticks_since_change=0)
        updated[name] = after
    return precision, updated, reasons


def keep_precision(
    observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, Precision], dict[str, LayerState]]:
    """Returns the precisions in force, and states that agree with them, after a plan that could not be applied.

    Changes of the failed plan must be requested again: by the variance rule after its dwell time, by curvature at its
    next measurement. Retried at once, a plan that does not fit would be built in vain at every other tick.
    """
    precision = {signal.name: observation.plan.precision[signal.name] for signal in observation.layers}
    updated: dict[str, LayerState] = {}
    for signal in observation.layers:
        in_force, state = precision[signal.name], layers[signal.name]
        state = replace(state, ticks_since_change=state.ticks_since_change + 1)
        if _precision_of(signal, state) is not in_force:
            state = LayerState(
                by_variance=in_force,
                eigenvalues=state.eigenvalues,
                measured_once=state.measured_once,
                fp16_bar_ticks=0 if in_force is Precision.FP16 else state.fp16_bar_ticks,
                refused_bar_ticks=state.refused_bar_ticks,
                times_refused=state.times_refused,
            )
        updated[signal.name] = state
    return precision, updated


def bar_refused(
    config: PrecisionConfig, observation: Observation, layers: Mapping[str, LayerState]
) -> dict[str, LayerState]:
    """Returns the states; layers whose lower precision was refused keep theirs for a time that doubles each time."""
    updated = dict(layers)
    for name in observation.refused_layers:
        state = layers[name]
        updated[name] = replace(
            state,
            by_variance=observation.plan.precision[name],
            lower_votes=0,
            refused_bar_ticks=config.overflow_bar_ticks * 2**state.times_refused,
            times_refused=state.times_refused + 1,
        )
    return updated


def _keep_but_leave_fp16(
    observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, Precision], dict[str, LayerState], list[Reason]]:
    """Returns the precisions in force, but BF16 (or FP32, if unsupported) for FP16 layers that are barred from FP16."""
    precision: dict[str, Precision] = {}
    reasons: list[Reason] = []
    for signal in observation.layers:
        in_force = chosen = observation.plan.precision[signal.name]
        if in_force is Precision.FP16 and layers[signal.name].fp16_bar_ticks:
            chosen = nearest_supported(Precision.BF16, signal.supported)
            reasons.append(_overflow_reason(signal, in_force, chosen))
        precision[signal.name] = chosen
    return precision, dict(layers), reasons


def _precision_of(signal: LayerSignal, state: LayerState) -> Precision:
    wanted = nearest_supported(state.by_variance, signal.supported)
    if state.held:
        wanted = promoted(wanted)
    barred = barred_precision(state)
    if barred is not None and wanted.rank <= barred.rank:
        wanted = promoted(barred)
    return nearest_supported(wanted, signal.supported)


def _after_vote(
    config: PrecisionConfig, signal: LayerSignal, state: LayerState, *, may_lower: bool, has_bf16: bool
) -> LayerState:
    """Returns the state after one vote of the variance rule, with dwell and patience."""
    if signal.variance is None:
        return state
    wanted = precision_for_variance(config, signal.variance, signal.supported, has_bf16=has_bf16)
    if wanted is Precision.FP16 and state.fp16_bar_ticks:
        wanted = Precision.BF16
    lowers = wanted.rank < state.by_variance.rank
    votes = state.lower_votes + 1 if lowers else 0
    may_lower = may_lower and not state.refused_bar_ticks and votes >= config.patience_ticks
    may_change = state.ticks_since_change >= config.dwell_ticks and (may_lower or not lowers)
    if wanted is state.by_variance or not may_change:
        return replace(state, lower_votes=votes)
    return replace(state, by_variance=wanted, lower_votes=0)


def _reason(
    config: PrecisionConfig, signal: LayerSignal, before: LayerState, after: LayerState, old: Precision, new: Precision
) -> Reason:
    """Returns why a precision changed from `old` to `new`; the states are those before and after the variance vote."""
    if old is Precision.FP16 and after.fp16_bar_ticks:
        return _overflow_reason(signal, old, new)
    change = f"{old.value} -> {new.value}"
    barred = barred_precision(after)
    is_retry = after.too_slow is not None and new.rank <= after.too_slow.rank and new is after.by_variance
    if barred is not None and old.rank <= barred.rank:
        code, text = ReasonCode.SLOWER, f"{old.value} was slower: {change}"
    elif signal.variance is not None and after.by_variance is not before.by_variance:
        return _variance_reason(config, signal.name, signal.variance, before, after, change)
    elif is_retry:
        code, text = ReasonCode.SLOWER, f"tried again after {new.value} was slower: {change}"
    elif after.held:
        code, text = ReasonCode.CURVATURE, f"held by curvature: {change}"
    else:
        code, text = ReasonCode.CURVATURE_RELEASED, f"released by curvature: {change}"
    return Reason(code=code, subject=signal.name, text=text)


def _variance_reason(
    config: PrecisionConfig, layer: str, variance: float, before: LayerState, after: LayerState, change: str
) -> Reason:
    raised = after.by_variance.rank > before.by_variance.rank
    # The threshold crossed last on the way to the precision chosen, from below or from above.
    is_high = after.by_variance is Precision.FP32
    if not raised:
        is_high = after.by_variance is Precision.BF16 or variance >= config.tau_low  # or FP16 for BF16
    name, threshold = ("tau_high", config.tau_high) if is_high else ("tau_low", config.tau_low)
    text = f"variance {variance:.3g} {'>=' if raised else '<'} {name} {threshold:.3g}: {change}"
    text += ", held one higher by curvature" if after.held else ""
    return Reason(code=ReasonCode.VARIANCE, subject=layer, text=text, value=variance, threshold=threshold)


def bar_overflowing(
    config: PrecisionConfig, observation: Observation, state: ControlState, layers: Mapping[str, LayerState]
) -> tuple[dict[str, LayerState], list[Reason]]:
    """Returns the states; FP16 layers are barred from FP16 if more than half of the interval's steps overflowed.

    Nothing changes while the loss scale can still fall. At its minimum, overflow comes from the forward pass itself: no
    scale helps, and steps would be skipped forever. The layer that overflows is unknown, so all FP16 layers are barred.
    """
    barred = [name for name, level in observation.plan.precision.items() if level is Precision.FP16]
    num_steps, num_skipped = observation.step - state.step, observation.num_skipped - state.num_skipped
    most_overflowed = num_steps > 0 and 2 * num_skipped > num_steps
    if not barred or observation.loss_scale > MINIMUM_LOSS_SCALE or not most_overflowed:
        return dict(layers), []
    ticks = config.overflow_bar_ticks
    updated = dict(layers)
    for name in barred:
        updated[name] = replace(layers[name], by_variance=Precision.BF16, lower_votes=0, fp16_bar_ticks=ticks)
    text = (
        f"{num_skipped} of {num_steps} steps overflowed at loss scale {observation.loss_scale:.3g}: "
        f"{len(barred)} layers leave fp16 for {ticks} ticks"
    )
    reason = Reason(
        code=ReasonCode.OVERFLOW, subject="precision", text=text, value=num_skipped, threshold=num_steps / 2
    )
    return updated, [reason]


def _overflow_reason(signal: LayerSignal, in_force: Precision, chosen: Precision) -> Reason:
    text = f"fp16 overflows at the smallest loss scale: {in_force.value} -> {chosen.value}"
    return Reason(code=ReasonCode.OVERFLOW, subject=signal.name, text=text)
