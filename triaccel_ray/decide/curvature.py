"""Rules 3 to 5: smoothing of the eigenvalues, the learning rates that follow them, and which layers they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from triaccel_ray.config import CurvatureConfig
from triaccel_ray.records.plan import Reason, ReasonCode
from triaccel_ray.records.signals import NoiseSignal, Observation
from triaccel_ray.records.state import LayerState

LARGEST_RATIO = 10.0
"""How many times the average of the others a single eigenvalue may count; what is nearer to 0 than 1 is 1 here. Of an
EfficientNet-B0 single measurements lay 30 to 100,000 times above it, and one of them, averaged in whole, slowed most
layers for 1,800 steps; of a ResNet-18 they lie at most 10.4 times above."""


def remember_curvature(
    config: CurvatureConfig, observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, LayerState], list[Reason]]:
    """Returns the layers' states after this tick's measurement, and who is newly held or released (rule 5).

    A layer is held one precision higher while the eigenvalue that also scales its rate exceeds tau_curv; only a
    measurement can release it, so that a layer does not flap between two refreshes.
    """
    updated: dict[str, LayerState] = {}
    reasons: list[Reason] = []
    for signal in observation.layers:
        state = layers[signal.name]
        if not config.enabled or not signal.eigenvalues:
            updated[signal.name] = state
            continue
        eigenvalues = smooth_eigenvalues(
            config.smoothing, state.eigenvalues, signal.eigenvalues, is_second=state.measured_once
        )
        measured = replace(state, eigenvalues=eigenvalues, measured_once=state.eigenvalues is None)
        largest = acting_eigenvalue(config, measured)
        held = state.held if largest is None else largest > config.tau_curv
        if largest is not None and held != state.held:
            code = ReasonCode.CURVATURE if held else ReasonCode.CURVATURE_RELEASED
            text = f"largest eigenvalue {largest:.3g} {'>' if held else '<='} tau_curv {config.tau_curv:.3g}"
            text += ": held higher" if held else ""
            found = {"value": largest, "threshold": config.tau_curv}
            reasons.append(Reason(code=code, subject=signal.name, text=text, **found))
        updated[signal.name] = replace(measured, held=held)
    return updated, reasons


def smooth_eigenvalues(
    weight: float, past: tuple[float, ...] | None, measured: tuple[float, ...], *, is_second: bool = False
) -> tuple[float, ...]:
    """Returns weight * past + (1 - weight) * measured, element by element in descending order; the first as measured.

    Weight 0: the last as measured, whatever it is. Otherwise a measurement far above the past, or far below zero,
    counts as LARGEST_RATIO times it, and so does the past beside the second measurement, for it is a single one, too.
    One that is merely nearer to zero counts as it is. A spectrum that is shorter than the other counts as padded with
    zeros: the missing eigenvalues are zero.
    """
    if past is None or weight == 0.0:
        return tuple(sorted(measured, reverse=True))
    pairs = zip_longest(past, sorted(measured, reverse=True), fillvalue=0.0)
    limited = ((_limited(old, new) if is_second else old, _limited(new, old)) for old, new in pairs)
    return tuple(sorted((weight * old + (1.0 - weight) * new for old, new in limited), reverse=True))


def _limited(value: float, other: float) -> float:
    return min(max(value, LARGEST_RATIO * min(other, -1.0)), LARGEST_RATIO * max(other, 1.0))


def smooth_noise(weight: float, past: NoiseSignal | None, measured: NoiseSignal | None) -> NoiseSignal | None:
    """Returns the moving average of both moments in units of each measurement's tr Cov, begun at zero.

    In units of their own, the moments of the first measurements, while gradients are large, would outweigh all later
    ones. Averaging before dividing keeps their ratio from exploding. The averaged tr Cov is 1 - weight^n after n
    measurements.
    """
    if measured is None or measured.trace_covariance <= 0:
        return past
    before = past or NoiseSignal(mean_square_norm=0.0, trace_covariance=0.0)
    ratio = measured.mean_square_norm / measured.trace_covariance
    return NoiseSignal(
        mean_square_norm=weight * before.mean_square_norm + (1.0 - weight) * ratio,
        trace_covariance=weight * before.trace_covariance + (1.0 - weight),
    )


def lr_scale(config: CurvatureConfig, state: LayerState) -> float:
    """Returns 1 / (1 + alpha max_i lambda_i), rule 4; 1 before a value acts or where the curvature is negative."""
    largest = acting_eigenvalue(config, state)
    return 1.0 if largest is None else 1.0 / (1.0 + config.alpha * max(largest, 0.0))


def acting_eigenvalue(config: CurvatureConfig, state: LayerState) -> float | None:
    """Returns the eigenvalue that scales the layer's rate and may hold its precision, rules 4 and 5; None: neither.

    Where measurements are averaged, a single one does not act yet: nothing tells an outlier from it.
    """
    is_single = state.measured_once and config.smoothing > 0.0
    if not config.enabled or not state.eigenvalues or is_single:
        return None
    return state.eigenvalues[0]


def lr_reasons(old: Mapping[str, float], new: Mapping[str, float], layers: Mapping[str, LayerState]) -> list[Reason]:
    """Returns a reason for each layer whose lr scale changed."""
    reasons: list[Reason] = []
    for name, scale in new.items():
        eigenvalues = layers[name].eigenvalues
        if scale != old.get(name, 1.0) and eigenvalues:
            text = f"largest eigenvalue {eigenvalues[0]:.3g}: learning rate times {scale:.3g}"
            reasons.append(Reason(code=ReasonCode.LR_SCALE, subject=name, text=text, value=eigenvalues[0]))
    return reasons
