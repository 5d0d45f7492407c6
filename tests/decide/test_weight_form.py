"""The form of the weights where the settings leave it open: tables, and properties over random models and budgets."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import USUAL, observation_of, plan_of
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide import decide, initial_decision, replay
from triaccel_ray.decide.calibration import BUDGET_SHARE
from triaccel_ray.decide.weight_form import (
    PROCESS_BYTES,
    decide_form,
    needed_bytes,
    remember_form,
    room_bytes,
)
from triaccel_ray.records.plan import ReasonCode, WeightForm
from triaccel_ray.records.signals import ParameterSignal

OPEN = ControlConfig(weights="auto", step_in_backward="auto")
SHARING = replace(OPEN, shard_optimizer="auto")
PLAIN, SPLIT, BOTH = WeightForm(), WeightForm(is_split=True), WeightForm(is_split=True, steps_in_backward=True)
IN_BACKWARD, SHARED = WeightForm(steps_in_backward=True), WeightForm(shares_optimizer=True)
BATCHES = BatchConfig(accumulate=4)
GPT = ParameterSignal(
    num_elements=1000,
    num_in_bf16=900,
    bucket_elements=100,
    model_bytes=4000,
    state_bytes=8000,
    saved_bytes=10_000,
    headroom_bytes=10**6,
)


@pytest.mark.parametrize(
    ("form", "keeps_copies", "expected"),
    [
        (PLAIN, False, 2 * 900 + 4 * 1000),  # casts, and gradients in FP32
        (PLAIN, True, 2 * 900 + 2 * 900 + 4 * 100),
        *((form, keeps, 2 * 900 + 4 * 100) for form in (SPLIT, IN_BACKWARD) for keeps in (False, True)),
        (BOTH, False, 4 * 100),
    ],
)
def test_what_a_step_needs_beyond_parameters_and_state(form: WeightForm, keeps_copies: bool, expected: int) -> None:
    assert needed_bytes(replace(GPT, keeps_copies=keeps_copies), form) == expected + 10_000


def test_a_budget_also_holds_process_samples_parameters_and_state() -> None:
    budget = 2 * PROCESS_BYTES
    held = PROCESS_BYTES + 500 + 4000 + 8000
    limited = replace(GPT, budget_bytes=budget, headroom_bytes=None, data_bytes=500)
    assert room_bytes(limited, PLAIN) == int(BUDGET_SHARE * budget) - held
    assert room_bytes(replace(limited, shared_state_bytes=2000), SHARED) == int(BUDGET_SHARE * budget) - held + 6000
    assert room_bytes(replace(limited, headroom_bytes=1000), PLAIN) == 970  # the smaller of both
    assert room_bytes(replace(GPT, headroom_bytes=None), PLAIN) is None


@pytest.mark.parametrize("form", [PLAIN, SPLIT, BOTH], ids=["plain", "split", "in backward"])
def test_the_first_form_that_fits_is_chosen(form: WeightForm) -> None:
    enough = -(-needed_bytes(GPT, form) * 100 // 97)
    assert decide_form(OPEN, replace(GPT, headroom_bytes=enough))[0] == form
    assert decide_form(OPEN, replace(GPT, headroom_bytes=enough - 2))[0] != form or form == BOTH


IS_SPLIT = "weights are split: a step would need up to 0.00 GiB, and the memory budget leaves it 0.00 GiB"
WITHIN = "parameters are updated in the backward pass: a step would need up to"
STAYS, AFTER = "weights stay FP32: ", "parameters are updated after the backward pass: "
NO_KERNEL, SUMS = "no kernel steps RMSprop", "sums of the gradients of 4 micro-batches take as much"
CLIPS = "clip_norm = 1 would use the norm of the step before"
OVERFLOWS = "layers may compute in FP16, where an overflow would"


@pytest.mark.parametrize(
    ("config", "changes", "form", "texts"),
    [
        (OPEN, {"headroom_bytes": None}, PLAIN, []),  # no memory budget
        (OPEN, {"unsupported_because": NO_KERNEL}, PLAIN, [STAYS + NO_KERNEL, AFTER + NO_KERNEL]),
        (replace(OPEN, clip_norm=1.0), {}, SPLIT, [IS_SPLIT, AFTER + CLIPS]),
        (OPEN, {"num_ranks": 2}, SPLIT, [IS_SPLIT, AFTER + "the gradients of 2 ranks are"]),
        (OPEN, {"num_in_bf16": 0}, IN_BACKWARD, [STAYS + "no layer with weights of its own computes in BF16", WITHIN]),
        (OPEN, {"may_use_fp16": True}, SPLIT, [IS_SPLIT, AFTER + OVERFLOWS]),
        (replace(OPEN, batch=BATCHES), {}, PLAIN, [STAYS + SUMS, AFTER + SUMS]),
        (replace(OPEN, weights="fp32"), {}, IN_BACKWARD, [WITHIN]),
        (replace(OPEN, weights="split"), {}, BOTH, [WITHIN]),
        (replace(OPEN, step_in_backward=False), {}, SPLIT, [IS_SPLIT]),
        (replace(OPEN, step_in_backward=True), {"num_ranks": 1}, BOTH, [IS_SPLIT]),
    ],
)
def test_what_speaks_against_a_form_is_a_reason_and_what_is_given_wins(
    config: ControlConfig, changes: dict[str, Any], form: WeightForm, texts: list[str]
) -> None:
    found, reasons = decide_form(config, replace(GPT, **{"headroom_bytes": 1, **changes}))
    assert found == form
    assert [reason.text.startswith(text) for reason, text in zip(reasons, texts, strict=True)] == [True] * len(texts)
    assert {(reason.code, reason.subject) for reason in reasons} <= {(ReasonCode.WEIGHT_FORM, "memory")}


def test_a_reason_has_what_it_compares() -> None:
    roomy, tight = (decide_form(OPEN, replace(GPT, headroom_bytes=headroom))[1] for headroom in (10**6, 1000))
    assert [(each.value, each.threshold) for each in roomy] == [(needed_bytes(GPT, PLAIN), 970_000)] * 2
    values = needed_bytes(GPT, PLAIN), needed_bytes(GPT, SPLIT)
    assert [(each.value, each.threshold) for each in tight] == [(value, 970) for value in values]
    small = replace(GPT, bucket_elements=1000, keeps_copies=True, headroom_bytes=1)
    form, (reason,) = decide_form(replace(OPEN, weights="fp32"), small)
    assert form == PLAIN  # FP32 gradients of one bucket that holds all take more than those of copies
    assert reason.text.endswith("GiB, but it would need no less")


def test_several_ranks_share_the_optimizer_if_split_weights_do_not_suffice() -> None:
    held = PROCESS_BYTES + 4000 + 8000
    alone = replace(GPT, shared_state_bytes=8000, headroom_bytes=None, budget_bytes=10**12)
    pair = replace(alone, num_ranks=2, shared_state_bytes=4000)
    for spare, form in ((0, PLAIN), (-1, SPLIT), (-3601, replace(SPLIT, shares_optimizer=True))):
        budget = -(-(held + needed_bytes(GPT, PLAIN) + spare) * 100 // 97)
        assert decide_form(SHARING, replace(pair, budget_bytes=budget))[0] == form
    *_, reason = decide_form(SHARING, replace(pair, budget_bytes=held + 9000))[1]
    assert reason.text.startswith("ranks share the optimizer's state: a step would need up to")
    assert reason.value == needed_bytes(GPT, SPLIT)
    form, (*_, reason) = decide_form(SHARING, replace(pair, headroom_bytes=1))
    assert not form.shares_optimizer
    assert reason.text == "each rank holds the optimizer's whole state: memory_headroom does not count it"
    form, reasons = decide_form(SHARING, replace(alone, budget_bytes=held))
    assert not form.shares_optimizer
    assert not any("optimizer" in reason.text for reason in reasons)  # a single rank has nothing to share


@pytest.mark.parametrize("weights", ["fp32", "split"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_without_auto_the_settings_are_the_form_and_nothing_is_said(
    weights: Any, in_backward: bool, shares: bool
) -> None:
    config = ControlConfig(weights=weights, step_in_backward=in_backward, shard_optimizer=shares)
    asked = WeightForm(is_split=weights == "split", steps_in_backward=in_backward, shares_optimizer=shares)
    assert decide_form(config, None) == (asked, [])
    assert decide_form(config, replace(GPT, headroom_bytes=1)) == (asked, [])
    assert remember_form(config, None, None) == (None, [])


SIGNALS = st.builds(
    ParameterSignal,
    num_elements=st.integers(1000, 10**9),
    num_in_bf16=st.integers(0, 1000),
    bucket_elements=st.integers(1, 10**7),
    model_bytes=st.integers(0, 10**10),
    state_bytes=st.integers(0, 10**10),
    saved_bytes=st.integers(0, 10**11),
    data_bytes=st.integers(0, 10**9),
    keeps_copies=st.booleans(),
    may_use_fp16=st.booleans(),
    num_ranks=st.integers(1, 3),
    shared_state_bytes=st.integers(0, 10**9),
)
CONFIGS = st.builds(
    ControlConfig,
    weights=st.sampled_from(["fp32", "split", "auto"]),
    step_in_backward=st.sampled_from([False, True, "auto"]),
    shard_optimizer=st.sampled_from([False, "auto"]),
    clip_norm=st.sampled_from([None, 1.0]),
    batch=st.sampled_from([BatchConfig(), BATCHES]),
)
BYTES = st.integers(1, 2 * 10**11)


@given(CONFIGS, SIGNALS, st.lists(BYTES, min_size=2, max_size=5), st.booleans())
def test_it_stays_within_the_budget_where_any_form_does_and_a_larger_one_never_brings_a_leaner_form(
    config: ControlConfig, signal: ParameterSignal, sizes: list[int], is_headroom: bool
) -> None:
    name = "headroom_bytes" if is_headroom else "budget_bytes"
    limited = [replace(signal, **{name: size}) for size in sorted(sizes)]
    forms = [decide_form(config, each)[0] for each in limited]
    reachable = {decide_form(config, replace(signal, **{name: size}))[0] for size in (1, 10**13)}

    def is_within(limited: ParameterSignal, form: WeightForm) -> bool:
        return needed_bytes(signal, form) <= room_bytes(limited, form)

    for each, form in zip(limited, forms, strict=True):
        assert is_within(each, form) or not any(is_within(each, other) for other in reachable)
        if config.weights != "auto":
            assert form.is_split == (config.weights == "split")
        if config.step_in_backward != "auto":
            assert form.steps_in_backward == config.step_in_backward
    leanness = [form.is_split + form.steps_in_backward + form.shares_optimizer for form in forms]
    assert leanness == sorted(leanness, reverse=True)


def test_the_first_tick_records_the_decision_a_later_one_only_a_change_and_replay_reproduces_both() -> None:
    config = replace(OPEN, revert_slowdowns=False)
    state, log = initial_decision(config, [("conv", USUAL)]).state, []
    for tick, headroom in enumerate([1, 1, 10**6]):  # as after a resumption with more memory
        signal = replace(GPT, headroom_bytes=headroom)
        observation = observation_of(plan_of(), tick=tick, parameters=signal)
        decision = decide(config, observation, state)
        log.append((observation, decision))
        state = decision.state
    codes = [[reason.code for reason in decision.reasons] for _, decision in log]
    assert [each.count(ReasonCode.WEIGHT_FORM) for each in codes] == [2, 0, 2]
    assert [decision.state.form for _, decision in log] == [BOTH, BOTH, PLAIN]
    assert replay(config, log).decisions == tuple(decision for _, decision in log)
