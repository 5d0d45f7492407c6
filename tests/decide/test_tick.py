import copy
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import (
    BF16,
    FP16,
    FP32,
    USUAL,
    Run,
    apply_failed,
    capture_out_of_memory,
    codes,
    control_configs,
    eventful_run,
    machines,
    memory_of,
    observation_of,
    out_of_memory,
)
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import BatchState, Decision, LayerState, decide, initial_decision
from triaccel_ray.decide.batch import ladder
from triaccel_ray.records.plan import Plan, ReasonCode
from triaccel_ray.records.signals import LayerSignal, NoiseSignal, Observation

LOW_MEMORY, HIGH_MEMORY = memory_of(0.1), memory_of(0.95)
CONFIG = ControlConfig(
    precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-3, dwell_ticks=1, patience_ticks=1),
    curvature=CurvatureConfig(tau_curv=5.0, smoothing=0.0, alpha=0.1),
    batch=BatchConfig(lr_rule="linear"),
)
NAMES = [("conv", USUAL), ("head", USUAL)]


def first_tick(config: ControlConfig, *layers: LayerSignal, **others: object) -> Decision:
    start = initial_decision(config, NAMES)
    return decide(config, observation_of(start.plan, *layers, **others), start.state)


def test_the_initial_plan_is_the_configured_one_at_full_rates():
    decision = initial_decision(CONFIG, [("conv", USUAL), ("old", (FP16, FP32))])
    levels = {"conv": BF16, "old": FP32}  # from which BF16 was withheld
    assert decision.plan == Plan(batch_size=96, precision=levels, lr_scale={"conv": 1.0, "old": 1.0})
    expected = {name: LayerState(by_variance=level, ticks_since_change=1) for name, level in levels.items()}
    assert decision.state.layers == expected
    assert decision.state.batch == BatchState(ticks_since_change=1)
    assert decision.reasons == ()


@pytest.mark.parametrize(
    ("initial", "seen", "level", "batch_size"),
    [
        (FP16, {"variance": 1e-5}, BF16, 128),
        (FP32, {"variance": 1e-8}, FP16, 128),
        *((BF16, cause, FP32, 96) for cause in ({"variance": 1.0}, {"eigenvalues": (9.0,)})),
    ],
)
def test_the_batch_grows_only_beside_changes_that_take_no_more_bytes(initial, seen, level, batch_size):
    config = replace(CONFIG, precision=replace(CONFIG.precision, initial=initial))
    decision = first_tick(config, LayerSignal(name="conv", **seen), memory=LOW_MEMORY, step_ms=1.0)
    assert (decision.plan.precision["conv"], decision.plan.batch_size) == (level, batch_size)
    assert (codes(decision, "batch") == [ReasonCode.HELD_ENLARGED]) == (batch_size == 96)


def test_retreats_are_not_limited_and_precede_the_rule_of_memory():
    raised = LayerSignal(name="conv", variance=1.0)
    assert first_tick(CONFIG, raised, memory=HIGH_MEMORY).plan.batch_size == 32
    decision = first_tick(CONFIG, raised, memory=LOW_MEMORY, faults=(out_of_memory(96, 64),))
    assert (decision.plan.precision["conv"], decision.plan.batch_size) == (FP32, 64)
    for fault in (out_of_memory(96, 64), capture_out_of_memory(96)):
        decision = first_tick(CONFIG, memory=HIGH_MEMORY, faults=(fault,))
        assert decision.plan.batch_size == 64
        assert codes(decision, "batch") == [ReasonCode(fault.kind.value), ReasonCode.LR_SCALE]


def test_reasons_come_in_the_order_of_the_rules():
    layers = (LayerSignal(name="conv", variance=1e-8, eigenvalues=(2.0,)), LayerSignal(name="head", eigenvalues=(9.0,)))
    decision = first_tick(CONFIG, *layers, memory=HIGH_MEMORY)
    assert [(reason.code.value, reason.subject) for reason in decision.reasons] == [
        ("curvature", "head"), ("variance", "conv"), ("curvature", "head"), ("lr_scale", "conv"), ("lr_scale", "head"),
        ("memory_high", "batch"), ("lr_scale", "batch"),
    ]  # fmt: skip


def test_the_learning_rates_of_the_plan_follow_curvature_and_batch():
    decision = first_tick(CONFIG, LayerSignal(name="conv", eigenvalues=(10.0,)), memory=HIGH_MEMORY)
    assert decision.plan.lr_scale == {"conv": 0.5, "head": 1.0}
    assert decision.plan.batch_lr_scale == 32 / 96
    assert "rule linear at batch 32: learning rate times 0.333" in [reason.text for reason in decision.reasons]


def test_noise_is_averaged_over_measurements_before_it_is_used():
    batch = BatchConfig(start=32, minimum=32, lr_rule="adascale", noise_smoothing=0.5)
    config = ControlConfig(curvature=CurvatureConfig(smoothing=0.9), batch=batch)
    start = initial_decision(config, NAMES)
    plan, state = replace(start.plan, batch_size=64), start.state
    for square in (0.0, 2.0):
        noise = NoiseSignal(mean_square_norm=square, trace_covariance=32.0)
        decision = decide(config, observation_of(plan, noise=noise), state)
        state = decision.state
    assert state.batch.noise == NoiseSignal(mean_square_norm=0.5 * 2 / 32, trace_covariance=0.75)
    variance = 0.75 / 32
    assert decision.plan.batch_lr_scale == (variance + 1 / 32) / (variance / 2 + 1 / 32)
    assert codes(decision, "batch") == [ReasonCode.LR_SCALE]


def test_a_plan_that_could_not_be_applied_keeps_the_precision_and_enlarges_nothing():
    faults = (apply_failed(96),)
    decision = first_tick(CONFIG, LayerSignal(name="conv", variance=1.0), memory=LOW_MEMORY, faults=faults)
    assert decision.plan == initial_decision(CONFIG, NAMES).plan
    assert codes(decision, "precision") == [ReasonCode.APPLY_FAILED]
    assert "no step for it" in decision.reasons[0].text
    assert codes(decision, "batch") == [ReasonCode.HELD_ENLARGED]


def test_a_precision_that_never_applies_is_not_asked_for_at_every_tick():
    config = replace(CONFIG, precision=replace(CONFIG.precision, dwell_ticks=4))
    run, asked, faults = Run(config), [], ()
    for tick in range(12):
        signal = LayerSignal(name="conv", variance=1.0)
        _, decision = run.step(signal, faults=faults, apply_fails=True)
        wanted = decision.plan.precision["conv"]
        faults = (apply_failed(96),) if wanted is FP32 else ()
        asked += [tick] * (wanted is FP32)
        assert run.plan.precision["conv"] is BF16
    assert asked == [0, 5, 10]


def test_everything_switched_off_keeps_the_initial_plan():
    curvature = CurvatureConfig(enabled=False, tau_curv=0.1, alpha=1.0)
    config = ControlConfig(
        precision=PrecisionConfig(enabled=False), curvature=curvature, batch=BatchConfig(enabled=False)
    )
    layer = LayerSignal(name="conv", variance=1.0, eigenvalues=(9.0,))
    for memory in (LOW_MEMORY, HIGH_MEMORY):
        decision = first_tick(config, layer, memory=memory)
        assert (decision.plan, decision.reasons) == (initial_decision(config, NAMES).plan, ())


def assert_bounds(config: ControlConfig, observation: Observation, decision: Decision) -> None:
    old, new = observation.plan, decision.plan
    assert new.batch_size in ladder(config.batch)
    asked = config.batch.accumulate
    assert asked <= new.num_micro_batches <= new.batch_size
    in_halves = not config.batch.enabled and new.num_micro_batches == 2 * asked
    assert new.num_micro_batches == asked or new.batch_size == config.batch.minimum or in_halves
    assert list(new.precision) == list(old.precision)
    assert all(new.precision[layer.name] in layer.supported for layer in observation.layers)
    assert all(0.0 < scale <= 1.0 for scale in new.lr_scale.values())
    assert 0.0 < new.batch_lr_scale <= max(new.batch_size / config.batch.start, 1.0) + 1e-12


def assert_enlarges_once(observation: Observation, decision: Decision) -> None:
    old, new = observation.plan, decision.plan
    raised = any(
        level.bytes_per_element > old.precision[name].bytes_per_element for name, level in new.precision.items()
    )
    grown = new.batch_size > old.batch_size
    whole = new.batch_size == old.batch_size and new.num_micro_batches < old.num_micro_batches
    assert raised + grown + whole <= 1
    assert observation.apply_fault is None or (new.precision, grown, whole) == (old.precision, False, False)


def assert_reasons(observation: Observation, decision: Decision) -> None:
    old, new = observation.plan, decision.plan
    batch_changed = (new.batch_size, new.num_micro_batches) != (old.batch_size, old.num_micro_batches)
    rules = {ReasonCode.OUT_OF_MEMORY, ReasonCode.APPLY_FAILED, ReasonCode.MEMORY_LOW, ReasonCode.MEMORY_HIGH,
             ReasonCode.CAPTURE_OUT_OF_MEMORY}  # fmt: skip
    undone = ReasonCode.SLOWER in codes(decision, "throughput")
    assert not batch_changed or undone or rules & set(codes(decision, "batch"))
    assert (new.batch_lr_scale != old.batch_lr_scale) == (ReasonCode.LR_SCALE in codes(decision, "batch"))
    rules = {ReasonCode.VARIANCE, ReasonCode.CURVATURE, ReasonCode.CURVATURE_RELEASED, ReasonCode.OVERFLOW,
             ReasonCode.SLOWER}  # fmt: skip
    for name, level in new.precision.items():
        assert level is old.precision[name] or rules & set(codes(decision, name))
        assert (new.lr_scale[name] != old.lr_scale[name]) == (ReasonCode.LR_SCALE in codes(decision, name))
    for reason in decision.reasons:
        if reason.code is ReasonCode.VARIANCE:
            assert (reason.value >= reason.threshold) == (">=" in reason.text)


@given(control_configs(), machines(), st.integers(0, 2**32))
def test_every_tick_of_an_eventful_run_keeps_bounds_enlarges_once_and_gives_reasons(config, machine, seed):
    state = None
    for observation, decision in eventful_run(config, machine, seed, 60):
        assert_bounds(config, observation, decision)
        assert_enlarges_once(observation, decision)
        assert_reasons(observation, decision)
        if state is not None and observation.tick % 10 == 0:  # it follows from its arguments, and leaves them alone
            before = copy.deepcopy((config, observation, state))
            assert decide(config, observation, state) == decision
            assert (config, observation, state) == before
        state = decision.state


@given(
    control_configs(enabled=True, bound_by_noise_scale=False, oom_cooldown_ticks=6), machines(), st.floats(0.0, 1e-1)
)
def test_constant_observations_bring_the_plan_to_rest(config, machine, variance):
    band = (config.batch.rho_high - config.batch.rho_low) * machine.limit_bytes
    # With a band wider than a step of the ladder in FP32 throughout, every size grown into lies in the band.
    machine = replace(machine, bytes_per_sample=math.floor(band / (config.batch.step_up * len(machine.names) * 2 + 1)))
    layers = [
        LayerSignal(name=name, variance=variance, eigenvalues=(7.0,), supported=machine.supported)
        for name in machine.names
    ]
    run = Run(config, machine)
    plans = [run.step(*layers)[1].plan for _ in range(120)]
    assert all(plan.batch_size == plans[-1].batch_size for plan in plans[-40:])
    assert all(plan.precision == plans[-1].precision for plan in plans[12:])
