"""The rule of borders in the loop: what is refused, what is said of it and when, and that it comes to rest."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.build import (
    BF16,
    FP16,
    FP32,
    Machine,
    Run,
    control_configs,
    eventful_run,
    machines,
    observation_of,
    plan_of,
)
from tests.decide.layer_costs import CONFIG, DEAR, HALF, NAMES, VARIANCE, costs_of, known_costs
from triaccel_ray.config import ControlConfig
from triaccel_ray.decide import ControlState, Decision, LayerState, decide, initial_decision, replay
from triaccel_ray.decide.precision import keep_precision, precision_for_variance
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.plan import Applied, Precision, ReasonCode
from triaccel_ray.signals import LayerCost, LayerSignal, Observation


def signals(*wanted: Precision, eigenvalues: dict[str, float] | None = None) -> list[LayerSignal]:
    held = eigenvalues or {}
    return [
        LayerSignal(name=name, variance=VARIANCE[level], eigenvalues=(held[name],) if name in held else None)
        for name, level in zip(NAMES, wanted, strict=True)
    ]


def run_of(config: ControlConfig = CONFIG) -> Run:
    return Run(config, Machine(names=NAMES))


def said(decision: Decision) -> list[tuple[str, ReasonCode]]:
    return [(reason.subject, reason.code) for reason in decision.reasons]


def precision(decision: Decision) -> tuple[Precision, ...]:
    return tuple(decision.plan.precision.values())


def test_a_refusal_is_said_once_with_its_numbers_and_remembered():
    run = run_of()
    _, decision = run.step(*signals(FP32, BF16, FP32), costs=costs_of(DEAR))
    assert precision(decision) == (FP32, FP32, FP32)
    (reason,) = decision.reasons
    assert (reason.code, reason.subject) == (ReasonCode.HELD_BORDER, "block")
    assert reason.text == "bf16 saves 0.5 ms, its borders cost 0.6 ms: stays fp32"
    assert (reason.value, reason.threshold) == (0.5, 0.6)
    assert decision.state.layers["block"].refused is BF16
    assert decision.state.layers["conv"].refused is None
    assert decision.state.costs == costs_of(DEAR)
    for _ in range(5):
        _, decision = run.step(*signals(FP32, BF16, FP32))
        assert decision.reasons == ()
        assert decision.state.layers["block"].refused is BF16
    _, decision = run.step(*signals(FP32, FP16, FP32))
    assert said(decision) == [("block", ReasonCode.HELD_BORDER)]
    assert decision.reasons[0].text.startswith("fp16 saves")


def test_a_refused_layer_goes_with_its_neighbour():
    run = run_of()
    run.step(*signals(FP32, BF16, FP32), costs=costs_of(DEAR))
    _, decision = run.step(*signals(FP32, BF16, BF16))
    assert precision(decision) == (FP32, BF16, BF16)
    assert said(decision) == [("block", ReasonCode.BORDER_RELEASED), ("head", ReasonCode.VARIANCE)]
    assert decision.reasons[0].text == "its borders no longer cost more than it saves: fp32 -> bf16"
    assert decision.state.layers["block"].refused is None


def test_a_refusal_is_taken_back_when_nothing_is_wanted_any_more():
    run = run_of()
    run.step(*signals(FP32, BF16, FP32), costs=costs_of(DEAR))
    _, decision = run.step(*signals(FP32, FP32, FP32))
    assert (decision.reasons, decision.state.layers["block"].refused) == ((), None)


def test_new_costs_are_weighed_when_they_come():
    run = run_of()
    run.step(*signals(FP32, BF16, FP32), costs=costs_of(DEAR))
    _, decision = run.step(*signals(FP32, BF16, FP32), costs=costs_of(HALF))
    assert precision(decision) == (FP32, BF16, FP32)
    assert said(decision) == [("block", ReasonCode.BORDER_RELEASED)]


def test_neighbours_refused_together_say_so():
    run = run_of()
    cost = LayerCost(name="", compute_ms={FP16: 1.0, BF16: 0.9, FP32: 1.0}, border_ms=0.25)
    _, decision = run.step(*signals(BF16, BF16, FP32), costs=costs_of(cost))
    expected = "bf16 saves 0.2 ms, the borders of 2 such neighbours cost 0.25 ms: stays fp32"
    assert [reason.text for reason in decision.reasons] == [expected] * 2


def test_an_island_is_raised_with_a_reason_and_comes_back_with_its_neighbours():
    config = replace(CONFIG, precision=replace(CONFIG.precision, initial=BF16))
    run = run_of(config)
    _, decision = run.step(*signals(FP32, BF16, FP32), costs=costs_of(DEAR))
    assert precision(decision) == (FP32, FP32, FP32)
    block = next(reason for reason in decision.reasons if reason.subject == "block")
    assert block.code is ReasonCode.HELD_BORDER
    assert block.text == "bf16 saves 0.5 ms, its borders cost 0.6 ms: bf16 -> fp32 with its neighbours"
    assert decision.state.layers["block"] == LayerState(by_variance=BF16, refused=BF16)
    _, decision = run.step(*signals(FP32, BF16, FP32))
    assert (precision(decision), decision.reasons) == ((FP32, FP32, FP32), ())
    _, decision = run.step(*signals(BF16, BF16, FP32))
    assert precision(decision) == (BF16, BF16, FP32)


def test_a_layer_released_by_curvature_may_be_refused_too():
    config = replace(CONFIG, precision=replace(CONFIG.precision, initial=BF16))
    run = run_of(config)
    _, decision = run.step(*signals(FP32, BF16, FP32, eigenvalues={"block": 9.0}), costs=costs_of(DEAR))
    assert precision(decision) == (FP32, FP32, FP32)
    assert decision.state.layers["block"].refused is None
    _, decision = run.step(*signals(FP32, BF16, FP32, eigenvalues={"block": 1.0}))
    assert precision(decision) == (FP32, FP32, FP32)
    assert said(decision) == [("block", ReasonCode.CURVATURE_RELEASED), ("block", ReasonCode.HELD_BORDER)]


def test_a_layer_already_refused_loses_nothing_by_a_plan_that_could_not_be_applied():
    states = {
        "conv": LayerState(by_variance=FP16, refused=FP16, held=False, ticks_since_change=3, fp16_bar_ticks=0),
        "block": LayerState(by_variance=BF16, held=True, fp16_bar_ticks=2),
        "head": LayerState(by_variance=BF16, refused=BF16),
    }
    plan = plan_of(conv=BF16, block=FP16, head=BF16)
    kept, layers = keep_precision(observation_of(plan), states)
    assert kept == plan.precision
    assert layers["conv"] == replace(states["conv"], ticks_since_change=4)
    assert layers["block"] == LayerState(by_variance=FP16)  # must ask again, and the bar falls with the plan
    assert layers["head"] == LayerState(by_variance=BF16, ticks_since_change=1)  # was to be raised, and was not


def test_disabled_ignores_costs():
    config = replace(CONFIG, precision=replace(CONFIG.precision, enabled=False))
    _, decision = run_of(config).step(*signals(FP16, BF16, FP16), costs=costs_of(HALF))
    assert (precision(decision), decision.reasons) == ((FP32,) * 3, ())


seeds = st.integers(0, 2**32)


def without_costs(decision: Decision) -> Decision:
    return replace(decision, state=replace(decision.state, costs=None))


@settings(max_examples=20)
@given(control_configs(), machines(), seeds)
def test_without_costs_or_unaware_of_borders_every_wish_is_granted(config, machine, seed):
    unaware = replace(config, precision=replace(config.precision, border_aware=False))
    for observation, decision in eventful_run(unaware, machine, seed, 40):
        for signal in observation.layers:
            state = decision.state.layers[signal.name]
            assert state.refused is None
    blind = ControlState(layers=decision.state.layers, batch=decision.state.batch)
    bare = replace(observation, costs=None)
    assert without_costs(decide(unaware, observation, blind)) == without_costs(decide(config, bare, blind))


@settings(max_examples=20)
@given(control_configs(), machines(), seeds)
def test_what_the_variance_settled_on_is_never_undercut(config, machine, seed):
    for observation, decision in eventful_run(config, machine, seed, 60):
        if not config.precision.enabled or observation.faults:
            continue
        for signal in observation.layers:
            state = decision.state.layers[signal.name]
            assert decision.plan.precision[signal.name].rank >= state.by_variance.rank
            assert state.refused is None or decision.plan.precision[signal.name].rank > state.refused.rank


@settings(max_examples=30)
@given(
    control_configs(),
    st.lists(st.tuples(known_costs, st.floats(1e-9, 1.0)), min_size=1, max_size=6),
    st.sampled_from([None, 1.0, 7.0]),
)
def test_constant_observations_come_to_rest(config, rows, eigenvalue):
    names = tuple(f"layer{index}" for index in range(len(rows)))
    costs = tuple(replace(cost, name=name) for name, (cost, _) in zip(names, rows, strict=True))
    layers = [
        LayerSignal(name=name, variance=variance, eigenvalues=None if eigenvalue is None else (eigenvalue,))
        for name, (_, variance) in zip(names, rows, strict=True)
    ]
    run = Run(config, Machine(names=names))
    ticks = config.precision.dwell_ticks + config.precision.patience_ticks + 2
    decisions = [run.step(*layers, costs=costs)[1] for _ in range(ticks + 20)]
    assert {tuple(decision.plan.precision.items()) for decision in decisions[ticks:]} == {
        tuple(decisions[-1].plan.precision.items())
    }
    silent = {ReasonCode.HELD_BORDER, ReasonCode.BORDER_RELEASED, ReasonCode.VARIANCE}
    assert not silent & {reason.code for decision in decisions[ticks:] for reason in decision.reasons}
    if config.precision.enabled:
        for signal in layers:
            wanted = precision_for_variance(config.precision, signal.variance)
            assert decisions[-1].plan.precision[signal.name].rank >= wanted.rank


@settings(max_examples=10)
@given(control_configs(), machines(), seeds)
def test_a_log_replays_from_its_json(config, machine, seed):
    log = [
        tuple(decode(type(part), json.loads(json.dumps(encode(part)))) for part in pair)
        for pair in eventful_run(config, machine, seed, 60)
    ]
    replayed = replay(config, log)
    assert replayed.diverged_at is None
    assert replayed.decisions == tuple(decision for _, decision in log)


def drop(data: object, names: set[str]) -> object:
    if isinstance(data, dict):
        return {key: drop(value, names) for key, value in data.items() if key not in names}
    return [drop(item, names) for item in data] if isinstance(data, list) else data


@pytest.mark.parametrize("part", [0, 1, 2])
def test_records_written_before_costs_were_measured_still_read(part):
    start = initial_decision(CONFIG, [(name, tuple(Precision)) for name in NAMES])
    observation = observation_of(start.plan, *signals(FP32, FP32, FP32))
    record = (observation, start, Applied(plan=start.plan))[part]
    fresh = {"costs", "refused", "fp16_bar_ticks", "evicted", "adapt_ms"}
    if not isinstance(record, Observation):
        fresh |= {"step", "num_skipped"}
    assert decode(type(record), drop(encode(record), fresh)) == record
