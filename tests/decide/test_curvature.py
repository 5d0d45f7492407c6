import math
from dataclasses import replace

import pytest

from tests.decide.build import BF16, observation_of, plan_of
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig
from triaccel_ray.decide import LayerState
from triaccel_ray.decide.curvature import (
    has_share,
    lr_scale,
    measuring_share,
    remember_curvature,
    smooth_eigenvalues,
    smooth_noise,
)
from triaccel_ray.records.plan import Fault, FaultKind, ReasonCode
from triaccel_ray.records.signals import LayerSignal, NoiseSignal


def remember(config: CurvatureConfig, state: LayerState, eigenvalues: tuple[float, ...] | None):
    signal = LayerSignal(name="conv", eigenvalues=eigenvalues)
    layers, reasons = remember_curvature(config, observation_of(plan_of(), signal), {"conv": state})
    return layers["conv"], reasons


@pytest.mark.parametrize(
    ("past", "measured", "expected"),
    [
        (None, (1.0, 3.0, 2.0), (3.0, 2.0, 1.0)), ((4.0, 2.0), (8.0, 6.0), (5.0, 3.0)),
        ((4.0, 2.0), (6.0, 8.0), (5.0, 3.0)), ((4.0,), (8.0, 4.0), (5.0, 1.0)),
        ((4.0, 2.0), (8.0,), (5.0, 1.5)), ((1.0, 0.0), (-8.0, -9.0), (-1.25, -2.25)),
    ],
)  # fmt: skip
def test_smoothing_averages_in_descending_order_and_pads_with_zeros(past, measured, expected):
    assert smooth_eigenvalues(0.75, past, measured) == expected


def averages(*measurements, smoothing=0.5):
    state, seen = LayerState(by_variance=BF16), []
    for measured in measurements:
        state, _ = remember(CurvatureConfig(smoothing=smoothing), state, (measured,))
        seen.append(state.eigenvalues[0])
    return seen


def test_a_single_outlier_is_forgotten_and_a_rise_that_lasts_is_followed():
    assert averages(4.0, 4.0, 1e5, 4.0, 4.0) == [4.0, 4.0, 22.0, 13.0, 8.5]
    assert averages(4.0, 1e5, 4.0, 4.0) == [4.0, 22.0, 13.0, 8.5]
    assert averages(1e5, 4.0, 4.0, 4.0) == [1e5, 22.0, 13.0, 8.5]
    assert averages(-3.0, 1e5, -3.0) == [-3.0, 3.5, 0.25]
    assert averages(4.0, -1e6, 4.0) == [4.0, -3.0, 0.5]
    assert averages(-1e6, 4.0, 4.0) == [-1e6, -3.0, 0.5]
    assert averages(1.0, 1e5, 1.0, smoothing=0.0) == [1.0, 1e5, 1.0]
    assert averages(1.0, *[1e4] * 8)[-1] > 5e3
    assert averages(2.0, 18.0, 1.0) == [2.0, 10.0, 5.5]  # nothing here is an outlier


def test_noise_is_averaged_in_units_of_its_own_variance():
    first = NoiseSignal(mean_square_norm=2.0, trace_covariance=8.0)
    second = NoiseSignal(mean_square_norm=-3.0, trace_covariance=4.0)
    assert smooth_noise(0.5, None, None) is None
    once = smooth_noise(0.5, None, first)
    assert once == NoiseSignal(mean_square_norm=0.125, trace_covariance=0.5)
    assert smooth_noise(0.5, once, None) is once
    assert smooth_noise(0.5, once, NoiseSignal(mean_square_norm=1.0, trace_covariance=0.0)) is once
    assert smooth_noise(0.5, once, second) == NoiseSignal(mean_square_norm=-0.3125, trace_covariance=0.75)
    assert smooth_noise(0.0, once, second) == NoiseSignal(mean_square_norm=-0.75, trace_covariance=1.0)


@pytest.mark.parametrize(
    ("alpha", "eigenvalues", "expected"),
    [
        (0.02, (50.0, 1.0), 0.5), (0.5, (2.0,), 0.5), (0.0, (1e9,), 1.0), (0.02, (0.0,), 1.0), (0.02, (-50.0,), 1.0),
        (0.02, None, 1.0), (0.02, (), 1.0),
    ],
)  # fmt: skip
def test_lr_scale_follows_the_largest_eigenvalue(alpha, eigenvalues, expected):
    assert lr_scale(CurvatureConfig(alpha=alpha), LayerState(by_variance=BF16, eigenvalues=eigenvalues)) == expected


@pytest.mark.parametrize(("smoothing", "scales"), [(0.5, [1.0, 1 / 1.75, 1 / 1.625]), (0.0, [1 / 2, 1 / 1.5, 1 / 1.5])])
def test_a_single_measurement_acts_only_where_none_are_averaged(smoothing, scales):
    config = CurvatureConfig(alpha=0.5, tau_curv=0.5, smoothing=smoothing)
    state, found = LayerState(by_variance=BF16), []
    for eigenvalue in (2.0, 1.0, 1.0):
        state, reasons = remember(config, state, (eigenvalue,))
        found.append(lr_scale(config, state))
        assert state.held == (found[-1] < 1.0)  # rate and precision follow one value, from the same measurement on
        assert bool(reasons) == (state.held and all(scale == 1.0 for scale in found[:-1]))
        state, _ = remember(config, state, None)  # a tick without a measurement
        assert lr_scale(config, state) == found[-1]
    assert found == pytest.approx(scales)


@pytest.mark.parametrize(
    ("largest", "held_before", "held", "codes"),
    [
        (math.nextafter(5.0, 9.0), False, True, [ReasonCode.CURVATURE]),
        (math.nextafter(5.0, 9.0), True, True, []),
        (5.0, False, False, []),
        (5.0, True, False, [ReasonCode.CURVATURE_RELEASED]),
    ],
)
def test_a_layer_is_held_above_tau_curv_and_released_at_it(largest, held_before, held, codes):
    config, before = CurvatureConfig(tau_curv=5.0, smoothing=0.0), LayerState(by_variance=BF16, held=held_before)
    state, reasons = remember(config, before, (largest, 1.0))
    assert state.held is held
    assert [reason.code for reason in reasons] == codes
    assert all((reason.subject, reason.value, reason.threshold) == ("conv", largest, 5.0) for reason in reasons)
    for nothing in (None, ()):
        assert remember(config, before, nothing) == (before, [])


@pytest.mark.parametrize("enabled", [True, False])
def test_layers_are_released_when_curvature_is_measured_no_more(enabled):
    config = CurvatureConfig(tau_curv=5.0, alpha=0.1, enabled=enabled)
    before = LayerState(by_variance=BF16, eigenvalues=(9.0,), held=True)
    off = Fault(kind=FaultKind.CURVATURE_OFF, step=9, phase="curvature")
    observation = observation_of(plan_of(), LayerSignal(name="conv"), faults=(off,) if enabled else ())
    layers, (reason,) = remember_curvature(config, observation, {"conv": before})
    assert (layers["conv"].held, lr_scale(config, layers["conv"])) == (False, 1.0)
    assert (reason.code, reason.subject) == (ReasonCode.CURVATURE_RELEASED, "conv")
    assert remember_curvature(config, observation, layers) == (layers, [])


def test_measurements_have_a_share_of_the_time_on_gpus_where_slowdowns_are_reverted():
    config = ControlConfig(batch=BatchConfig(bound_by_noise_scale=True))
    assert has_share(config, "cuda")
    assert not has_share(config, "cpu")
    assert not has_share(replace(config, revert_slowdowns=False), "cuda")


@pytest.mark.parametrize(
    ("settings", "batch", "share"),
    [
        ({}, {}, 0.01), ({"alpha": 0.02}, {}, 0.04), ({"tau_curv": 50.0}, {}, 0.04),
        ({}, {"bound_by_noise_scale": True}, 0.01), ({}, {"lr_rule": "adascale"}, 0.04),
    ],
    ids=str,
)  # fmt: skip
def test_measurements_that_change_nothing_have_a_quarter_of_the_time_unless_the_batch_waits(settings, batch, share):
    config = ControlConfig(max_overhead=0.04, curvature=CurvatureConfig(**settings), batch=BatchConfig(**batch))
    assert measuring_share(config) == pytest.approx(share)
    assert measuring_share(config, is_awaited=True) == pytest.approx(0.04)
