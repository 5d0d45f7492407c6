"""Rules 2 and 5: the precision of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from triaccel_ray.config import PrecisionConfig
from triaccel_ray.decide.state import LayerState, nearest_supported
from triaccel_ray.plan import Precision, Reason, ReasonCode
from triaccel_ray.signals import LayerSignal, Observation


def precision_for_variance(config: PrecisionConfig, variance: float) -> Precision:
    """Returns FP16 below tau_low, FP32 from tau_high on, BF16 between (Tri-Accel, section 3.1)."""
    if variance < config.tau_low:
        return Precision.FP16
    return Precision.BF16 if variance < config.tau_high else Precision.FP32


def promoted(precision: Precision) -> Precision:
    """Returns the next higher precision; FP32 stays FP32."""
    return Precision.BF16 if precision is Precision.FP16 else Precision.FP32


def decide_precision(
    config: PrecisionConfig, observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, Precision], dict[str, LayerState], list[Reason]]:
    """Returns each layer's precision and state for the next interval, and why any changed.

    The variance rule moves in both directions only after `dwell_ticks` at one precision, and downwards only after
    `patience_ticks` votes in a row: a change costs a new step to build, and v crosses a threshold more than once when
    it drifts through. Curvature promotes at once and releases at once, because it is measured rarely anyway.
    """
    plan: dict[str, Precision] = {}
    updated: dict[str, LayerState] = {}
    reasons: list[Reason] = []
    for signal in observation.layers:
        in_force = observation.plan.precision[signal.name]
        if not config.enabled:
            plan[signal.name], updated[signal.name] = in_force, layers[signal.name]
            continue
        before = replace(layers[signal.name], ticks_since_change=layers[signal.name].ticks_since_change + 1)
        after = _settle(config, signal, before)
        chosen = _chosen(signal, after)
        if chosen is not in_force:
            reasons.append(_reason(config, signal, before, after, f"{in_force.value} -> {chosen.value}"))
            after = replace(after, ticks_since_change=0)
        plan[signal.name], updated[signal.name] = chosen, after
    return plan, updated, reasons


def keep_precision(
    observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, Precision], dict[str, LayerState]]:
    """Returns the precision in force, and states that agree with it, after a plan that could not be applied.

    What the failed plan wanted must be asked for again: by the variance rule after its dwell, by curvature at its next
    measurement. Tried again at once, a plan that does not fit would be built in vain at every other tick.
    """
    plan = {signal.name: observation.plan.precision[signal.name] for signal in observation.layers}
    updated: dict[str, LayerState] = {}
    for signal in observation.layers:
        state = replace(layers[signal.name], ticks_since_change=layers[signal.name].ticks_since_change + 1)
        if _chosen(signal, state) is not plan[signal.name]:
            state = replace(state, by_variance=plan[signal.name], held=False, lower_votes=0, ticks_since_change=0)
        updated[signal.name] = state
    return plan, updated


def _chosen(signal: LayerSignal, state: LayerState) -> Precision:
    wanted = promoted(state.by_variance) if state.held else state.by_variance
    return nearest_supported(wanted, signal.supported)


def _settle(config: PrecisionConfig, signal: LayerSignal, state: LayerState) -> LayerState:
    """Returns the state after one vote of the variance rule, with dwell and patience."""
    if signal.variance is None:
        return state
    wanted = precision_for_variance(config, signal.variance)
    lower = wanted.rank < state.by_variance.rank
    votes = state.lower_votes + 1 if lower else 0
    settled_long = state.ticks_since_change >= config.dwell_ticks
    may_move = settled_long and (not lower or votes >= config.patience_ticks)
    if wanted is state.by_variance or not may_move:
        return replace(state, lower_votes=votes)
    return replace(state, by_variance=wanted, lower_votes=0)


def _reason(config: PrecisionConfig, signal: LayerSignal, before: LayerState, after: LayerState, change: str) -> Reason:
    if signal.variance is None or after.by_variance is before.by_variance:
        code, cause = ReasonCode.CURVATURE_RELEASED, "released by curvature"
        if after.held:
            code, cause = ReasonCode.CURVATURE, "held by curvature"
        return Reason(code=code, subject=signal.name, text=f"{cause}: {change}")
    raised = after.by_variance.rank > before.by_variance.rank
    # The threshold crossed last on the way: from below to the precision settled on, or from above.
    if after.by_variance is (Precision.FP32 if raised else Precision.BF16):
        name, threshold = "tau_high", config.tau_high
    else:
        name, threshold = "tau_low", config.tau_low
    text = f"variance {signal.variance:.3g} {'>=' if raised else '<'} {name} {threshold:.3g}: {change}"
    if after.held:
        text += ", held one higher by curvature"
    return Reason(code=ReasonCode.VARIANCE, subject=signal.name, text=text, value=signal.variance, threshold=threshold)
