from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.build import BF16, FP16, FP32, Machine, control_configs, eventful_run, machines
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import Replay, initial_decision, replay

CONFIG = ControlConfig(
    precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-4),
    curvature=CurvatureConfig(tau_curv=5.0),
    batch=BatchConfig(lr_rule="adascale", oom_cooldown_ticks=10),
)
MACHINE = Machine(bytes_per_sample=15)
TICKS = 200


def log_of(config: ControlConfig = CONFIG, seed: int = 8, machine: Machine = MACHINE):
    return list(eventful_run(config, machine, seed, TICKS))


@settings(max_examples=20)
@given(control_configs(), machines(), st.integers(0, 2**32))
def test_replay_under_the_same_configuration_reproduces_every_decision(config, machine, seed):
    log = log_of(config, seed, machine)
    replayed = replay(config, log)
    assert replayed.diverged_at is None
    assert replayed.decisions == tuple(decision for _, decision in log)


@pytest.mark.parametrize("first", [1, 50])
def test_a_log_of_a_resumed_run_without_the_first_ticks_is_taken_up_after_its_first_one(first):
    log = log_of()[first:]
    replayed = replay(CONFIG, log)
    assert replayed.diverged_at is None
    assert replayed.decisions == tuple(decision for _, decision in log)
    other = replace(CONFIG, batch=replace(CONFIG.batch, oom_cooldown_ticks=1))
    assert replay(other, log).diverged_at > 0


def test_the_simulated_log_holds_every_kind_of_event():
    log = log_of()
    kinds = {fault.kind.value for observation, _ in log for fault in observation.faults}
    codes = {reason.code.value for _, decision in log for reason in decision.reasons}
    assert kinds == {"out_of_memory", "apply_failed", "capture_out_of_memory", "lowering_refused"}
    assert codes >= {"variance", "curvature", "curvature_released", "lr_scale", "memory_low", "memory_high"}
    assert codes >= {"overflow", "capture_out_of_memory"}
    assert {level for observation, _ in log for level in observation.plan.precision.values()} == {FP16, BF16, FP32}


@pytest.mark.parametrize(
    "other",
    [
        replace(CONFIG, precision=replace(CONFIG.precision, patience_ticks=5)),
        replace(CONFIG, curvature=replace(CONFIG.curvature, alpha=0.5)),
        replace(CONFIG, batch=replace(CONFIG.batch, oom_cooldown_ticks=1)),
    ],
)
def test_replay_under_other_thresholds_stops_at_the_first_plan_that_differs(other):
    log = log_of()
    replayed = replay(other, log)
    index = replayed.diverged_at
    assert len(replayed.decisions) == index + 1
    recorded = [decision.plan for _, decision in log]
    assert [decision.plan for decision in replayed.decisions[:index]] == recorded[:index]
    assert replayed.decisions[index].plan != recorded[index]


def test_a_log_altered_at_one_tick_diverges_there_and_one_without_reasons_nowhere():
    log = log_of()
    assert replay(CONFIG, [(observed, replace(decision, reasons=())) for observed, decision in log]).diverged_at is None
    observation, decision = log[57]
    log[57] = observation, replace(decision, plan=replace(decision.plan, batch_size=decision.plan.batch_size + 32))
    assert replay(CONFIG, log).diverged_at == 57


@pytest.mark.parametrize(
    "other",
    [
        replace(CONFIG, batch=replace(CONFIG.batch, start=64)),
        replace(CONFIG, batch=replace(CONFIG.batch, minimum=256, start=256)),
        replace(CONFIG, batch=replace(CONFIG.batch, accumulate=2)),
        replace(CONFIG, precision=replace(CONFIG.precision, initial=FP32)),
    ],
)
def test_another_start_diverges_at_once(other):
    log = log_of()
    initial = initial_decision(other, [(layer.name, layer.supported) for layer in log[0][0].layers])
    assert replay(other, log) == Replay(decisions=(initial,), diverged_at=0)


def test_an_empty_log_has_nothing_to_differ_in():
    assert replay(CONFIG, []) == Replay(decisions=(), diverged_at=None)
