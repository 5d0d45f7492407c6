import math
import random
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import (
    BF16,
    FP16,
    FP32,
    MIDDLE,
    Loop,
    Machine,
    Run,
    apply_failed,
    codes,
    lowering_refused,
    memory_of,
)
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import Decision
from triaccel_ray.decide.throughput import EFFICIENT_SHARE, bar_undone, efficient_size
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision, ReasonCode
from triaccel_ray.records.signals import LayerSignal
from triaccel_ray.records.state import BatchState, Change, LayerState

CONFIG = ControlConfig(
    precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-3, dwell_ticks=0, patience_ticks=1, overflow_bar_ticks=6),
    curvature=CurvatureConfig(enabled=False),
    batch=BatchConfig(enabled=False, oom_cooldown_ticks=6),
)
GROWING = replace(CONFIG, batch=BatchConfig(oom_cooldown_ticks=6))
LOW, HIGH = (LayerSignal(name="conv", variance=value) for value in (1e-9, 1.0))


def slow_in_fp16(plan: Plan) -> float:
    return 100.0 if plan.precision["conv"] is FP16 else 10.0


def lowered() -> Loop:
    """A loop that has just lowered its layer, which will be slower."""
    loop = Loop(CONFIG, slow_in_fp16)
    loop.run(2)
    loop.layer = LOW
    assert loop.tick().plan.precision["conv"] is FP16
    return loop


def test_a_lower_precision_that_is_slower_is_undone():
    loop = lowered()
    assert loop.tick().plan.precision["conv"] is FP16  # a first slow interval may be chance
    undone = loop.tick()
    assert undone.plan.precision["conv"] is BF16
    assert codes(undone, "throughput") == codes(undone, "conv") == [ReasonCode.SLOWER]
    reason = undone.reasons[0]
    assert "lower precision of conv is slower" in reason.text
    assert (reason.value, reason.threshold) == (pytest.approx(100.0 / 96), pytest.approx(10.0 / 96))


def test_of_a_change_that_is_refused_in_part_the_rest_is_judged():
    config = replace(CONFIG, precision=replace(CONFIG.precision, initial=FP32, tau_high=math.inf))
    run = Run(config, Machine(names=("kept", "lowered")))
    signals = [LayerSignal(name=name, variance=1e-5) for name in ("kept", "lowered")]

    def tick(step_ms: float, **others: Any) -> Decision:
        return run.step(*signals, memory=memory_of(0.8), step_ms=step_ms, **others)[1]

    run.plan = replace(run.plan, precision=dict.fromkeys(run.plan.precision, FP32))
    assert set(tick(10.0).plan.precision.values()) == {BF16}
    run.plan = replace(run.plan, precision={"kept": FP32, "lowered": BF16})
    assert tick(100.0, faults=(lowering_refused("kept"),)).plan.precision == {"kept": FP32, "lowered": BF16}
    undone = tick(100.0)
    assert set(undone.plan.precision.values()) == {FP32}
    assert "lower precision of lowered is slower" in undone.reasons[0].text


def test_it_is_tried_again_after_a_bar_that_doubles_each_time():
    loop = Loop(CONFIG, slow_in_fp16, LOW)
    slow_ticks = [index for index, decision in enumerate(loop.run(100)) if decision.plan.precision["conv"] is FP16]
    # Two intervals in FP16 each time, and bars of 6, 12, 24 and 48 ticks.
    starts = [tick for tick in slow_ticks if tick - 1 not in slow_ticks]
    assert [later - earlier for earlier, later in pairwise(starts)] == [8, 14, 26, 50]


IN_FP32 = replace(CONFIG, precision=replace(CONFIG.precision, initial=FP32))


@pytest.mark.parametrize(
    ("config", "slow", "layers", "expected"),
    [
        (replace(CONFIG, revert_slowdowns=False), FP16, [LOW] * 23, [FP16] * 20),
        (CONFIG, FP32, [MIDDLE] * 2 + [HIGH] * 20, [FP32] * 20),  # a promotion is made for accuracy
        (IN_FP32, FP16, [HIGH] * 2 + [LOW] * 3, [FP16, FP16, FP32]),  # back by two levels, to where it began
        (CONFIG, FP16, [MIDDLE] * 2 + [LOW] + [HIGH] * 3, [FP32]),  # a promotion ends the judgement
    ],
)
def test_only_a_demotion_is_undone_and_only_under_the_rule(config, slow, layers, expected):
    loop = Loop(config, lambda plan: 100.0 if plan.precision["conv"] is slow else 10.0)
    seen = []
    for loop.layer in layers:
        seen.append(loop.tick().plan.precision["conv"])
    assert seen[-len(expected) :] == expected


def test_a_larger_batch_that_is_slower_a_sample_is_undone_and_capped():
    loop = Loop(GROWING, lambda plan: 10.0 if plan.batch_size == 96 else 40.0)
    loop.run(2)
    loop.share = 0.1
    sizes = [decision.plan.batch_size for decision in loop.run(9)]
    assert sizes == [128, 128, 96, 96, 96, 96, 96, 96, 128]
    assert loop.state.batch.times_slow == 1


def test_small_slowdowns_of_growing_batches_do_not_add_up():
    loop = Loop(GROWING, lambda plan: plan.batch_size * (plan.batch_size / 96) ** 0.5)
    loop.run(2)
    loop.share = 0.1
    sizes = [decision.plan.batch_size for decision in loop.run(40)]
    assert max(sizes) == 160  # 1.29 times as long a sample as 96: undone
    assert sizes.count(128) > 2 * sizes.count(160)


@pytest.mark.parametrize("pressure", [True, False])
def test_a_batch_grows_again_after_it_shrank_or_the_machine_became_slower(pressure: bool):
    slowness = 1.0
    loop = Loop(GROWING, lambda plan: slowness * (8.0 + 0.02 * plan.batch_size))
    loop.share = 0.1
    loop.run(30)
    assert loop.plan.batch_size == 512
    loop.share, slowness = (0.95, 1.0) if pressure else (0.1, 2.0)
    loop.run(4)
    loop.share = 0.1
    assert pressure == (loop.plan.batch_size < 512)
    seen = loop.run(60)
    assert loop.plan.batch_size == 512
    assert not any(codes(each, "throughput") for each in seen)


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_batch_grows_once_its_steps_are_timed(is_judged: bool):
    loop = Loop(replace(GROWING, revert_slowdowns=is_judged), lambda plan: None)
    loop.share = 0.1
    assert {decision.plan.batch_size > 96 for decision in loop.run(8)[1:]} == {not is_judged}
    loop.cost = lambda plan: 10.0
    loop.run(2)
    assert loop.plan.batch_size > 96


def test_growth_waits_while_a_change_is_doubtful():
    costs = iter([10.0, 10.0, 100.0, 10.0, 10.0])
    loop = Loop(replace(GROWING, batch=BatchConfig(dwell_ticks=0)), lambda plan: next(costs))
    loop.tick()
    loop.layer = LOW
    assert loop.tick().plan.precision["conv"] is FP16
    loop.share = 0.1
    held = loop.tick()
    assert (held.plan.batch_size, codes(held, "batch")) == (96, [ReasonCode.HELD_UNJUDGED])
    assert loop.tick().plan.batch_size == 128


def test_a_layer_held_by_curvature_is_barred_by_what_it_computes_in():
    config = replace(CONFIG, curvature=CurvatureConfig(tau_curv=1.0, smoothing=0.0, alpha=0.0))
    loop = Loop(config, lambda plan: 100.0 if plan.precision["conv"] is BF16 else 10.0)
    steep = replace(HIGH, eigenvalues=(5.0,))
    loop.layer = steep
    loop.run(3)
    loop.layer = replace(LOW, eigenvalues=(5.0,))
    loop.run(4)
    layer = loop.state.layers["conv"]
    assert (loop.plan.precision["conv"], layer.by_variance, layer.held) == (FP32, FP16, True)


@given(noise=st.lists(st.floats(0.9, 1.1), min_size=60, max_size=60))
def test_noise_of_a_tenth_undoes_nothing(noise: list[float]):
    factors = iter(noise)
    loop = Loop(GROWING, lambda plan: 10.0 * plan.batch_size / 96 * next(factors), LOW)
    loop.share = 0.1
    decisions = loop.run(60)
    assert not any(reason.code is ReasonCode.SLOWER for decision in decisions for reason in decision.reasons)
    assert loop.plan.batch_size == GROWING.batch.maximum


def test_a_change_of_which_no_time_is_known_is_kept_after_a_while():
    loop = lowered()
    loop.cost = lambda plan: None
    loop.run(5)
    assert loop.state.throughput.change is not None
    loop.tick()
    assert loop.state.throughput.change is None
    assert loop.plan.precision["conv"] is FP16


@pytest.mark.parametrize(("before", "barred"), [(FP32, BF16), (BF16, FP16), (FP16, Precision.FP8)])
def test_an_undone_lowering_bars_the_next_lower_precision(before: Precision, barred: Precision):
    change = Change(ms_per_sample=1.0, precision={"conv": before})
    layers, _ = bar_undone(CONFIG, change, {"conv": LayerState(by_variance=FP16)}, BatchState())
    assert layers["conv"].too_slow is barred


def test_a_plan_that_could_not_be_applied_is_not_judged():
    loop = lowered()
    loop.plan = replace(loop.plan, precision={"conv": BF16})  # still the one before, which is slower now by chance
    loop.cost = lambda plan: 100.0
    loop.run(3)
    layer = loop.state.layers["conv"]
    assert (layer.too_slow, layer.times_slow) == (None, 0)


def test_step_times_before_a_plan_that_a_resumed_run_cannot_go_on_with_do_not_count():
    loop = lowered()
    assert loop.state.throughput.change is not None
    fault = Fault(kind=FaultKind.PLAN_REPLACED, step=1, phase="resume", detail="fp16 is not offered")
    loop.tick(faults=(fault,))
    assert loop.state.throughput.change is None
    assert len(loop.state.throughput.intervals) == 1


class Graphs(Loop):
    """A device on which a new batch size costs `price` milliseconds, and a step `fixed` plus 0.01 for each sample."""

    def __init__(self, *, fixed: float, price: float, first: float = 1000.0, samples_left: int = 10**6) -> None:
        super().__init__(replace(CONFIG, batch=BatchConfig()), lambda plan: fixed + 0.01 * plan.batch_size)
        self.price, self.spent, self.left, self.share = price, first, samples_left, 0.01
        self.is_compiled = False

    def tick(self, **others: Any) -> Decision:
        before, seen = self.plan.batch_size, {"samples_left": self.left, "is_compiled": self.is_compiled}
        decision = super().tick(adapting_ms=self.spent, **seen, **others)
        if self.plan.batch_size != before:
            self.spent += self.price
        return decision

    def sizes(self, num_ticks: int = 12) -> list[int]:
        sizes = [self.plan.batch_size, *(decision.plan.batch_size for decision in self.run(num_ticks))]
        return [size for size, _ in groupby(sizes)]


@given(times=st.dictionaries(st.integers(1, 4096), st.floats(1e-3, 1e3), min_size=1))
def test_an_efficient_size_is_as_fast_as_asked_and_no_smaller_one_is(times):
    size, shortest = efficient_size(times), min(times.values())
    assert shortest >= EFFICIENT_SHARE * times[size]
    assert all(shortest < EFFICIENT_SHARE * ms for smaller, ms in times.items() if smaller < size)


@pytest.mark.parametrize(
    ("left", "sizes"),
    [
        (10**6, [96, 192, 448]),  # doubled, then to the smallest size that is efficient
        (90_000, [96, 192]),  # 0.003 ms a sample could be saved: 0.27 s, and a size costs 0.3 s
        (50_000, [96]),  # a fifth of 0.83 s might be saved, and the first plan took 0.2 s
    ],
)
def test_what_a_larger_batch_saves_must_exceed_what_it_costs(left: int, sizes: list[int]):
    loop = Graphs(fixed=1.0, price=300.0, first=200.0, samples_left=left)
    assert loop.sizes() == sizes
    reason = loop.tick().reasons[0]
    assert reason.code is ReasonCode.HELD_COST
    assert reason.value < reason.threshold
    assert ("only 2.3% faster" in reason.text) == (left == 10**6)


@pytest.mark.parametrize(
    ("later", "compiled", "sizes"),
    [
        (200.0, False, [96, 192, 448]),  # the short last batch of an epoch
        (2000.0, False, [96]),  # a new precision
        (200.0, True, [96]),  # compiled code may not be valid for 192
    ],
)
def test_a_new_size_is_expected_to_cost_what_a_later_plan_did_not_the_first(
    later: float, compiled: bool, sizes: list[int]
):
    loop = Graphs(fixed=1.0, price=300.0, first=6000.0, samples_left=500_000)
    loop.is_compiled = compiled
    assert loop.sizes() == [96]  # a sixth of 10 s might be saved
    loop.spent += later
    assert loop.sizes() == sizes


@pytest.mark.parametrize(
    ("fixed", "price", "cost", "sizes", "code"),
    [
        (-0.1, 100.0, None, [96, 192, 96], ReasonCode.HELD_COST),  # slower: undone at once, and not tried again
        (1.0, 100.0, lambda plan: 10.0 if plan.batch_size < 192 else 6.0, [96, 192, 512], None),  # noise
        (1.0, 100.0, lambda plan: None, [96], ReasonCode.HELD_UNJUDGED),
        (0.0, 0.0, None, list(range(96, 513, 32)), None),  # where new sizes cost nothing
    ],
)
def test_a_captured_batch_grows_by_the_times_of_its_steps(fixed, price, cost, sizes, code):
    loop = Graphs(fixed=fixed, price=price, first=10 * price)
    loop.cost = cost or loop.cost
    assert loop.sizes(60) == sizes
    assert code is None or codes(loop.tick(), "batch") == [code]


@pytest.mark.parametrize(("slower", "kept"), [(1.02, FP16), (1.05, BF16)])
def test_on_a_gpu_a_precision_that_is_a_little_slower_is_undone(slower: float, kept: Precision):
    loop = Loop(CONFIG, lambda plan: 10.0 * slower if plan.precision["conv"] is FP16 else 10.0)
    for loop.layer in (MIDDLE, LOW, LOW, LOW):
        loop.tick(adapting_ms=1.0)
    assert loop.plan.precision["conv"] is kept


def test_step_times_of_other_precisions_are_not_compared():
    loop = Graphs(fixed=1.0, price=100.0)
    loop.run(4)
    assert loop.state.throughput.other_timing is not None
    loop.layer, loop.cost = HIGH, lambda plan: None
    assert loop.tick().plan.precision["conv"] is FP32
    assert loop.state.throughput.other_timing is None


def test_a_growth_that_could_not_be_applied_is_no_timing():
    loop = Graphs(fixed=1.0, price=100.0)
    for tick in range(60):
        loop.tick(apply_fails=tick == 0, faults=(apply_failed(192),) * (tick == 1))
    assert loop.plan.batch_size == 448


def test_noise_of_a_hundredth_changes_the_batch_only_a_few_times():
    chance = random.Random(0)
    loop = Graphs(fixed=0.05, price=1.0)
    cost = loop.cost
    loop.cost = lambda plan: (cost(plan) or 0.0) * chance.gauss(1.0, 0.01)
    assert len(loop.sizes(1500)) <= 8


def test_a_batch_grows_no_further_than_its_memory_is_expected_to():
    loop = Graphs(fixed=1.0, price=100.0)
    loop.share = 0.25  # of 96 samples; 0.7 are allowed
    assert loop.sizes(1) == [96, 192]
    loop.share *= 2
    assert loop.sizes(1) == [192, 256]
