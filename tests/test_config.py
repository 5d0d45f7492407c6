import math
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaccel_ray.config import (
    BatchConfig,
    ControlConfig,
    CurvatureConfig,
    ExecutionConfig,
    LossScaleConfig,
    PrecisionConfig,
    in_bounds,
    require,
)

INF, NAN = math.inf, math.nan
ABOVE_ONE, BELOW_ZERO = math.nextafter(1.0, 2.0), -math.ulp(0.0)

OUT_OF_RANGE = [
    (
        PrecisionConfig,
        "tau_low",
        "tau_low",
        "must be a finite number >= 0",
        [BELOW_ZERO, NAN, -INF, True, None, "1e-6"],
    ),
    (PrecisionConfig, "tau_low", "tau_low", "must be a finite number >= 0", [INF]),
    (PrecisionConfig, "tau_high", "tau_high", "must be a number >= 0", [BELOW_ZERO, NAN, -INF, True, None, "1e-3"]),
    (PrecisionConfig, "initial", "initial (precision)", "must be a Precision", ["fp8", "fp16", None]),
    (BatchConfig, "start", "start (batch_size)", "must be an integer >= 1", [0, -32, 96.0, NAN]),
    (BatchConfig, "maximum", "maximum (batch_max)", "must be an integer >= 1", [0, INF, 512.5]),
    (PrecisionConfig, "beta", "beta", "must lie in [0, 1)", [BELOW_ZERO, 1.0, NAN, INF, "0.9"]),
    (
        PrecisionConfig,
        "dwell_ticks",
        "dwell_ticks (precision_dwell_ticks)",
        "must be an integer >= 0",
        [2.5, INF, -1, NAN, False, None],
    ),
    (PrecisionConfig, "patience_ticks", "patience_ticks", "must be an integer >= 1", [2.5, INF, 0, -3, NAN, True]),
    (
        PrecisionConfig,
        "overflow_bar_ticks",
        "overflow_bar_ticks",
        "must be an integer >= 1",
        [2.5, INF, 0, -1, NAN, True],
    ),
    (
        CurvatureConfig,
        "method",
        "method (curvature)",
        "must be one of fisher, ggn, hessian",
        ["Fisher", "kfac", "", None],
    ),
    (CurvatureConfig, "top_k", "top_k", "must be an integer >= 1", [2.5, INF, 0, -1, NAN]),
    (
        CurvatureConfig,
        "every_steps",
        "every_steps (t_curv)",
        "must be an integer >= 1",
        [2.5, INF, 0, -1, NAN],
    ),
    (
        CurvatureConfig,
        "num_samples",
        "num_samples (b_curv)",
        "must be an integer >= 2",
        [2.5, INF, 1, 0, -1, NAN],
    ),
    (CurvatureConfig, "alpha", "alpha", "must be a finite number >= 0", [BELOW_ZERO, INF, NAN]),
    (CurvatureConfig, "tau_curv", "tau_curv", "must be a number > 0", [0.0, -1.0, -INF, NAN]),
    (
        CurvatureConfig,
        "smoothing",
        "smoothing (curvature_smoothing)",
        "must lie in [0, 1)",
        [BELOW_ZERO, 1.0, NAN, INF],
    ),
    (BatchConfig, "granularity", "granularity", "must be an integer >= 1", [2.5, INF, 0, -32, NAN]),
    (BatchConfig, "minimum", "minimum (batch_min)", "must be an integer >= 1", [2.5, INF, 0, -32, NAN]),
    (BatchConfig, "step_up", "step_up", "must be an integer >= 1", [0, -32, NAN]),
    (BatchConfig, "step_up", "step_up", "must be a multiple of granularity = 32", [16, 33]),
    (BatchConfig, "step_down", "step_down", "must be an integer >= 1", [0, -32, NAN]),
    (BatchConfig, "step_down", "step_down", "must be a multiple of granularity = 32", [16, 65]),
    (PrecisionConfig, "enabled", "enabled (adapt_precision)", "must be True or False", ["off", 1, None]),
    (PrecisionConfig, "allow_slow_precisions", "allow_slow_precisions", "must be True or False", ["off", 0]),
    (ExecutionConfig, "compile", "compile", "must be one of auto, on, off", ["always", True, None]),
    (ControlConfig, "max_overhead", "max_overhead", "must lie in (0, 1]", [0.0, -0.1, 1.5, NAN]),
    (ControlConfig, "clip_norm", "clip_norm", "must be a number > 0", [0.0, -1.0, NAN]),
    (BatchConfig, "accumulate", "accumulate", "must be an integer >= 1", [0, -1, 2.5, INF, NAN, True]),
    (ControlConfig, "max_skipped_steps", "max_skipped_steps", "must be an integer >= 1", [0, 2.5, NAN]),
    (CurvatureConfig, "enabled", "enabled (adapt_curvature)", "must be True or False", ["off", 1]),
    (BatchConfig, "enabled", "enabled (adapt_batch)", "must be True or False", ["off", 1]),
    (BatchConfig, "bound_by_noise_scale", "bound_by_noise_scale (noise_bound)", "must be True or False", ["off", 1]),
    (BatchConfig, "noise_share", "noise_share", "must be a finite number > 0", [0.0, -1.0, INF, NAN]),
    (BatchConfig, "noise_smoothing", "noise_smoothing", "must lie in [0, 1)", [BELOW_ZERO, 1.0, NAN]),
    (BatchConfig, "rho_low", "rho_low", "must lie in [0, 1]", [BELOW_ZERO, ABOVE_ONE, INF, NAN]),
    (BatchConfig, "rho_high", "rho_high", "must lie in [0, 1]", [BELOW_ZERO, ABOVE_ONE, INF, NAN]),
    (BatchConfig, "dwell_ticks", "dwell_ticks (batch_dwell_ticks)", "must be an integer >= 0", [2.5, INF, -1, NAN]),
    (BatchConfig, "oom_cooldown_ticks", "oom_cooldown_ticks", "must be an integer >= 1", [2.5, INF, 0, -1, NAN]),
    (BatchConfig, "lr_rule", "lr_rule", "must be one of none, sqrt, linear, adascale", ["Linear", "", None]),
    (
        LossScaleConfig,
        "initial",
        "initial (loss_scale)",
        "must lie in [1, 16777216]",
        [0.5, 2.0**24 + 2, INF, NAN],
    ),
    (
        LossScaleConfig,
        "growth_interval",
        "growth_interval (loss_scale_growth_interval)",
        "must be an integer >= 1",
        [2.5, INF, 0, -1, NAN],
    ),
    (ExecutionConfig, "data_on", "data_on", "must be one of device, host", ["disk", "", None]),
    (ExecutionConfig, "fuse", "fuse", "must be True or False", ["off", 1]),
    (ControlConfig, "every_steps", "every_steps (t_ctrl)", "must be an integer >= 1", [2.5, INF, 0, -50, NAN]),
]


@pytest.mark.parametrize(
    ("config", "field", "name", "rule", "value"),
    [
        pytest.param(config, field, name, rule, value, id=f"{config.__name__}.{field}={value!r}")
        for config, field, name, rule, values in OUT_OF_RANGE
        for value in values
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_rule(config, field, name, rule, value):
    with pytest.raises(ValueError, match=" = ") as error:
        config(**{field: value})
    assert str(error.value) == f"{name} = {value!r}: {rule}"


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (
            PrecisionConfig,
            {"tau_low": 1e-3, "tau_high": 1e-6},
            "tau_low, tau_high = (0.001, 1e-06): tau_low must be smaller than tau_high; exchange them. To "
            "keep one precision: --method engine-amp, or PrecisionConfig(enabled=False)",
        ),
        (
            PrecisionConfig,
            {"tau_low": 1e-3, "tau_high": 1e-3},
            "tau_low, tau_high = (0.001, 0.001): tau_low must be smaller than tau_high; exchange them. To "
            "keep one precision: --method engine-amp, or PrecisionConfig(enabled=False)",
        ),
        (
            BatchConfig,
            {"rho_low": 0.9, "rho_high": 0.7},
            "rho_low, rho_high = (0.9, 0.7): rho_low must be smaller than rho_high; exchange them. To keep one size: "
            "--method dynamic-precision, or BatchConfig(enabled=False)",
        ),
        (
            BatchConfig,
            {"rho_low": 0.8, "rho_high": 0.8},
            "rho_low, rho_high = (0.8, 0.8): rho_low must be smaller than rho_high; exchange them. To keep one size: "
            "--method dynamic-precision, or BatchConfig(enabled=False)",
        ),
        (
            BatchConfig,
            {"minimum": 128},
            "batch minimum, start, maximum = (128, 96, 512): must be in ascending order",
        ),
        (BatchConfig, {"start": 544}, "batch minimum, start, maximum = (32, 544, 512): must be in ascending order"),
        (BatchConfig, {"maximum": 64}, "batch minimum, start, maximum = (32, 96, 64): must be in ascending order"),
        (
            BatchConfig,
            {"start": 100},
            "batch minimum, start = (32, 100): must be a multiple of granularity = 32 apart",
        ),
        (
            BatchConfig,
            {"minimum": 24},
            "batch minimum, start = (24, 96): must be a multiple of granularity = 32 apart",
        ),
        (
            BatchConfig,
            {"accumulate": 33},
            "accumulate = 33: must be at most the smallest batch, 32: each part holds at least one sample",
        ),
        (BatchConfig, {"granularity": 48}, "step_up = 32: must be a multiple of granularity = 48"),
    ],
)
def test_values_that_do_not_go_together_are_refused(config, values, message):
    with pytest.raises(ValueError, match=" = ") as error:
        config(**values)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("batch", "values"),
    [
        (BatchConfig(lr_rule="adascale"), "('adascale', False)"),
        (BatchConfig(bound_by_noise_scale=True), "('sqrt', True)"),
        (BatchConfig(lr_rule="adascale", bound_by_noise_scale=True), "('adascale', True)"),
    ],
)
@pytest.mark.parametrize(
    "curvature", [CurvatureConfig(enabled=False), CurvatureConfig(method="ggn"), CurvatureConfig(method="hessian")]
)
def test_rules_that_need_the_gradient_noise_need_the_fisher(batch, values, curvature):
    with pytest.raises(ValueError, match=" = ") as error:
        ControlConfig(batch=batch, curvature=curvature)
    assert str(error.value) == (
        f"lr_rule, bound_by_noise_scale (noise_bound) = {values}: need the per-sample gradients that curvature method "
        "'fisher' measures; use it, with curvature on"
    )
    assert ControlConfig(batch=batch).batch is batch
    assert ControlConfig(curvature=curvature).curvature is curvature


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (PrecisionConfig, {"tau_low": 0.0, "tau_high": INF, "beta": 0.0, "dwell_ticks": 0, "patience_ticks": 1}),
        (PrecisionConfig, {"allow_slow_precisions": True, "overflow_bar_ticks": 1}),
        (PrecisionConfig, {"tau_low": 0, "tau_high": math.ulp(0.0), "beta": math.nextafter(1.0, 0.0)}),
        (CurvatureConfig, {"top_k": 1, "every_steps": 1, "num_samples": 2, "alpha": 0.0, "smoothing": 0.0}),
        (CurvatureConfig, {"tau_curv": math.ulp(0.0), "smoothing": math.nextafter(1.0, 0.0)}),
        (CurvatureConfig, {"tau_curv": INF, "method": "hessian"}),
        (BatchConfig, {"minimum": 1, "start": 1, "maximum": 1, "granularity": 1, "step_up": 1, "step_down": 1}),
        (BatchConfig, {"rho_low": 0.0, "rho_high": 1.0, "dwell_ticks": 0, "oom_cooldown_ticks": 1}),
        (BatchConfig, {"maximum": 500}),
        (LossScaleConfig, {"initial": 1.0, "growth_interval": 1}),
        (LossScaleConfig, {"initial": 2.0**24}),
        (ControlConfig, {"every_steps": 1}),
    ],
)
def test_the_bounds_themselves_are_allowed(config, values):
    built = config(**values)
    assert {name: getattr(built, name) for name in values} == values


@pytest.mark.parametrize("config", [PrecisionConfig, CurvatureConfig, BatchConfig, LossScaleConfig, ControlConfig])
def test_a_configuration_is_frozen_and_takes_no_positions(config):
    name = fields(config)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(config(), name, getattr(config(), name))
    with pytest.raises(TypeError):
        config(getattr(config(), name))


def test_the_defaults_are_the_papers_where_it_gives_them():
    config = ControlConfig()
    curvature = config.curvature
    assert (curvature.top_k, curvature.every_steps, curvature.num_samples) == (5, 200, 32)
    assert config.batch.start == 96
    assert config.precision.enabled
    assert curvature.enabled
    assert config.batch.enabled


def test_require_raises_only_when_the_condition_fails():
    require(True, "k", 1, "must be odd")
    with pytest.raises(ValueError, match=r"^k = 2: must be odd$"):
        require(False, "k", 2, "must be odd")


@settings(deadline=None)
@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_passes_exactly_within_its_bounds(value, one, other):
    low, high = sorted((one, other))
    assert in_bounds(value, f"[{low!r}, {high!r}]") == (low <= value <= high)
    assert in_bounds(value, f"({low!r}, {high!r})") == (low < value < high)
