from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.search_spaces.samples import samples
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide import initial_decision
from triaccel_ray.records.plan import Precision
from triaccel_ray.search_spaces.thresholds import (
    ANCHOR,
    BEYOND_DECADES,
    OPTIONAL,
    SPACES,
    Calibration,
    calibration,
    search_space,
    thresholds,
)

CONTROL = ControlConfig(every_steps=10, batch=BatchConfig(start=96, minimum=32, maximum=512, granularity=32))
ALL = tuple(OPTIONAL)
# What a float32 gradient can have, and a little more.
VARIANCES = st.lists(st.floats(1e-40, 1e30), min_size=1, max_size=40).map(lambda of: calibration({"conv": of}))


def assert_ordered(control: ControlConfig) -> None:
    assert 0.0 <= control.precision.tau_low < control.precision.tau_high
    assert 0.0 <= control.batch.rho_low < control.batch.rho_high <= 1.0
    assert control.every_steps >= 1


@given(sample=samples("thresholds-absolute"))
def test_absolute_samples_are_ordered_thresholds(sample: dict[str, Any]) -> None:
    assert_ordered(thresholds(sample, CONTROL))


@given(sample=samples("thresholds"), calibrated_on=VARIANCES | st.just(calibration({"conv": [1e-5] * 4})))
def test_calibrated_samples_are_ordered_thresholds(sample: dict[str, Any], calibrated_on: Calibration) -> None:
    assert_ordered(thresholds(sample, CONTROL, calibrated_on))


@given(sample=samples("thresholds-absolute"))
def test_only_the_sampled_dimensions_change(sample: dict[str, Any]) -> None:
    assert thresholds({}, CONTROL) == CONTROL
    control = thresholds(sample, CONTROL)
    assert control.curvature.alpha == sample.get("alpha", CONTROL.curvature.alpha)
    assert control.curvature.tau_curv == sample.get("tau_curv", CONTROL.curvature.tau_curv)
    if "t_ctrl" not in sample:
        assert control.every_steps == CONTROL.every_steps
    if "batch_steps" not in sample:
        assert (control.batch.step_up, control.batch.step_down) == (32, 64)
    assert control.loss_scale == CONTROL.loss_scale
    assert (control.batch.start, control.batch.granularity) == (96, 32)


def test_each_dimension_by_hand() -> None:
    sample = {
        "log10_tau_low": -7.0,
        "log10_tau_ratio": 2.0,
        "rho_high": 0.8,
        "rho_ratio": 0.5,
        "alpha": 0.5,
        "tau_curv": 20.0,
        "t_ctrl": 0.5,
        "batch_steps": "2:4",
    }
    control = thresholds(sample, CONTROL)
    assert (control.precision.tau_low, control.precision.tau_high) == pytest.approx((1e-7, 1e-5))
    assert (control.batch.rho_low, control.batch.rho_high) == (0.4, 0.8)
    assert (control.curvature.alpha, control.curvature.tau_curv) == (0.5, 20.0)
    assert (control.every_steps, control.batch.step_up, control.batch.step_down) == (5, 64, 128)
    assert thresholds({"t_ctrl": 0.5}, ControlConfig(every_steps=1)).every_steps == 1


def test_quantiles_interpolate_on_a_logarithmic_scale() -> None:
    calibrated_on = calibration({"conv": [1e-2, 1e-6, 1e-4]})
    assert calibrated_on.variances == (1e-6, 1e-4, 1e-2)
    found = [calibrated_on.quantile(q) for q in (0.0, 0.0625, 0.125, 0.3125, 0.5, 0.875, 0.9375, 1.0)]
    # Beyond what was seen at either end.
    assert found == pytest.approx([1e-6 / 10.0**BEYOND_DECADES, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1e-1, 1.0])


def test_many_samples_use_one_precision_alone_or_leave_one_out() -> None:
    chance = np.random.RandomState(0)
    calibrated_on = calibration({"conv": [1e-7, 1e-6, 1e-5, 1e-4, 1e-3]})
    space = search_space("thresholds")
    draws = [{name: domain.sample(random_state=chance) for name, domain in space.items()} for _ in range(2000)]
    found = [thresholds(sample, CONTROL, calibrated_on).precision for sample in draws]
    shares = {
        "no FP16": sum(each.tau_low < 1e-7 for each in found),
        "FP16 alone": sum(each.tau_low > 1e-3 for each in found),
        "no FP32": sum(each.tau_high > 1e-3 for each in found),
    }
    expected = {"no FP16": 1 / 8, "FP16 alone": 1 / 8, "no FP32": (1 + math.log(8)) / 8}
    assert {name: count / 2000 for name, count in shares.items()} == pytest.approx(expected, abs=0.03)


def test_unusable_variances_are_left_out_and_none_at_all_are_refused() -> None:
    assert calibration({"conv": [0.0, 1e-3, math.inf, math.nan, -1.0]}).variances == (1e-3,)
    for variances in ([], [0.0, math.nan, math.inf]):
        message = rf"variances = {len(variances)} values, none positive.*thresholds-absolute"
        with pytest.raises(ValueError, match=message):
            calibration({"conv": variances})


@given(calibrated_on=VARIANCES)
def test_the_calibrated_anchor_keeps_every_layer_in_bf16(calibrated_on: Calibration) -> None:
    sample = {name: ANCHOR[name] for name in search_space("thresholds")}
    precision = thresholds(sample, CONTROL, calibrated_on).precision
    assert all(precision.tau_low <= variance < precision.tau_high for variance in calibrated_on.variances)


@pytest.mark.parametrize("space", SPACES)
def test_the_anchor_lies_in_every_dimension(space: str) -> None:
    for name, domain in search_space(space, ALL).items():
        assert domain.is_valid(ANCHOR[name]), name


def test_optional_dimensions_are_added_on_request() -> None:
    plain, wide = search_space("thresholds"), search_space("thresholds", ("alpha", "t_ctrl"))
    assert list(plain) == list(SPACES["thresholds"])
    assert set(wide) - set(plain) == {"alpha", "t_ctrl"}


def test_what_is_no_space_dimension_or_quantile_is_refused() -> None:
    with pytest.raises(ValueError, match="space = 'tresholds': must be one of thresholds, thresholds-absolute"):
        search_space("tresholds")
    with pytest.raises(ValueError, match="dimensions = beta, lr: must be among alpha"):
        search_space("thresholds", ("lr", "alpha", "beta"))
    with pytest.raises(ValueError, match="calibration = None"):
        thresholds({"tau_low_quantile": 0.2, "tau_high_share": 0.5}, CONTROL)
    for q in (-0.1, math.nan):
        with pytest.raises(ValueError, match=r"q = .*: must lie in \[0, 1\]"):
            calibration({"conv": [1e-3]}).quantile(q)


def test_layers_begin_in_the_precision_that_the_thresholds_mean_at_the_probes_variances() -> None:
    calibrated_on = calibration({"conv": [1e-9, 1e-8, 1e-7], "mid": [1e-5], "head": [1e-2, 1e-1]})
    assert calibrated_on.layers == pytest.approx({"conv": 1e-8, "mid": 1e-5, "head": 0.055})
    control = thresholds({**ANCHOR, "tau_low_quantile": 0.5, "tau_high_share": 0.5}, CONTROL, calibrated_on)
    low, high = control.precision.tau_low, control.precision.tau_high
    expected = {
        name: Precision.FP16 if v < low else Precision.BF16 if v < high else Precision.FP32
        for name, v in calibrated_on.layers.items()
    }
    assert len(set(expected.values())) > 1
    assert control.precision.initial_layers == expected
    first = initial_decision(control, [(name, tuple(Precision)) for name in (*expected, "other")])
    assert first.plan.precision == {**expected, "other": control.precision.initial}
