from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.tune.search.sample import Categorical

from tests.decide.build import USUAL
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide import initial_decision
from triaccel_ray.records.plan import Precision
from triaccel_ray.search_spaces.thresholds import (
    ANCHOR,
    MARGIN_DECADES,
    OPTIONAL,
    SPACES,
    Calibration,
    calibration,
    search_space,
    thresholds,
)

CONTROL = ControlConfig(every_steps=10, batch=BatchConfig(start=96, minimum=32, maximum=512, granularity=32))
# What a float32 gradient can have, and a little more.
VARIANCES = st.lists(st.floats(1e-40, 1e30), min_size=1, max_size=40).map(lambda of: calibration({"conv": of}))


def draws(domain: Any) -> st.SearchStrategy[Any]:
    """Values of one of Tune's domains, its bounds among them."""
    if isinstance(domain, Categorical):
        return st.sampled_from(domain.categories)
    return st.floats(domain.lower, domain.upper)


SAMPLES = st.sampled_from(sorted(SPACES)).flatmap(
    lambda space: st.fixed_dictionaries(
        {name: draws(domain) for name, domain in SPACES[space].items()},
        optional={name: draws(domain) for name, domain in OPTIONAL.items()},
    )
)


@given(sample=SAMPLES, calibrated_on=VARIANCES | st.just(calibration({"conv": [1e-5] * 4})))
def test_samples_are_ordered_thresholds(sample: dict[str, Any], calibrated_on: Calibration) -> None:
    control = thresholds(sample, CONTROL, calibrated_on)
    assert 0.0 <= control.precision.tau_low < control.precision.tau_high
    assert 0.0 <= control.batch.rho_low < control.batch.rho_high <= 1.0
    assert control.every_steps >= 1


def test_each_dimension_by_hand_and_what_is_not_sampled_stays() -> None:
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
    assert (control.batch.start, control.loss_scale) == (96, CONTROL.loss_scale)
    assert thresholds({}, CONTROL) == CONTROL
    assert thresholds({"t_ctrl": 0.5}, ControlConfig(every_steps=1)).every_steps == 1


def test_quantiles_interpolate_on_a_logarithmic_scale() -> None:
    calibrated_on = calibration({"conv": [1e-2, 1e-6, 1e-4]})
    assert calibrated_on.variances == (1e-6, 1e-4, 1e-2)
    found = [calibrated_on.quantile(q) for q in (0.0, 0.0625, 0.125, 0.3125, 0.5, 0.875, 0.9375, 1.0)]
    # Beyond what was seen at either end.
    assert found == pytest.approx([1e-6 / 10.0**MARGIN_DECADES, 1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1e-1, 1.0])


def test_unusable_variances_are_left_out_and_none_at_all_are_refused() -> None:
    assert calibration({"conv": [0.0, 1e-3, math.inf, math.nan, -1.0]}).variances == (1e-3,)
    with pytest.raises(ValueError, match=r"variances = 3 values, none positive.*thresholds-absolute"):
        calibration({"conv": [0.0, math.nan], "fc": [math.inf]})


@given(calibrated_on=VARIANCES)
def test_the_calibrated_anchor_keeps_every_layer_in_bf16(calibrated_on: Calibration) -> None:
    sample = {name: ANCHOR[name] for name in search_space("thresholds")}
    precision = thresholds(sample, CONTROL, calibrated_on).precision
    assert all(precision.tau_low <= variance < precision.tau_high for variance in calibrated_on.variances)


@pytest.mark.parametrize("space", SPACES)
def test_the_anchor_lies_in_every_dimension(space: str) -> None:
    for name, domain in search_space(space, tuple(OPTIONAL)).items():
        assert domain.is_valid(ANCHOR[name]), name


def test_what_is_no_quantile_or_has_none_to_go_by_is_refused() -> None:
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
    first = initial_decision(control, [(name, USUAL) for name in (*expected, "other")])
    assert first.plan.precision == {**expected, "other": control.precision.initial}
