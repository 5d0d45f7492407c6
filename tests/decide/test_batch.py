from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import IN_BAND, Run, batch_configs, machines, memory_of, observation_of, plan_of
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide import BatchState
from triaccel_ray.decide.batch import BatchDecision, batch_lr_scale, decide_batch, ladder, next_size_to_time
from triaccel_ray.records.plan import Reason, ReasonCode
from triaccel_ray.records.signals import NoiseSignal

READY = BatchState(ticks_since_change=100)
CONFIG = BatchConfig(rho_low=0.7, rho_high=0.9)
"""Start 96, rungs 32, 64, ..., 512; one rung up, two down."""
LOW, HIGH = 0.5, 0.95


def decided(
    config: BatchConfig, batch_size: int, share: float = IN_BAND, state: BatchState = READY, *, parts: int = 1,
    enlarged: bool = False, choose_size: Any = itemgetter(0), **others: Any,
) -> BatchDecision:  # fmt: skip
    seen = observation_of(plan_of(batch_size, parts), share=share, **others)
    return decide_batch(config, seen, state, enlarged=enlarged, choose_size=choose_size)


def timed_sizes(config: BatchConfig, ms_per_sample: Callable[[int], float | None]) -> dict[int, float | None]:
    """All sizes that are timed on a device where a sample takes that long; None for a size that does not fit."""
    timed: dict[int, float | None] = {}
    while (size := next_size_to_time(config, timed)) is not None:
        assert size not in timed
        timed[size] = ms_per_sample(size)
    return timed


@pytest.mark.parametrize(
    ("config", "fixed", "capacity", "sizes"),
    [
        # doublings and the initial size, then halves of the interval that holds the efficient size, 448
        (CONFIG, 100, 512, [32, 64, 96, 128, 256, 512, 384, 448, 416]),
        (CONFIG, 0, 512, [32, 64, 96, 128, 256, 512]),
        # the first size that does not fit ends the ladder
        (CONFIG, 100, 300, [32, 64, 96, 128, 256, 512, 192, 224]),
        (CONFIG, 100, 16, [32]),
        (replace(CONFIG, start=32, maximum=32), 100, 512, [32]),
        (replace(CONFIG, start=32, granularity=64, step_up=64, maximum=300), 0, 512, [32, 96, 160, 288]),
    ],
)
def test_sizes_are_timed_by_doubling_and_then_around_the_efficient_one(config, fixed, capacity, sizes):
    timed = timed_sizes(config, lambda size: 1.0 + fixed / size if size <= capacity else None)
    assert list(timed) == sizes


@pytest.mark.parametrize(
    ("share", "batch_size", "expected"),
    [
        (0.0, 96, 128), (0.699, 96, 128), (0.7, 96, 96), (0.9, 96, 96), (0.901, 96, 32), (2.0, 512, 448),
        (0.95, 64, 32), (0.95, 32, 32), (0.5, 512, 512), (0.5, 480, 512),
    ],
)  # fmt: skip
def test_batch_grows_below_rho_low_and_shrinks_above_rho_high(share, batch_size, expected):
    decision = decided(CONFIG, batch_size, share)
    assert (decision.batch_size, decision.num_micro_batches) == (expected, 1)
    if expected != batch_size:
        (reason,) = decision.reasons
        rule = (ReasonCode.MEMORY_LOW, 0.7) if expected > batch_size else (ReasonCode.MEMORY_HIGH, 0.9)
        assert (reason.code, reason.threshold, reason.value) == (*rule, share)


def test_a_reason_gives_memory_in_gib_and_says_what_cannot_shrink():
    memory = replace(memory_of(0.0), limit_bytes=8 * 2**30, idle_bytes=2**30, free_bytes=5 * 2**30)
    memory = replace(memory, used_bytes=2 * 2**30, window_peak_bytes=4 * 2**30)  # the peak decides, not what is held
    assert decided(CONFIG, 96, memory=memory).reasons[0].text == (
        "memory 0.500 (3.00 of 6.00 GiB above the idle process) < rho_low 0.7: 96 -> 128"
    )
    decision = decided(CONFIG, 32, HIGH)
    assert "32 is the smallest batch" in decision.reasons[0].text
    assert decision.state == BatchState(ticks_since_change=101)  # nothing is closed


@pytest.mark.parametrize(("dwell_ticks", "waits"), [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_growth_waits_for_the_dwell_and_shrinking_never_does(dwell_ticks, waits):
    config = replace(CONFIG, dwell_ticks=dwell_ticks)
    decision = decided(config, 96, LOW)
    sizes = []
    for _ in range(waits + 1):
        decision = decided(config, 128, LOW, decision.state)
        sizes.append(decision.batch_size)
    assert sizes == [128] * waits + [160]
    assert decided(config, 160, HIGH, decision.state).batch_size == 96


def test_growth_under_a_cap_ends_at_it_and_says_so():
    wide = replace(CONFIG, step_up=96)
    decision = decided(wide, 160, HIGH)
    assert (decision.batch_size, decision.state.cap, decision.state.cap_ticks_left) == (96, 128, 20)
    decision = decided(wide, 96, LOW, decision.state)
    assert decision.batch_size == 128
    decision = decided(wide, 128, LOW, decision.state)
    assert decision.batch_size == 128
    (reason,) = decision.reasons
    assert (reason.code, reason.threshold) == (ReasonCode.HELD_CAPPED, 128.0)
    assert "for 18 more ticks" in reason.text


@pytest.mark.parametrize(("parts", "fewer"), [(2, 1), (3, 1), (4, 2), (5, 2)])
@pytest.mark.parametrize("enabled", [False, True])
def test_parts_are_joined_by_halves_before_the_batch_grows(enabled, parts, fewer):
    decision = decided(replace(CONFIG, enabled=enabled, start=32), 32, LOW, parts=parts)
    assert (decision.batch_size, decision.num_micro_batches) == (32, fewer)
    assert decision.reasons[0].text.endswith(f"{parts} -> {fewer} parts")


NOISY = replace(CONFIG, bound_by_noise_scale=True)


@pytest.mark.parametrize(("scale", "expected"), [(128.0, 128), (127.9, 96), (1e9, 128), (1e-9, 96)])
def test_growth_stops_at_the_noise_scale_or_a_share_of_it(scale, expected):
    state = replace(READY, noise=NoiseSignal(mean_square_norm=0.75 / scale, trace_covariance=0.75))
    assert decided(NOISY, 96, LOW, state).batch_size == expected
    assert decided(CONFIG, 96, LOW, state).batch_size == 128
    state = replace(READY, noise=NoiseSignal(mean_square_norm=0.5, trace_covariance=200.0))
    assert decided(replace(NOISY, noise_share=0.32), 96, LOW, state).batch_size == 128
    decision = decided(replace(NOISY, noise_share=0.25), 96, LOW, state)
    (reason,) = decision.reasons
    assert (decision.batch_size, reason.threshold) == (96, 100.0)
    assert reason.text == "gradient noise scale 400 x 0.25: a batch of 128 would average little more"


def test_growth_waits_for_the_noise_scale_to_be_known():
    decision = decided(NOISY, 96, LOW, READY)
    assert decision.batch_size == 96
    (reason,) = decision.reasons
    assert (reason.code, reason.value) == (ReasonCode.HELD_NOISE_SCALE, 128.0)
    assert reason.text == "no batch of 128 before the gradient noise scale is known"
    assert decided(NOISY, 96, HIGH, READY).batch_size < 96
    for square in (-0.1, 1e-3):  # infinite, and 490
        measured_thrice = NoiseSignal(mean_square_norm=square, trace_covariance=0.49)
        assert decided(NOISY, 96, LOW, replace(READY, noise=measured_thrice)).reasons == (reason,)
        known = replace(measured_thrice, trace_covariance=0.5)
        assert decided(NOISY, 96, LOW, replace(READY, noise=known)).batch_size == 128


def test_the_noise_scale_is_awaited_only_for_a_larger_batch_that_pays_and_that_it_does_not_allow():
    unpaid = Reason(code=ReasonCode.HELD_COST, subject="batch", text="saves less than it costs")
    known = NoiseSignal(mean_square_norm=0.01, trace_covariance=1.0)
    for noise, share, chosen, waits, code in [
        (None, LOW, itemgetter(0), True, ReasonCode.HELD_NOISE_SCALE),
        (known, LOW, itemgetter(0), True, ReasonCode.HELD_NOISE_SCALE),  # it may rise
        (None, LOW, lambda sizes: unpaid, False, ReasonCode.HELD_COST),
        (None, IN_BAND, itemgetter(0), False, None),
    ]:
        state = replace(READY, noise=noise, waits_for_noise=not waits)
        decision = decided(NOISY, 96, share, state, choose_size=chosen)
        assert (decision.batch_size, decision.state.waits_for_noise) == (96, waits)
        assert [reason.code for reason in decision.reasons] == ([code] if code else [])


@pytest.mark.parametrize(("weight", "largest"), [(0.0, 320), (0.49, 320), (0.5, 160)])
def test_a_noise_scale_that_is_not_known_yet_does_not_limit_what_growth_could_pay(weight, largest):
    offered = []
    noise = NoiseSignal(mean_square_norm=weight / 160.0, trace_covariance=weight) if weight else None
    choose = lambda sizes: offered.extend(sizes) or sizes[0]  # noqa: E731
    decided(NOISY, 96, 0.2, replace(READY, noise=noise), choose_size=choose)
    assert max(offered) == largest


@pytest.mark.parametrize("noise", [NoiseSignal(mean_square_norm=1.0, trace_covariance=1.0), None])
def test_the_noise_scale_keeps_neither_parts_nor_the_start_from_returning(noise):
    state = replace(READY, noise=noise)
    assert decided(NOISY, 32, LOW, state, parts=2).num_micro_batches == 1
    assert decided(replace(NOISY, enabled=False), 32, LOW, state).batch_size == 96
    assert [decided(NOISY, size, LOW, state).batch_size for size in (32, 64, 96)] == [64, 96, 96]


def test_a_wide_step_does_not_leap_over_the_start():
    wide = replace(CONFIG, step_up=128, maximum=224)
    assert [decided(wide, size, LOW).batch_size for size in (32, 64, 96, 128)] == [96, 96, 224, 224]


@pytest.mark.parametrize(
    ("rule", "square", "trace", "expected"),
    [
        ("none", 3.0, 64.0, 1.0),
        ("sqrt", 3.0, 64.0, 2.0),
        ("linear", 3.0, 64.0, 4.0),
        ("adascale", 3.0, 64.0, 4.0 * (1 + 3) / (1 + 4 * 3)),
        ("adascale", -3.0, 64.0, 4.0),  # an estimate that is negative counts as zero
        ("adascale", 3.0, -64.0, 1.0),
        ("adascale", 0.0, 0.0, 1.0),
    ],
)
def test_lr_follows_the_batch_by_the_named_rule(rule, square, trace, expected):
    config = BatchConfig(start=64, lr_rule=rule)
    noise = NoiseSignal(mean_square_norm=square, trace_covariance=trace)
    assert batch_lr_scale(config, 256, noise) == pytest.approx(expected)
    assert batch_lr_scale(config, 64, noise) == 1.0


@st.composite
def situations(draw: st.DrawFn) -> tuple[BatchConfig, int, BatchState]:
    """A configuration, a batch size in force under it and a state that may stand beside it."""
    config = draw(batch_configs())
    size = draw(st.sampled_from(ladder(config)))
    cap = draw(st.none() | st.sampled_from([rung for rung in ladder(config) if rung >= size]))
    moments = st.floats(0, 9)
    noise = draw(st.none() | st.builds(NoiseSignal, mean_square_norm=moments, trace_covariance=moments))
    left = draw(st.integers(1, config.oom_cooldown_ticks)) if cap is not None else 0
    state = BatchState(ticks_since_change=draw(st.integers(0, 5)), cap=cap, cap_ticks_left=left, noise=noise)
    return config, size, state


@given(situations(), st.floats(0.0, 2.0), st.integers(1, 8), st.booleans())
def test_the_batch_stays_on_the_ladder_and_moves_at_most_one_step(situation, share, parts, enlarged):
    config, size, state = situation
    decision = decided(config, size, share, state, parts=parts, enlarged=enlarged)
    assert decision.batch_size in ladder(config)
    parts_or_fewer = (parts, max(parts // 2, config.accumulate), config.accumulate)
    assert decision.num_micro_batches in parts_or_fewer
    step_up = config.step_up if config.enabled else config.maximum
    assert size - config.step_down <= decision.batch_size <= size + step_up
    assert (decision.batch_size, decision.num_micro_batches) == (size, parts) or decision.reasons
    grows = decision.batch_size > size or decision.num_micro_batches < parts
    assert not (grows and enlarged)
    assert not (grows and config.enabled and share > config.rho_low + 1e-3)
    if state.cap_ticks_left > 1:
        assert decision.batch_size <= state.cap


@given(batch_configs(enabled=True, bound_by_noise_scale=False), machines())
def test_a_batch_that_took_too_much_does_not_come_back_within_the_cap(config, machine):
    run = Run(ControlConfig(batch=config), machine)
    closed: dict[int, int] = {}  # batch size -> tick of the last shrink from it or from a smaller one
    for tick in range(60):
        size = run.plan.batch_size
        _, decision = run.step()
        after = decision.plan.batch_size
        if after < size:
            closed.update({rung: tick for rung in ladder(config) if rung >= size})
        if after > size and after in closed:
            assert tick - closed[after] >= config.oom_cooldown_ticks


@given(situations(), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_more_memory_in_use_never_gives_a_larger_batch(situation, one, other):
    config, size, state = situation
    less, more = (decided(config, size, share, state).batch_size for share in sorted((one, other)))
    assert more <= less or not config.enabled
