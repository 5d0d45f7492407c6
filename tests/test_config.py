import math
from dataclasses import fields, is_dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triaccel_ray.config import (
    BatchConfig,
    ControlConfig,
    CurvatureConfig,
    ExecutionConfig,
    LossScaleConfig,
    PrecisionConfig,
    check_field,
    in_bounds,
)

INF, NAN = math.inf, math.nan
ABOVE_ONE, BELOW_ZERO = math.nextafter(1.0, 2.0), -math.ulp(0.0)
CONFIGS = (PrecisionConfig, CurvatureConfig, BatchConfig, LossScaleConfig, ExecutionConfig, ControlConfig)

ASCENDING = "must be in ascending order: see BatchConfig.around"
LADDER = "batch minimum, start, maximum (batch_min, batch_size, batch_max)"
START = "batch minimum, start (batch_min, batch_size)"
KEEP_PRECISION = "To keep one precision: --method engine-amp, or PrecisionConfig(enabled=False)"
KEEP_SIZE = "To keep one size: --method dynamic-precision, or BatchConfig(enabled=False)"


def test_every_number_has_its_bounds():
    every = [each for config in CONFIGS for each in fields(config) if not is_dataclass(each.default_factory)]
    numbers = [each for each in every if each.type in ("int", "float", "float | None")]
    assert numbers
    assert all(each.metadata["bounds"] for each in numbers)


@pytest.mark.parametrize(
    ("config", "field", "name", "rule", "values"),
    [
        (PrecisionConfig, "tau_low", "tau_low", "be a finite number >= 0", [BELOW_ZERO, NAN, -INF, INF, True, "1e-6"]),
        (PrecisionConfig, "tau_high", "tau_high", "be a number >= 0", [BELOW_ZERO, NAN, -INF, True, None, "1e-3"]),
        (PrecisionConfig, "initial", "initial (precision)", "be a Precision", ["fp4", "fp16", None]),
        (PrecisionConfig, "enabled", "enabled (adapt_precision)", "be True or False", ["off", 1, None]),
        (PrecisionConfig, "dwell_ticks", "dwell_ticks (precision_dwell_ticks)", "be an integer >= 0", [2.5, INF, -1]),
        (PrecisionConfig, "beta", "beta", "lie in [0, 1)", [BELOW_ZERO, 1.0, NAN, "0.9"]),
        (CurvatureConfig, "method", "method (curvature)", "be one of fisher, ggn, hessian", ["Fisher", "", None]),
        (CurvatureConfig, "num_samples", "num_samples (b_curv)", "be an integer >= 2", [2.5, INF, 1, -1, NAN]),
        (CurvatureConfig, "tau_curv", "tau_curv", "be a number > 0", [0.0, -1.0, -INF, NAN]),
        (BatchConfig, "step_up", "step_up", "be a multiple of granularity = 32", [16, 33]),
        (BatchConfig, "step_down", "step_down", "be a multiple of granularity = 32", [16, 65]),
        (BatchConfig, "rho_low", "rho_low", "lie in [0, 1]", [BELOW_ZERO, ABOVE_ONE, INF, NAN]),
        (ControlConfig, "max_overhead", "max_overhead", "lie in (0, 1]", [0.0, ABOVE_ONE, NAN]),
        (ControlConfig, "clip_norm", "clip_norm", "be a finite number > 0", [0.0, -1.0, NAN, INF]),
        (ControlConfig, "weights", "weights", "be one of fp32, split, auto", ["bf16", True, None]),
        (ControlConfig, "step_in_backward", "step_in_backward", "be True, False or auto", ["on", 1, None]),
        (ControlConfig, "shard_optimizer", "shard_optimizer", "be True, False or auto", ["on", 2, None]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_name_value_and_rule(config, field, name, rule, values):
    for value in values:
        with pytest.raises(ValueError, match=" = ") as error:
            config(**{field: value})
        assert str(error.value) == f"{name} = {value!r}: must {rule}"


def test_a_number_without_bounds_has_its_type():
    check_field("epochs", 3, int)
    with pytest.raises(ValueError, match=r"epochs = 1\.5: must be an integer$"):
        check_field("epochs", 1.5, int)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        *((PrecisionConfig, {"tau_low": 1e-3, "tau_high": high},
           f"tau_low, tau_high = (0.001, {high}): tau_low must be smaller than tau_high. {KEEP_PRECISION}")
          for high in (1e-6, 1e-3)),
        *((BatchConfig, {"rho_low": 0.8, "rho_high": high},
           f"rho_low, rho_high = (0.8, {high}): rho_low must be smaller than rho_high. {KEEP_SIZE}")
          for high in (0.7, 0.8)),
        (PrecisionConfig, {"initial_layers": {"conv": "fp4"}}, "initial_layers = 'fp4': must be a Precision"),
        (PrecisionConfig, {"initial_layers": None}, "initial_layers = None: must be a mapping"),
        (BatchConfig, {"minimum": 128}, f"{LADDER} = (128, 96, 512): {ASCENDING}"),
        (BatchConfig, {"maximum": 64}, f"{LADDER} = (32, 96, 64): {ASCENDING}"),
        (BatchConfig, {"start": 100}, f"{START} = (32, 100): must be a multiple of granularity = 32 apart"),
        (BatchConfig, {"accumulate": 33},
         "accumulate = 33: must be at most the smallest batch, 32: each part holds at least one sample"),
        (BatchConfig, {"granularity": 48}, "step_up = 32: must be a multiple of granularity = 48"),
    ],
)  # fmt: skip
def test_values_that_do_not_go_together_are_refused(config, values, message):
    with pytest.raises(ValueError, match=" = ") as error:
        config(**values)
    assert str(error.value) == message


@pytest.mark.parametrize("batch", [BatchConfig(lr_rule="adascale"), BatchConfig(bound_by_noise_scale=True)])
@pytest.mark.parametrize("curvature", [CurvatureConfig(enabled=False), CurvatureConfig(method="ggn")])
def test_rules_that_need_the_gradient_noise_need_the_fisher(batch, curvature):
    found = (batch.lr_rule, batch.bound_by_noise_scale)
    with pytest.raises(ValueError, match=" = ") as error:
        ControlConfig(batch=batch, curvature=curvature)
    assert str(error.value) == (
        f"lr_rule, bound_by_noise_scale (noise_bound) = {found}: need the per-sample gradients that curvature method "
        "'fisher' measures; use it, with curvature on"
    )
    assert ControlConfig(batch=batch).batch is batch
    assert ControlConfig(curvature=curvature).curvature is curvature


@pytest.mark.parametrize("value", [{"start": 32}, 3])
def test_a_group_of_settings_is_of_its_class(value):
    way_out = "; write BatchConfig(**batch)" if isinstance(value, dict) else ""
    with pytest.raises(TypeError, match=" = ") as error:
        ControlConfig(batch=value)
    assert str(error.value) == f"batch = {value!r}: must be a BatchConfig, not a {type(value).__name__}{way_out}"


@pytest.mark.parametrize(
    ("size", "accumulate", "smallest"), [(96, 1, 48), (7, 1, 3), (2, 1, 2), (1, 1, 1), (9, 5, 9), (8, 4, 4)]
)
def test_a_ladder_around_a_size_goes_from_half_of_it_to_eight_times_as_much(size, accumulate, smallest):
    batch = BatchConfig().around(size, accumulate=accumulate)
    assert (batch.minimum, batch.start, batch.maximum, batch.accumulate) == (smallest, size, 8 * size, accumulate)
    for bad, parts in ((0, 1), (4.5, 1), (3, 4)):
        with pytest.raises(ValueError, match=r"batch start|accumulate"):
            BatchConfig().around(bad, accumulate=parts)


def test_the_defaults_are_the_papers_where_it_gives_them():
    config = ControlConfig()
    curvature = config.curvature
    assert (curvature.top_k, curvature.every_steps, curvature.num_samples) == (5, 200, 32)
    assert config.batch.start == 96
    assert BatchConfig(maximum=500).maximum == 500  # need not be one of the sizes
    assert config.precision.enabled
    assert curvature.enabled
    assert config.batch.enabled


@given(st.floats(), st.floats(allow_nan=False, allow_infinity=False), st.floats(allow_nan=False, allow_infinity=False))
@example(0.0, 0.0, 1.0)
@example(1.0, 0.0, 1.0)
def test_a_number_passes_exactly_within_its_bounds(value, one, other):
    low, high = sorted((one, other))
    assert in_bounds(value, f"[{low!r}, {high!r}]") == (low <= value <= high)
    assert in_bounds(value, f"({low!r}, {high!r})") == (low < value < high)
