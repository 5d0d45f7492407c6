from dataclasses import replace

import pytest

from tests.decide.build import BF16, FP16, FP32, LIMIT, Machine, Run, memory_of, observation_of, plan_of
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import decide
from triaccel_ray.decide.paper import paper_rules
from triaccel_ray.records.signals import LayerSignal

CONFIG = paper_rules(
    ControlConfig(
        precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-3),
        curvature=CurvatureConfig(alpha=0.1, tau_curv=10.0),
        batch=BatchConfig(start=96, step_up=32, step_down=64),
    )
)


def test_settings_of_our_own_rules_are_off() -> None:
    batch = BatchConfig(dwell_ticks=3, lr_rule="adascale", bound_by_noise_scale=True)
    found = paper_rules(ControlConfig(precision=PrecisionConfig(tau_low=1e-5), batch=batch))
    precision, curvature, batch = found.precision, found.curvature, found.batch
    assert not found.revert_slowdowns
    assert (precision.dwell_ticks, precision.patience_ticks, precision.allow_slow_precisions) == (0, 1, True)
    assert (curvature.method, curvature.smoothing, curvature.alpha) == ("ggn", 0.0, 0.02)
    by_power_iteration = paper_rules(ControlConfig(curvature=CurvatureConfig(method="hessian")))
    assert by_power_iteration.curvature.method == "hessian"
    assert CONFIG.curvature.alpha == 0.1  # a value of the user's own is kept
    assert (batch.dwell_ticks, batch.oom_cooldown_ticks, batch.lr_rule) == (0, 1, "none")
    assert (batch.bound_by_noise_scale, batch.counts_idle_memory, precision.tau_low) == (False, True, 1e-5)


def run() -> Run:
    return Run(CONFIG, Machine(names=("conv",)))


def layer(variance: float, *eigenvalues: float) -> LayerSignal:
    return LayerSignal(name="conv", variance=variance, eigenvalues=eigenvalues or None)


def test_precision_follows_the_variance_at_every_tick() -> None:
    loop = run()
    variances = [1e-9, 1.0, 1e-9, 1e-6, 1e-3, 1e-4]
    found = [loop.step(layer(each), memory=memory_of())[1].plan.precision["conv"] for each in variances]
    assert found == [FP16, FP32, FP16, BF16, FP32, BF16]  # tau_low and tau_high belong to the higher precision


def test_the_first_eigenvalues_scale_the_rate_and_promote_until_later_ones_fall() -> None:
    loop = run()
    seen = [(20.0, 5.0), (), (4.0, 3.0)]
    plans = [loop.step(layer(1e-4, *each), memory=memory_of())[1].plan for each in seen]
    assert [plan.precision["conv"] for plan in plans] == [FP32, FP32, BF16]
    assert [plan.lr_scale["conv"] for plan in plans] == pytest.approx([1 / 3.0, 1 / 3.0, 1 / 1.4])


@pytest.mark.parametrize(("share", "size"), [(0.69, 128), (0.7, 96), (0.9, 96), (0.91, 32)])
def test_the_batch_follows_the_share_of_the_whole_memory_at_every_tick(share: float, size: int) -> None:
    memory = replace(memory_of(share), idle_bytes=round(0.6 * LIMIT))
    seen = observation_of(plan_of(96), memory=memory, step_ms=1.0, adapting_ms=1e6, samples_left=1)
    plan = decide(CONFIG, seen, run().decision.state).plan
    assert plan.batch_size == size  # whatever it costs; above the idle process, the first share would be 0.23
    assert plan.batch_lr_scale == 1.0
