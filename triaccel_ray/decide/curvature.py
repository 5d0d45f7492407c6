"""Rules 3 to 5: smooths eigenvalues, scales learning rates by them, and holds layers at a higher precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from triaccel_ray.config import ControlConfig, CurvatureConfig
from triaccel_ray.records.plan import FaultKind, Reason, ReasonCode
from triaccel_ray.records.signals import NoiseSignal, Observation
from triaccel_ray.records.state import LayerState

LARGEST_RATIO = 10.0
"""Limit of a single eigenvalue, as a multiple of the average of the others; averages nearer to 0 than 1 count as 1. In
EfficientNet-B0, single measurements were 30 to 100,000 times the average; one of them, averaged without a limit, slowed
most layers for 1,800 steps. In ResNet-18 they are at most 10.4 times the average."""

DRY_RUN_S = 2.0
"""Seconds that a dry run is assumed to take on a GPU: most are spent on loading kernels that no step uses."""
LOGGED_ONLY_SHARE = 0.25
"""Part of `max_overhead` for curvature that is measured for the log alone."""


def is_logged_only(config: ControlConfig) -> bool:
    """Returns whether measurements change no learning rate and no precision; they may still bound the batch."""
    scales_by_noise = config.batch.lr_rule == "adascale"
    return config.curvature.alpha == 0.0 and math.isinf(config.curvature.tau_curv) and not scales_by_noise


def has_share(config: ControlConfig, device_type: str) -> bool:
    """Returns whether measurements may take a share of the time only: not on a CPU, where equal runs do equal work."""
    return config.revert_slowdowns and device_type == "cuda"


def measuring_share(config: ControlConfig, *, is_awaited: bool = False) -> float:
    """Returns the share of the training time for measurements: all of `max_overhead` if the batch waits for one."""
    return config.max_overhead * (LOGGED_ONLY_SHARE if is_logged_only(config) and not is_awaited else 1.0)


def remember_curvature(
    config: CurvatureConfig, observation: Observation, layers: Mapping[str, LayerState]
) -> tuple[dict[str, LayerState], list[Reason]]:
    """Returns the layers' states after this tick's measurement, and a reason for each newly held or released (rule 5).

    A layer is held one precision higher while the eigenvalue that also scales its learning rate exceeds tau_curv. Only
    a measurement can release it, so that its precision does not oscillate between two measurements. If curvature is
    off, or no longer measured, all layers are released, and their learning rates return.
    """
    updated: dict[str, LayerState] = {}
    reasons: list[Reason] = []
    if not config.enabled or any(fault.kind is FaultKind.CURVATURE_OFF for fault in observation.faults):
        for name, state in layers.items():
            updated[name] = replace(state, eigenvalues=None, measured_once=False, held=False)
            if state.eigenvalues is not None:
                text = "curvature is measured no more: neither its precision nor its learning rate follows it"
                reasons.append(Reason(code=ReasonCode.CURVATURE_RELEASED, subject=name, text=text))
        return updated, reasons
    for signal in observation.layers:
        state = layers[signal.name]
        if not signal.eigenvalues:
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
            reasons.append(Reason(code=code, subject=signal.name, text=text, value=largest, threshold=config.tau_curv))
        updated[signal.name] = replace(measured, held=held)
    return updated, reasons


def smooth_eigenvalues(
    weight: float, past: tuple[float, ...] | None, measured: tuple[float, ...], *, is_second: bool = False
) -> tuple[float, ...]:
    """Returns weight * past + (1 - weight) * measured, element by element in descending order; the first as measured.

    Weight 0 returns the last measurement unchanged. Otherwise a measurement far above the past, or far below zero, is
    limited to LARGEST_RATIO times the past. At the second measurement the past is limited, too, because it is also a
    single measurement. A measurement that is only nearer to zero is not limited. The shorter spectrum is padded with
    zeros: the missing eigenvalues are zero.
    """
    if past is None or weight == 0.0:
        return tuple(sorted(measured, reverse=True))
    averages = []
    for old, new in zip_longest(past, sorted(measured, reverse=True), fillvalue=0.0):
        limited_old = _limited(old, reference=new) if is_second else old
        averages.append(weight * limited_old + (1.0 - weight) * _limited(new, reference=old))
    return tuple(sorted(averages, reverse=True))


def _limited(value: float, *, reference: float) -> float:
    lowest, highest = LARGEST_RATIO * min(reference, -1.0), LARGEST_RATIO * max(reference, 1.0)
    return min(max(value, lowest), highest)


def smooth_noise(weight: float, past: NoiseSignal | None, measured: NoiseSignal | None) -> NoiseSignal | None:
    """Returns the moving average of both moments in units of each measurement's tr Cov, starting from zero.

    In units of their own, the moments of the first measurements, with large gradients, would outweigh all later ones.
    Averaging before dividing keeps the ratio from exploding. After n measurements the averaged tr Cov is 1 - weight^n.
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
    """Returns 1 / (1 + alpha max_i lambda_i), rule 4; 1 before an eigenvalue takes effect, or if it is negative."""
    largest = acting_eigenvalue(config, state)
    return 1.0 if largest is None else 1.0 / (1.0 + config.alpha * max(largest, 0.0))


def acting_eigenvalue(config: CurvatureConfig, state: LayerState) -> float | None:
    """Returns the eigenvalue that scales the layer's learning rate and may hold its precision (rules 4 and 5), or None.

    If measurements are averaged, a single one has no effect yet: it cannot be told from an outlier.
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
