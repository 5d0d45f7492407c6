import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import (
    Machine,
    Run,
    apply_failed,
    batch_configs,
    capture_out_of_memory,
    machines,
    observation_of,
    out_of_memory,
    plan_of,
)
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide import BatchState
from triaccel_ray.decide.batch import ladder, retreat
from triaccel_ray.records.plan import Fault, ReasonCode

CONFIG = BatchConfig(rho_low=0.7, rho_high=0.9, oom_cooldown_ticks=5)
FIXED = replace(CONFIG, enabled=False)
"""Start 96, rungs 32, 64, ..., 512."""


def retreated(batch_size: int, *faults: Fault, parts: int = 1, config: BatchConfig = CONFIG):
    return retreat(config, observation_of(plan_of(batch_size, parts), faults=faults), BatchState(ticks_since_change=9))


@pytest.mark.parametrize(
    ("batch_size", "parts", "faults", "expected"),
    [
        pytest.param(96, 1, [out_of_memory(96, 48)], (32, 1), id="what passed lies between two rungs"),
        pytest.param(256, 1, [out_of_memory(256, 128)], (128, 1), id="what passed is a rung"),
        pytest.param(96, 1, [out_of_memory(96, 12)], (32, 3), id="less than the smallest rung passed"),
        pytest.param(32, 1, [out_of_memory(32, 16)], (32, 2), id="the smallest rung failed"),
        pytest.param(32, 2, [out_of_memory(32, 8)], (32, 4), id="parts of the smallest rung failed"),
        pytest.param(32, 1, [out_of_memory(32, 11)], (32, 3), id="parts that do not divide the batch"),
        pytest.param(32, 1, [out_of_memory(32, 1)], (32, 32), id="one sample at once"),
        pytest.param(256, 1, [out_of_memory(256, 128), out_of_memory(256, 64)], (64, 1), id="failed again, lower"),
        pytest.param(256, 1, [out_of_memory(256, 64), out_of_memory(256, 128)], (64, 1), id="in either order"),
        pytest.param(
            256, 1, [out_of_memory(256, 128), out_of_memory(100, 100)], (96, 1), id="a short batch failed too"
        ),
        pytest.param(96, 1, [out_of_memory(97, 49)], (32, 1), id="the last batch of an epoch took one sample more"),
        pytest.param(128, 1, [out_of_memory(97, 97)], (96, 1), id="the size just above a rung failed"),
        pytest.param(96, 1, [out_of_memory(17, 9)], (32, 4), id="the short last batch of an epoch failed"),
        pytest.param(96, 1, [out_of_memory(96)], (64, 1), id="a phase without a batch, say the optimizer"),
        pytest.param(32, 1, [out_of_memory(32)], (32, 1), id="the same at the smallest rung"),
        pytest.param(32, 4, [out_of_memory(32)], (32, 4), id="the same in parts"),
        pytest.param(96, 1, [out_of_memory(256, 128)], (96, 1), id="a size above the one in force never enlarges"),
        pytest.param(96, 1, [apply_failed(128)], (96, 1), id="the larger batch could not be applied"),
        pytest.param(96, 1, [apply_failed(192)], (96, 1), id="the much larger batch could not be applied"),
        pytest.param(32, 2, [apply_failed(64)], (32, 2), id="parts stay when growth could not be applied"),
        pytest.param(96, 1, [apply_failed(128), out_of_memory(96, 64)], (64, 1), id="applying and running both failed"),
        pytest.param(96, 1, [capture_out_of_memory(96)], (64, 1), id="the step fits, its capture does not"),
        pytest.param(96, 1, [capture_out_of_memory(96)] * 3, (64, 1), id="tried again, one rung all the same"),
        pytest.param(
            96, 1, [apply_failed(128), capture_out_of_memory(96)], (64, 1), id="applying and capturing both failed"
        ),
        pytest.param(64, 2, [capture_out_of_memory(64, 32)], (32, 1), id="the parts in force were not captured"),
    ],
)
def test_a_retreat_goes_to_what_passed(batch_size, parts, faults, expected):
    decision = retreated(batch_size, *faults, parts=parts)
    assert (decision.batch_size, decision.num_micro_batches) == expected


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [out_of_memory(0, 32, phase="curvature")],
        [out_of_memory(0, 512, phase="evaluation")],
        [apply_failed(96)],
        [apply_failed(32)],
        [apply_failed()],
        [capture_out_of_memory(17)],
        [capture_out_of_memory(97)],
        [capture_out_of_memory(96, 48)],
    ],
)
def test_failures_that_say_nothing_of_the_batch_are_left_to_others(faults):
    assert retreated(96, *faults) is None


def test_a_capture_without_memory_is_left_as_it_is_where_no_smaller_batch_may_be_had():
    assert retreated(32, capture_out_of_memory(32)) is None
    assert retreated(32, capture_out_of_memory(32, 16), parts=2) is None
    assert retreated(96, capture_out_of_memory(96, 48), config=FIXED, parts=2) is None
    assert retreated(3, capture_out_of_memory(3), config=FIXED) is None


def test_a_batch_of_fixed_size_that_finds_no_memory_to_be_captured_goes_in_halves():
    decision = retreated(97, capture_out_of_memory(97), config=FIXED)
    assert (decision.batch_size, decision.num_micro_batches) == (97, 2)
    assert (decision.state.cap, decision.state.cap_ticks_left) == (97, FIXED.oom_cooldown_ticks)
    assert decision.reasons[0].text == "capture_out_of_memory in capture at batch 97: 97 -> 97 in 2 parts"
    stricter = out_of_memory(97, 25)
    assert retreated(97, capture_out_of_memory(97), stricter, config=FIXED) == retreated(97, stricter, config=FIXED)


@pytest.mark.parametrize(
    "stricter",
    [out_of_memory(96, 48), out_of_memory(97, 49), out_of_memory(17, 9), out_of_memory(96, phase="optimizer")],
)
def test_an_out_of_memory_error_beside_a_capture_without_memory_decides_alone(stricter):
    expected = retreated(96, stricter)
    assert retreated(96, capture_out_of_memory(96), stricter) == expected
    assert retreated(96, stricter, capture_out_of_memory(96)) == expected
    assert expected.reasons[0].code is ReasonCode.OUT_OF_MEMORY


def test_the_reason_says_what_failed_and_what_passed():
    assert retreated(96, out_of_memory(96, 12)).reasons[0].text == (
        "out_of_memory in forward_backward at batch 96, 12 at once passed: 96 -> 32 in 3 parts"
    )
    assert retreated(32, out_of_memory(32, 16)).reasons[0].text.endswith(": 32 -> 32 in 2 parts")
    assert retreated(96, apply_failed(128)).reasons[0].text == "apply_failed in apply at batch 128: 96 -> 96"
    assert retreated(96, capture_out_of_memory(96)).reasons[0].text == (
        "capture_out_of_memory in capture at batch 96: 96 -> 64"
    )


@given(batch_configs(), st.data())
def test_a_retreat_shrinks_onto_the_ladder_and_passes_no_more_at_once_than_passed_before(config, data):
    size = data.draw(st.sampled_from(ladder(config)))
    parts = data.draw(st.integers(config.accumulate, size))
    passed = data.draw(st.integers(1, max(size // (2 * parts), 1)))
    decision = retreated(size, out_of_memory(size, passed), parts=parts, config=config)
    assert decision.batch_size in ladder(config)
    assert decision.batch_size < size or size == config.minimum
    assert decision.num_micro_batches == config.accumulate or decision.batch_size == config.minimum
    assert math.ceil(decision.batch_size / decision.num_micro_batches) <= passed
    assert decision.state.cap == decision.batch_size


@given(batch_configs(), st.data())
def test_a_capture_without_memory_costs_an_elastic_batch_one_rung_and_any_other_one_split(config, data):
    rungs = ladder(config)
    size = data.draw(st.sampled_from(rungs))
    parts = config.accumulate
    at_once = math.ceil(size / parts)
    decision = retreated(size, capture_out_of_memory(size, at_once), parts=parts, config=config)
    if not config.enabled:
        assert (decision is None) == (at_once < 4)
        assert decision is None or (decision.batch_size, decision.num_micro_batches) == (size, 2 * parts)
    elif size == config.minimum:
        assert decision is None
    else:
        assert (decision.batch_size, decision.num_micro_batches) == (rungs[rungs.index(size) - 1], parts)
        assert (decision.state.cap, decision.state.cap_ticks_left) == (decision.batch_size, config.oom_cooldown_ticks)


@pytest.mark.parametrize("oom_cooldown_ticks", [1, 2, 8])
@pytest.mark.parametrize("enabled", [False, True])
def test_the_cap_holds_for_its_ticks_and_is_then_lifted(enabled, oom_cooldown_ticks):
    config = replace(CONFIG, start=128, oom_cooldown_ticks=oom_cooldown_ticks, enabled=enabled)
    run = Run(ControlConfig(batch=config), Machine(limit_bytes=100_000, capacity_bytes=3000))
    assert run.batch_sizes(1) == [64]
    run.machine = replace(run.machine, capacity_bytes=math.inf)
    expected = 96 if enabled else 128
    assert run.batch_sizes(oom_cooldown_ticks) == [64] * (oom_cooldown_ticks - 1) + [expected]


@pytest.mark.parametrize("capturable_bytes", [3000, 1])
def test_a_batch_of_fixed_size_keeps_it_and_is_tried_whole_once_a_cap(capturable_bytes):
    config = replace(CONFIG, start=128, enabled=False, oom_cooldown_ticks=4)
    run = Run(ControlConfig(batch=config), Machine(limit_bytes=100_000, capturable_bytes=capturable_bytes))
    seen = []
    for _ in range(11):
        run.step()
        seen.append((run.plan.batch_size, run.plan.num_micro_batches))
    assert seen == [(128, 2)] * 4 + [(128, 1)] + [(128, 2)] * 4 + [(128, 1), (128, 2)]


def test_parts_appear_when_the_smallest_batch_fails_and_go_when_memory_frees():
    config = ControlConfig(batch=replace(CONFIG, start=32, maximum=64))
    run = Run(config, Machine(fixed_bytes=0, bytes_per_sample=100, limit_bytes=50_000, capacity_bytes=3000))
    run.step()
    assert (run.plan.batch_size, run.plan.num_micro_batches) == (32, 4)
    run.machine = replace(run.machine, capacity_bytes=math.inf)
    seen = []
    for _ in range(8):
        run.step()
        seen.append((run.plan.batch_size, run.plan.num_micro_batches))
    assert seen == [(32, 4)] * 4 + [(32, 2), (32, 1), (64, 1), (64, 1)]


def test_a_plan_that_cannot_grow_is_asked_for_once_a_cap():
    run = Run(ControlConfig(batch=CONFIG), Machine(limit_bytes=100_000))
    asked, faults = [], ()
    for tick in range(18):
        before = run.plan.batch_size
        _, decision = run.step(faults=faults, apply_fails=True)
        faults = ()
        assert run.plan.batch_size == before
        if decision.plan.batch_size > before:
            asked.append(tick)
            faults = (apply_failed(decision.plan.batch_size),)
    assert asked == [0, 6, 12]


@given(batch_configs(), machines(fixed_bytes=0), st.floats(0.05, 1.0))
def test_a_machine_with_too_little_memory_fails_once_a_cap_at_most(config, machine, fraction):
    run = Run(ControlConfig(batch=config), replace(machine, capacity_bytes=machine.limit_bytes * fraction))
    failed_at = []
    for tick in range(100):
        observation, decision = run.step()
        if observation.faults:
            failed_at.append(tick)
            assert decision.plan != observation.plan
            assert run.machine.run(decision.plan)[1] == ()
    assert all(later - earlier > config.oom_cooldown_ticks for earlier, later in pairwise(failed_at))


@given(batch_configs(enabled=True), machines(fixed_bytes=0), st.floats(0.05, 1.0))
def test_a_size_that_could_not_be_captured_is_closed_for_a_cap(config, machine, fraction):
    run = Run(ControlConfig(batch=config), replace(machine, capturable_bytes=machine.limit_bytes * fraction))
    closed_at, closed = -config.oom_cooldown_ticks, 0
    for tick in range(100):
        observation, decision = run.step()
        size = observation.plan.batch_size
        if observation.faults and size > config.minimum:
            closed_at, closed = tick, size
            assert decision.plan.batch_size == size - config.granularity
        assert decision.plan.batch_size < closed or tick - closed_at >= config.oom_cooldown_ticks
        assert decision.plan.num_micro_batches == config.accumulate


@given(batch_configs(enabled=True, bound_by_noise_scale=False), machines(fixed_bytes=0))
def test_after_a_failure_has_passed_the_batch_grows_back(config, machine):
    run = Run(ControlConfig(batch=config), replace(machine, capacity_bytes=machine.limit_bytes * 0.1))
    run.batch_sizes(20)
    run.machine = machine
    largest = max(run.batch_sizes(200))
    assert (
        machine.used_bytes(run.plan, largest) >= config.rho_low * machine.limit_bytes or largest == ladder(config)[-1]
    )
