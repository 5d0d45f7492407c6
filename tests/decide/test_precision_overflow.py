"""Steps that overflow in FP16 although the loss scale can fall no further."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.decide.build import BF16, FP16, FP32, Machine, Run, apply_failed, observation_of, plan_of
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import ControlState, Decision, LayerState
from triaccel_ray.decide.precision import bar_overflowing
from triaccel_ray.records.plan import Precision, ReasonCode
from triaccel_ray.records.signals import LayerSignal

VARIANCE = {FP16: 1e-8, BF16: 1e-5, FP32: 1e-1}
CONFIG = ControlConfig(
    precision=PrecisionConfig(initial=FP32, tau_low=1e-6, tau_high=1e-3, dwell_ticks=0, patience_ticks=1),
    curvature=CurvatureConfig(tau_curv=5.0, smoothing=0.0, alpha=0.0),
    batch=BatchConfig(enabled=False),
)
NAMES = ("conv", "block", "head")
START = replace(CONFIG, precision=replace(CONFIG.precision, initial=FP16, overflow_bar_ticks=4))


def run_of(config: ControlConfig = START, supported: tuple[Precision, ...] = tuple(Precision)) -> Run:
    return Run(config, Machine(names=NAMES, supported=supported))


def step(run: Run, num_skipped: int, loss_scale: float = 1.0, **others: object) -> Decision:
    wanting_fp16 = [LayerSignal(name=name, variance=VARIANCE[FP16], supported=run.machine.supported) for name in NAMES]
    return run.step(*wanting_fp16, num_skipped=num_skipped, loss_scale=loss_scale, **others)[1]


@pytest.mark.parametrize(
    ("skipped", "loss_scale", "expected"),
    [(26, 1.0, BF16), (50, 1.0, BF16), (25, 1.0, FP16), (0, 1.0, FP16), (50, 2.0, FP16)],
)
def test_only_most_of_the_steps_at_the_smallest_scale_count(skipped, loss_scale, expected):
    decision = step(run_of(), skipped, loss_scale)
    assert set(decision.plan.precision.values()) == {expected}
    told = [(reason.subject, reason.value, reason.threshold) for reason in decision.reasons]
    layers = [(name, None, None) for name in NAMES]
    assert told == ([("precision", float(skipped), 25.0), *layers] if expected is BF16 else [])
    assert all(reason.code is ReasonCode.OVERFLOW for reason in decision.reasons)


def test_the_difference_since_the_last_tick_counts():
    run = run_of()
    assert set(step(run, 25).plan.precision.values()) == {FP16}
    assert set(step(run, 50).plan.precision.values()) == {FP16}
    decision = step(run, 76)
    assert set(decision.plan.precision.values()) == {BF16}
    assert (decision.state.step, decision.state.num_skipped) == (150, 76)


def test_the_bar_holds_for_its_ticks_and_then_the_variance_decides_again():
    run = run_of()
    seen = [step(run, 50).plan.precision["conv"] for _ in range(7)]
    assert seen == [BF16, BF16, BF16, BF16, FP16, FP16, FP16]


def test_fp32_takes_over_where_bf16_is_not_supported():
    run = run_of(supported=(FP16, FP32))
    assert set(step(run, 50).plan.precision.values()) == {FP32}
    assert set(step(run, 50).plan.precision.values()) == {FP32}


def test_it_goes_before_a_fixed_precision_and_stays():
    run = run_of(replace(START, precision=replace(START.precision, enabled=False)))
    assert set(step(run, 0).plan.precision.values()) == {FP16}
    decision = step(run, 50)
    assert set(decision.plan.precision.values()) == {BF16}
    assert [reason.code for reason in decision.reasons] == [ReasonCode.OVERFLOW] * 4
    assert {tuple(step(run, 50).plan.precision.values()) for _ in range(8)} == {(BF16,) * 3}


def test_layers_in_other_precisions_stay():
    plan = plan_of(conv=FP16, block=BF16, head=FP32)
    states = {name: LayerState(by_variance=level) for name, level in plan.precision.items()}
    observation = observation_of(plan, num_skipped=50)
    layers, _ = bar_overflowing(START.precision, observation, ControlState(layers=states), states)
    assert {name: layer.by_variance for name, layer in layers.items()} == {"conv": BF16, "block": BF16, "head": FP32}
    assert {name: layer.fp16_bar_ticks for name, layer in layers.items()} == {"conv": 4, "block": 0, "head": 0}


def test_no_steps_or_no_fp16_is_no_overflow():
    for plan, done in ((plan_of(conv=FP16), 50), (plan_of(conv=BF16), 0)):
        states = {"conv": LayerState(by_variance=plan.precision["conv"], fp16_bar_ticks=2)}
        state = ControlState(layers=states, step=done)
        layers, reasons = bar_overflowing(START.precision, observation_of(plan, num_skipped=50), state, states)
        assert (layers["conv"].fp16_bar_ticks, reasons) == (2, [])


def test_a_plan_that_could_not_be_applied_is_asked_for_again_when_it_goes_on_overflowing():
    run = run_of()
    assert set(step(run, 50, apply_fails=True).plan.precision.values()) == {BF16}
    decision = step(run, 100, faults=(apply_failed(96),))
    assert set(decision.plan.precision.values()) == {FP16}
    assert all(layer.fp16_bar_ticks == 0 for layer in decision.state.layers.values())
    assert set(step(run, 150).plan.precision.values()) == {BF16}
