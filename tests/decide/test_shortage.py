"""Memory plans that were predicted to fit and did not, and batch normalization, on a simulated device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decide.build import capture_out_of_memory, memory_signal, observation_of, out_of_memory, plan_of
from tests.decide.memory_device import CONFIG, MIB, REGIONS, SMALL, Device, Run, device_of, profile_of, region_of
from triaccel_ray.decide.calibration import budget_bytes, compare, forget_shortage, measure, remember_plan
from triaccel_ray.decide.memory import RECOMPUTE, modeled_bytes
from triaccel_ray.decide.storage import decide_storage
from triaccel_ray.decide.throughput import Judgement
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.state import Change, MemoryState, PassTiming, PeakReading, Stored, ThroughputState

COSTS = {"saved": 800, "input": 250, "offloadable": 760, "forward_ms": 1.0, "backward_ms": 2.0}
RESNET = profile_of(*(region_of(name, **COSTS) for name in REGIONS), can_split=False)
"""About the costs of ResNet-152 in BF16 on an H200, in six regions."""
RESNET_DEVICE = Device(
    profile=RESNET, fixed_bytes=1500 * MIB, total_bytes=3233 * MIB, pass_ms=9.0, transient_share=0.05
)


def test_batch_normalization_stays_divided_until_the_whole_batch_is_little_slower():
    run = Run(machine=RESNET_DEVICE)
    run.ticks(60)
    assert run.plan.num_micro_batches == 2
    divided = replace(run.plan, storage=dict.fromkeys(REGIONS, RECOMPUTE))
    assert run.machine.step_ms(run.plan) <= run.machine.step_ms(divided)
    assert run.num_changes(last=40) == 0
    run.machine = replace(RESNET_DEVICE, total_bytes=5000 * MIB)
    run.ticks(60)
    assert run.plan.num_micro_batches == 1
    assert run.plan.storage
    run.machine = replace(RESNET_DEVICE, total_bytes=9000 * MIB)
    run.ticks(60)
    assert (run.plan.storage, run.plan.num_micro_batches) == ({}, 1)
    assert run.num_failures == 1


def test_batch_normalization_is_not_moved_to_and_fro_by_wrong_times():
    """Recomputation takes thrice what the profile says: the whole batch looks faster than it is."""
    for total in range(3000, 5000, 250):
        run = Run(machine=replace(RESNET_DEVICE, total_bytes=total * MIB, ms_factor=3.0))
        run.ticks(200)
        assert run.num_changes(last=100) <= 2


@pytest.mark.parametrize(("times_short", "expected"), [(0, 970), (1, 930), (2, 890), (4, 810), (5, 800), (50, 800)])
def test_the_margin_grows_with_each_plan_that_ran_short(times_short, expected):
    observation = observation_of(plan_of(64), memory=memory_signal(500, 1000))
    assert budget_bytes(observation, MemoryState(times_short=times_short)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("faults", "peak_bytes", "predicted_bytes", "times_short"),
    [
        ([], 950, 960, 0),
        ([], 995, 960, 1),  # nearly exhausted
        ([out_of_memory(64, 32)], 950, 960, 1),
        ([out_of_memory(0, phase="curvature")], 995, 960, 0),
        ([capture_out_of_memory(64)], 950, 960, 1),
        ([capture_out_of_memory(17)], 950, 960, 0),  # an epoch's short last batch
        ([out_of_memory(64, 32)], 950, 1010, 0),  # other processes took memory
        ([out_of_memory(64, 32)], 950, None, 0),  # no new plan
    ],
)
def test_only_a_plan_that_was_predicted_to_fit_makes_the_margin_grow(faults, peak_bytes, predicted_bytes, times_short):
    observation = observation_of(
        plan_of(64), memory=memory_signal(peak_bytes, 1000), faults=tuple(faults), step_ms=10.0, profile=SMALL.profile
    )
    state, _ = compare(observation, MemoryState(predicted_bytes=predicted_bytes))
    assert state.times_short == times_short
    assert (state.other_peak is not None) == bool(times_short)
    assert decode(MemoryState, encode(state)) == state


def test_margin_and_bar_end_once_clearly_more_memory_is_attainable():
    failed = Stored(storage={}, num_micro_batches=1)
    state = MemoryState(times_short=3, short_at_bytes=1000, failed=failed, cap_ticks_left=40, times_failed=3)
    assert forget_shortage(memory_signal(500, 1040), state) == state
    assert forget_shortage(memory_signal(500, 1060), state) == MemoryState(short_at_bytes=1000)


@pytest.mark.parametrize(
    ("times_short", "cap_ticks_left", "waits"), [(1, 3, False), (2, 3, True), (1, 1, False), (2, 1, False)]
)
def test_after_two_plans_that_ran_short_none_is_tried_during_the_bar(times_short, cap_ticks_left, waits):
    run = Run(machine=SMALL)
    before = run.tick()
    short = {"times_short": times_short, "short_at_bytes": SMALL.total_bytes, "cap_ticks_left": cap_ticks_left}
    memory = replace(before.state.memory, **short)
    run.decision = replace(before, state=replace(before.state, memory=memory))
    assert run.tick().plan.steps_as(before.plan) == waits


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.4, 0.7),
    st.sampled_from([1.0, 0.9, 0.7, 0.5]),
    st.sampled_from([0.0, 0.05, 0.15]),
)
def test_wrong_predictions_cost_a_few_failures_and_then_none(seed, share, bytes_factor, transient_share):
    device = device_of(seed)
    total_bytes = 500 * MIB + int((device.total_bytes - 500 * MIB) * share)
    wrong = {"bytes_factor": bytes_factor, "transient_share": transient_share}
    run = Run(machine=replace(device, total_bytes=total_bytes, **wrong))
    run.ticks(200)
    assert run.num_failures <= 4  # the first, before anything is planned, and at most three plans
    assert not any(observation.faults for observation, _ in run.log[100:])
    assert run.num_changes(last=100) <= 2


@pytest.mark.parametrize(
    ("parts", "beyond_mib", "expected_mib"),
    [
        (1, 640, 20),  # 32 samples more take 640 MiB beyond the model
        (1, 0, 0),
        (1, -640, 0),  # less than the model says: not relied on
        (2, 640, 0),  # the same size says nothing
        (4, -160, 10),
    ],
)
def test_two_peaks_tell_what_a_sample_takes_beyond_the_model(parts, beyond_mib, expected_mib):
    half = plan_of(64, 2)
    known = [modeled_bytes(RESNET, {}, 64 // each) for each in (2, parts)]
    other_bytes = 3000 * MIB - known[0] + known[1] + beyond_mib * MIB
    other = PeakReading(batch_size=64, stored=Stored(storage={}, num_micro_batches=parts), peak_bytes=other_bytes)
    observation = observation_of(half, memory=memory_signal(3000 * MIB, 9000 * MIB), step_ms=40.0, profile=RESNET)
    judged = Judgement(state=ThroughputState())
    assert measure(observation, RESNET, judged, MemoryState(other_peak=other)).bytes_per_sample == expected_mib * MIB
    of_other_batch = MemoryState(other_peak=replace(other, batch_size=32))
    assert measure(observation, RESNET, judged, of_other_batch).bytes_per_sample == 0


@pytest.mark.parametrize(("parts", "is_less", "is_over"), [(1, False, True), (1, True, False), (2, False, False)])
def test_a_plan_with_more_micro_batches_or_less_memory_says_nothing_of_the_one_that_failed(parts, is_less, is_over):
    failed = Stored(storage=dict.fromkeys(REGIONS[is_less:], RECOMPUTE), num_micro_batches=1)
    before = MemoryState(failed=failed, cap_ticks_left=3, times_failed=2, times_short=1, predicted_bytes=900 * MIB)
    storage = {} if parts == 2 else dict.fromkeys(REGIONS, RECOMPUTE)
    first, *others = RESNET.regions
    profile = replace(RESNET, regions=(replace(first, saved_bytes=300 * MIB), *others))
    taken, failed_bytes = modeled_bytes(profile, storage, 64 // parts), modeled_bytes(profile, failed.storage, 64)
    assert (0.95 * failed_bytes < taken < failed_bytes) == is_less
    plan = replace(plan_of(64, parts), storage=storage)
    memory = memory_signal(900 * MIB, 1000 * MIB)
    state, _ = compare(observation_of(plan, memory=memory, step_ms=10.0, profile=profile), before)
    assert (state.failed is None) == is_over
    assert (state.times_short, state.times_failed) == ((0, 0) if is_over else (1, 2))


@pytest.mark.parametrize(
    ("may_change", "is_timed", "is_held"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_a_slower_plan_is_not_held_against_others_only_if_it_tells_what_a_micro_batch_costs(
    may_change, is_timed, is_held
):
    observation = observation_of(plan_of(64, 4), memory=memory_signal(500, 1000), step_ms=40.0, regions=REGIONS)
    undo = Change(ms_per_sample=0.5, stored=Stored(storage={}, num_micro_batches=2))
    timing = PassTiming(batch_size=64, num_micro_batches=2, ms=25.0) if is_timed else None
    judged, state = Judgement(state=ThroughputState(), undo=undo), MemoryState(other_timing=timing)
    decision = decide_storage(CONFIG, observation, state, judged, lacks_memory=False, may_change=may_change)
    assert decision.num_micro_batches == 2
    assert bool(decision.state.hold_ticks) == is_held


def test_the_time_of_what_passed_in_its_place_is_not_that_of_a_plan_that_ran_out_of_memory():
    faults = (out_of_memory(64, 32),)
    seen = observation_of(plan_of(64), memory=memory_signal(500, 1000), step_ms=40.0, faults=faults)
    judged, state = Judgement(state=ThroughputState()), MemoryState()
    assert measure(seen, RESNET, judged, state).step_ms is None
    assert remember_plan(seen, judged, plan_of(64, 2), state).other_timing is None


def test_the_cost_of_a_micro_batch_is_remembered_after_a_plan_that_was_not_timed():
    observation = observation_of(plan_of(64, 4), memory=memory_signal(500, 1000), step_ms=40.0)
    judged = Judgement(state=ThroughputState())
    for number, expected in ((1, (40.0 - 25.0) / 3), (4, 2.0)):
        timing = PassTiming(batch_size=64, num_micro_batches=number, ms=25.0)
        state = MemoryState(other_timing=timing, pass_ms=2.0)
        assert measure(observation, RESNET, judged, state).pass_ms == expected
        after = remember_plan(observation, judged, plan_of(64, 2), state)
        assert (after.pass_ms, after.other_timing.num_micro_batches) == (expected, 4)
        assert remember_plan(observation, judged, plan_of(32, 2), state).pass_ms is None
