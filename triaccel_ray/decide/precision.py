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
        state = _settle(config, signal, layers[signal.name])
        wanted = promoted(state.by_variance) if state.held else state.by_variance
        chosen = nearest_supported(wanted, signal.supported)
        changed = chosen is not in_force
        if changed:
            reasons.append(_reason(config, signal, state, in_force, chosen))
        plan[signal.name] = chosen
        updated[signal.name] = replace(state, ticks_since_change=0 if changed else state.ticks_since_change + 1)
    return plan, updated, reasons


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


def _reason(
    config: PrecisionConfig, signal: LayerSignal, state: LayerState, before: Precision, after: Precision
) -> Reason:
    if state.held and after.rank > before.rank:
        text = f"held by curvature: {before.value} -> {after.value}"
        return Reason(code=ReasonCode.CURVATURE, subject=signal.name, text=text)
    if signal.variance is None:
        return Reason(code=ReasonCode.CURVATURE_RELEASED, subject=signal.name, text=f"{before.value} -> {after.value}")
    # The threshold that separates the two precisions: tau_high above BF16, tau_low below.
    threshold = config.tau_high if max(before.rank, after.rank) == Precision.FP32.rank else config.tau_low
    relation = ">=" if after.rank > before.rank else "<"
    name = "tau_high" if threshold == config.tau_high else "tau_low"
    text = f"variance {signal.variance:.3g} {relation} {name} {threshold:.3g}: {before.value} -> {after.value}"
    return Reason(code=ReasonCode.VARIANCE, subject=signal.name, text=text, value=signal.variance, threshold=threshold)
