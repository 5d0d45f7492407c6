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


def retreated(batch_size: int, *faults: Fault, parts: int = 1, config: BatchConfig = CONFIG, **options: bool):
    seen = observation_of(plan_of(batch_size, parts), faults=faults)
    return retreat(config, seen, BatchState(ticks_since_change=9), **options)


RETREATS = {
    "what passed lies between two rungs": (96, 1, [out_of_memory(96, 48)], (32, 1)),
    "what passed is a rung": (256, 1, [out_of_memory(256, 128)], (128, 1)),
    "less than the smallest rung passed": (96, 1, [out_of_memory(96, 12)], (32, 3)),
    "parts of the smallest rung failed": (32, 2, [out_of_memory(32, 8)], (32, 4)),
    "parts that do not divide the batch": (32, 1, [out_of_memory(32, 11)], (32, 3)),
    "failed again, lower": (256, 1, [out_of_memory(256, 128), out_of_memory(256, 64)], (64, 1)),
    "in either order": (256, 1, [out_of_memory(256, 64), out_of_memory(256, 128)], (64, 1)),
    "a short batch failed too": (256, 1, [out_of_memory(256, 128), out_of_memory(100, 100)], (96, 1)),
    "the last batch of an epoch took one sample more": (96, 1, [out_of_memory(97, 49)], (32, 1)),
    "the size just above a rung failed": (128, 1, [out_of_memory(97, 97)], (96, 1)),
    "the short last batch of an epoch failed": (96, 1, [out_of_memory(17, 9)], (32, 4)),
    "a phase without a batch, say the optimizer": (96, 1, [out_of_memory(96)], (64, 1)),
    "the same at the smallest rung, in parts": (32, 4, [out_of_memory(32)], (32, 4)),
    "a size above the one in force never enlarges": (96, 1, [out_of_memory(256, 128)], (96, 1)),
    "the larger batch could not be applied": (96, 1, [apply_failed(128)], (96, 1)),
    "parts stay when growth could not be applied": (32, 2, [apply_failed(64)], (32, 2)),
    "applying and running both failed": (96, 1, [apply_failed(128), out_of_memory(96, 64)], (64, 1)),
    "the step fits, its capture does not, thrice": (96, 1, [capture_out_of_memory(96)] * 3, (64, 1)),
    "applying and capturing both failed": (96, 1, [apply_failed(128), capture_out_of_memory(96)], (64, 1)),
    "the parts in force were not captured": (64, 2, [capture_out_of_memory(64, 32)], (32, 1)),
}


@pytest.mark.parametrize(("batch_size", "parts", "faults", "expected"), RETREATS.values(), ids=RETREATS)
def test_a_retreat_goes_to_what_passed(batch_size, parts, faults, expected):
    decision = retreated(batch_size, *faults, parts=parts)
    assert (decision.batch_size, decision.num_micro_batches) == expected
    assert (decision.state.cap, decision.state.cap_ticks_left) == (decision.batch_size, CONFIG.oom_cooldown_ticks)


@pytest.mark.parametrize(
    ("batch_size", "parts", "config", "faults"),
    [
        (96, 1, CONFIG, []),
        (96, 1, CONFIG, [out_of_memory(0, 32, phase="curvature")]),
        *((96, 1, CONFIG, [apply_failed(size)]) for size in (96, 32, 0)),
        *((96, 1, CONFIG, [fault]) for fault in (capture_out_of_memory(97), capture_out_of_memory(96, 48))),
        (32, 1, CONFIG, [capture_out_of_memory(32)]),  # no smaller batch may be had
        (96, 2, FIXED, [capture_out_of_memory(96, 48)]),
        (3, 1, FIXED, [capture_out_of_memory(3)]),
    ],
)
def test_failures_that_ask_for_no_other_batch_are_left_to_others(batch_size, parts, config, faults):
    assert retreated(batch_size, *faults, parts=parts, config=config) is None


@pytest.mark.parametrize(
    "stricter",
    [out_of_memory(96, 48), out_of_memory(97, 49), out_of_memory(17, 9), out_of_memory(96, phase="optimizer")],
)
@pytest.mark.parametrize("config", [CONFIG, FIXED])
def test_an_out_of_memory_error_beside_a_capture_without_memory_decides_alone(stricter, config):
    expected = retreated(96, stricter, config=config)
    assert retreated(96, capture_out_of_memory(96), stricter, config=config) == expected
    assert retreated(96, stricter, capture_out_of_memory(96), config=config) == expected
    assert expected.reasons[0].code is ReasonCode.OUT_OF_MEMORY


@pytest.mark.parametrize("config", [FIXED, replace(CONFIG, start=96, minimum=96)])
@pytest.mark.parametrize(("passed", "parts"), [(96, 1), (48, 2), (13, 8)])
def test_a_batch_that_recomputation_makes_fit_keeps_its_size(config, passed, parts):
    decision = retreated(96, out_of_memory(96, passed), config=config, keeps_size=True)
    assert (decision.batch_size, decision.num_micro_batches) == (96, parts)
    assert ": the batch stays" in decision.reasons[0].text
    assert "->" not in decision.reasons[0].text


def test_the_reason_says_what_failed_and_what_passed():
    assert retreated(96, out_of_memory(96, 12)).reasons[0].text == (
        "out_of_memory in forward_backward at batch 96, 12 at once passed: 96 -> 32 in 3 parts"
    )
    assert retreated(96, apply_failed(128)).reasons[0].text == "apply_failed in apply at batch 128: the batch stays"
    in_halves = retreated(97, capture_out_of_memory(97), config=FIXED).reasons[0].text
    assert in_halves == "capture_out_of_memory in capture at batch 97: the batch stays in 2 parts"


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
    if decision is not None:
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
    if not enabled:
        assert run.decision.reasons[0].text == "the cap after an out-of-memory error is lifted: 64 -> 128"


@pytest.mark.parametrize("capturable_bytes", [3000, 1])
def test_a_batch_of_fixed_size_keeps_it_and_is_tried_whole_once_a_cap(capturable_bytes):
    config = replace(CONFIG, start=128, enabled=False, oom_cooldown_ticks=4)
    run = Run(ControlConfig(batch=config), Machine(limit_bytes=100_000, capturable_bytes=capturable_bytes))
    seen = []
    for _ in range(11):
        run.step()
        seen.append((run.plan.batch_size, run.plan.num_micro_batches))
    assert seen == [(128, 2)] * 4 + [(128, 1)] + [(128, 2)] * 4 + [(128, 1), (128, 2)]


@given(batch_configs(), machines(fixed_bytes=0), st.floats(0.05, 1.0))
def test_a_machine_with_too_little_memory_fails_once_a_cap_at_most(config, machine, fraction):
    run = Run(ControlConfig(batch=config), replace(machine, capacity_bytes=machine.limit_bytes * fraction))
    failed_at = []
    for tick in range(50):
        observation, decision = run.step()
        if observation.faults:
            failed_at.append(tick)
            assert decision.plan != observation.plan
            assert run.machine.run(decision.plan)["faults"] == ()
    assert all(later - earlier > config.oom_cooldown_ticks for earlier, later in pairwise(failed_at))
