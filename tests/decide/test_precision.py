import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import (
    BF16,
    FP8,
    FP16,
    FP32,
    USUAL,
    Machine,
    Run,
    apply_failed,
    lowering_refused,
    observation_of,
    plan_of,
    precision_configs,
)
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import ControlState, Decision, LayerState
from triaccel_ray.decide.precision import (
    bar_overflowing,
    bar_refused,
    decide_precision,
    keep_precision,
    precision_for_variance,
    promoted,
)
from triaccel_ray.records.plan import Plan, Precision, Reason, ReasonCode, nearest_supported
from triaccel_ray.records.signals import LayerSignal, Observation

LOW, HIGH = 1e-6, 1e-3
VARIANCE = {FP16: 1e-8, BF16: 1e-5, FP32: 1e-1}
"""A variance that asks for each precision under the thresholds above."""


WITH_FP8 = tuple(Precision)


def config_of(*, dwell_ticks: int = 0, patience_ticks: int = 1, **others: object) -> PrecisionConfig:
    return PrecisionConfig(
        **{"tau_low": LOW, "tau_high": HIGH, "dwell_ticks": dwell_ticks, "patience_ticks": patience_ticks, **others}
    )


def seen_of(in_force: Precision, variance: float | None, supported=USUAL, **others: Any) -> Observation:
    signal = LayerSignal(name="conv", variance=variance, supported=supported)
    return observation_of(plan_of(conv=in_force), signal, **others)


def tick(
    config: PrecisionConfig, in_force: Precision, state: LayerState, variance: float | None, supported=USUAL, **others
) -> tuple[Precision, LayerState, list[Reason]]:
    seen = seen_of(in_force, variance, supported)
    plan, layers, reasons = decide_precision(config, seen, {"conv": state}, **others)
    return plan["conv"], layers["conv"], reasons


def follow(config: PrecisionConfig, start: Precision, asked: list[Precision | None]) -> list[Precision]:
    """The precisions in force after each of the ticks whose variances ask for `asked`, from a fresh layer on."""
    state, in_force, seen = LayerState(by_variance=start, ticks_since_change=config.dwell_ticks), start, []
    for wanted in asked:
        in_force, state, _ = tick(config, in_force, state, None if wanted is None else VARIANCE[wanted])
        seen.append(in_force)
    return seen


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        (0.0, FP16), (math.nextafter(LOW, 0.0), FP16), (LOW, BF16), (math.nextafter(HIGH, 0.0), BF16), (HIGH, FP32),
        (math.inf, FP32), (math.nan, FP32),
    ],
)  # fmt: skip
def test_a_threshold_belongs_to_the_precision_above_it(variance, expected):
    assert precision_for_variance(config_of(), variance, USUAL) is expected
    assert precision_for_variance(config_of(tau_high=math.inf), 1e300, USUAL) is BF16


@pytest.mark.parametrize(
    ("wanted", "supported", "expected"),
    [
        (FP16, (FP16, BF16, FP32), FP16), (FP16, (FP32, BF16), BF16),
        (FP16, (FP32,), FP32), (FP32, (FP16, BF16), FP32), (BF16, (), FP32),
    ],
)  # fmt: skip
def test_unsupported_precision_gives_way_to_the_next_higher_one(wanted, supported, expected):
    assert nearest_supported(wanted, supported) is expected
    state = LayerState(by_variance=wanted)
    assert tick(config_of(), FP32, state, VARIANCE[wanted], supported)[0] is expected


@pytest.mark.parametrize(
    ("dwell_ticks", "patience_ticks", "asked", "expected"),
    [
        (0, 1, [None] * 3, [BF16] * 3),
        *((dwell, 1, [FP16, *[FP32] * 8], [FP16] * dwell + [FP32] * (9 - dwell)) for dwell in (1, 2, 5)),
        (0, 1, [FP16], [FP16]),
        (0, 2, [FP16, FP16], [BF16, FP16]),
        (0, 3, [FP16, FP16, FP16, FP16], [BF16, BF16, FP16, FP16]),
        (0, 2, [FP16, BF16, FP16, BF16, FP16], [BF16] * 5),
        (0, 3, [FP16, FP16, FP32, FP16, FP16], [BF16, BF16, FP32, FP32, FP32]),
        (0, 9, [FP32], [FP32]),
        (3, 2, [FP32, BF16, BF16, BF16], [*[FP32] * 3, BF16]),  # votes cast during the dwell count
    ],
)
def test_a_change_waits_for_the_dwell_and_a_demotion_for_votes_in_a_row(dwell_ticks, patience_ticks, asked, expected):
    config = config_of(dwell_ticks=dwell_ticks, patience_ticks=patience_ticks)
    assert follow(config, BF16, asked) == expected


@pytest.mark.parametrize(
    ("before", "asked", "supported", "threshold", "words"),
    [
        (BF16, FP32, USUAL, HIGH, ">= tau_high 0.001: bf16 -> fp32"),
        (FP16, BF16, USUAL, LOW, ">= tau_low 1e-06: fp16 -> bf16"),
        (FP16, FP32, USUAL, HIGH, ">= tau_high 0.001: fp16 -> fp32"),
        (FP32, BF16, USUAL, HIGH, "< tau_high 0.001: fp32 -> bf16"),
        (FP32, FP16, USUAL, LOW, "< tau_low 1e-06: fp32 -> fp16"),
        (FP32, BF16, (FP16, FP32), HIGH, "< tau_high 0.001: fp32 -> fp16"),
        (FP16, FP32, (FP16, FP32), HIGH, ">= tau_high 0.001: fp16 -> fp32"),
        (BF16, FP16, WITH_FP8, LOW, "< tau_low 1e-06: bf16 -> fp8"),
        (FP8, BF16, WITH_FP8, LOW, ">= tau_low 1e-06: fp8 -> bf16"),
        (FP8, FP32, WITH_FP8, HIGH, ">= tau_high 0.001: fp8 -> fp32"),
    ],
)
def test_a_reason_names_the_threshold_that_was_crossed(before, asked, supported, threshold, words):
    variance = VARIANCE[asked]
    _, _, (reason,) = tick(config_of(), before, LayerState(by_variance=before), variance, supported)
    found = (reason.code, reason.subject, reason.value, reason.threshold)
    assert found == (ReasonCode.VARIANCE, "conv", variance, threshold)
    assert reason.text.endswith(words)


WITHOUT_BF16 = FP16, FP32


@pytest.mark.parametrize(
    ("state", "asked", "supported", "expected"),
    [
        (LayerState(by_variance=FP8, held=True), FP16, WITH_FP8, BF16),
        (LayerState(by_variance=FP8, fp16_bar_ticks=5), FP16, WITH_FP8, FP8),  # scales each tensor: does not overflow
        (LayerState(by_variance=FP32), BF16, WITHOUT_BF16, FP16),
        (LayerState(by_variance=FP16), BF16, WITHOUT_BF16, FP16),
        (LayerState(by_variance=FP16), FP32, WITHOUT_BF16, FP32),
        (LayerState(by_variance=FP16, held=True), BF16, WITHOUT_BF16, FP32),
        (LayerState(by_variance=BF16, fp16_bar_ticks=3), BF16, WITHOUT_BF16, FP32),
    ],
)
def test_holds_and_bars_choose_among_what_is_offered(state, asked, supported, expected):
    assert tick(config_of(), state.by_variance, state, VARIANCE[asked], supported)[0] is expected


@pytest.mark.parametrize("may_lower", [True, False])
def test_a_precision_that_was_slower_is_tried_again_once_precisions_may_be_lowered(may_lower):
    state = LayerState(by_variance=FP16, too_slow=FP16, times_slow=1)
    for _ in range(3):
        level, state, _ = tick(config_of(), BF16, state, VARIANCE[FP16], may_lower=may_lower)
        state = state.after_tick()
    assert level is (FP16 if may_lower else BF16)


def test_a_held_layer_moved_by_its_variance_gives_the_variance_as_reason():
    _, _, (reason,) = tick(config_of(), BF16, LayerState(by_variance=FP16, held=True), VARIANCE[BF16])
    assert reason.code is ReasonCode.VARIANCE
    assert reason.text.endswith("bf16 -> fp32, held one higher by curvature")


def test_a_failed_hold_waits_for_the_next_measurement_and_other_layers_lose_nothing():
    measured = {"eigenvalues": (9.0,), "measured_once": True}
    failed = LayerState(by_variance=FP16, held=True, lower_votes=3, ticks_since_change=7, **measured)
    untouched = LayerState(by_variance=BF16, lower_votes=1)
    observation = observation_of(Plan(batch_size=96, precision={"conv": FP16, "head": BF16}))
    plan, layers = keep_precision(observation, {"conv": failed, "head": untouched})
    assert plan == {"conv": FP16, "head": BF16}
    assert layers["conv"] == LayerState(by_variance=FP16, **measured)
    assert layers["head"] == LayerState(by_variance=BF16, lower_votes=1, ticks_since_change=1)


variances = st.none() | st.floats(0.0, 1.0)
states = st.builds(
    LayerState,
    by_variance=st.sampled_from(Precision),
    ticks_since_change=st.integers(0, 5),
    lower_votes=st.integers(0, 5),
    held=st.booleans(),
)
supports = st.sampled_from([USUAL, WITH_FP8, (FP8, BF16, FP32), (FP16, FP32), (BF16, FP32), (FP32,)])


@given(precision_configs(), st.sampled_from(Precision), states, supports, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_higher_variance_never_gives_lower_precision(config, in_force, state, supported, one, other):
    lower, higher = (tick(config, in_force, state, value, supported)[0] for value in sorted((one, other)))
    assert lower.rank <= higher.rank


@given(precision_configs(), states, supports, variances)
def test_a_hold_raises_by_one_level_from_what_is_offered(config, state, supported, variance):
    free, held = (tick(config, BF16, replace(state, held=is_held), variance, supported)[0] for is_held in (False, True))
    assert held is nearest_supported(promoted(free), supported)


@given(precision_configs(), supports, st.sampled_from(Precision), st.lists(variances, max_size=30))
def test_precisions_are_supported_and_the_variance_rule_keeps_its_dwell(config, supported, initial, seen):
    in_force = nearest_supported(initial, supported)
    state = LayerState(by_variance=in_force, ticks_since_change=config.dwell_ticks)
    changed_at = None
    for index, variance in enumerate(seen):
        before = in_force
        in_force, state, reasons = tick(config, before, state, variance, supported)
        assert in_force in supported
        assert [reason.subject for reason in reasons] == ["conv"] * (in_force is not before)
        if in_force is not before:
            assert changed_at is None or index - changed_at >= config.dwell_ticks
            changed_at = index


# Steps that overflow in FP16 although the loss scale can fall no further.

NAMES = ("conv", "block", "head")
START = ControlConfig(
    precision=config_of(initial=FP16, overflow_bar_ticks=4),
    curvature=CurvatureConfig(tau_curv=5.0, smoothing=0.0, alpha=0.0),
    batch=BatchConfig(enabled=False),
)


def run_of(config: ControlConfig = START, supported: tuple[Precision, ...] = USUAL) -> Run:
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


@pytest.mark.parametrize(
    ("precision", "supported", "num_skipped", "expected"),
    [
        ({}, USUAL, [25, 50, 76], [FP16, FP16, BF16]),  # the difference since the last tick counts
        ({}, USUAL, [50] * 7, [BF16] * 4 + [FP16] * 3),  # as long as the bar, then by the variance again
        ({}, (FP16, FP32), [50, 50], [FP32, FP32]),
        ({"enabled": False}, USUAL, [0] + [50] * 9, [FP16] + [BF16] * 9),  # a fixed one does not return
    ],
)
def test_the_next_higher_precision_takes_over_for_a_while(precision, supported, num_skipped, expected):
    run = run_of(replace(START, precision=replace(START.precision, **precision)), supported)
    assert [step(run, number).plan.precision["conv"] for number in num_skipped] == expected


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


def test_a_refused_precision_is_asked_for_again_after_a_time_that_doubles() -> None:
    config, state = config_of(overflow_bar_ticks=3), LayerState(by_variance=FP32)
    asked, was_refused = [], False
    for index in range(30):
        faults = (lowering_refused("conv"),) if was_refused else ()
        seen = seen_of(FP32, VARIANCE[BF16], faults=faults)
        layers = bar_refused(config, seen, {"conv": state.after_tick()})
        precision, layers, _ = decide_precision(config, seen, layers)
        state, was_refused = layers["conv"], precision["conv"] is BF16
        asked += [index] if was_refused else []
    assert asked == [0, 4, 11, 24]


def test_a_refusal_bars_the_layers_that_kept_their_precision_alone_and_does_not_bar_raising() -> None:
    config = config_of()
    plan = plan_of(kept=FP32, lowered=BF16)
    states = {name: LayerState(by_variance=BF16, lower_votes=1) for name in plan.precision}
    signals = [LayerSignal(name=name, variance=VARIANCE[BF16], supported=USUAL) for name in plan.precision]
    seen = observation_of(plan, *signals, faults=(lowering_refused("kept"),))
    barred = bar_refused(config, seen, states)
    assert barred["lowered"] == states["lowered"]
    assert barred["kept"].refused_bar_ticks == config.overflow_bar_ticks
    assert decide_precision(config, seen, barred)[0] == plan.precision
    raised = [LayerSignal(name=name, variance=VARIANCE[FP32], supported=USUAL) for name in plan.precision]
    bar = {"kept": barred["kept"], "lowered": LayerState(by_variance=BF16, refused_bar_ticks=5, times_refused=1)}
    assert set(decide_precision(config, observation_of(plan, *raised), bar)[0].values()) == {FP32}


def test_a_plan_that_fails_beside_a_refusal_does_not_lift_the_bar() -> None:
    state = LayerState(by_variance=BF16, refused_bar_ticks=9, times_refused=3)
    _, layers = keep_precision(seen_of(FP32, None, faults=(apply_failed(),)), {"conv": state})
    assert (layers["conv"].by_variance, layers["conv"].refused_bar_ticks, layers["conv"].times_refused) == (FP32, 9, 3)
