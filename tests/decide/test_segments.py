"""Regions that are recomputed in segments: what is predicted, and when the planner joins them."""

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import codes
from tests.decide.memory_device import MIB, REGIONS, Device, Run, profile_of, region_of
from tests.decide.test_memory import ALIKE, GRADIENTS, OF_EIGHT, measured_of, names, profiles, region
from triaccel_ray.decide.memory import (
    JOIN,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    added_ms,
    cheapest_plan,
    least_plan,
    modeled_bytes,
    predict,
)
from triaccel_ray.decide.segments import joined, segmentations
from triaccel_ray.records.plan import ReasonCode
from triaccel_ray.records.signals import MemoryProfile


def joinable(profile: MemoryProfile) -> MemoryProfile:
    return replace(profile, regions=tuple(replace(each, can_join=True) for each in profile.regions))


def test_what_cannot_join_is_recomputed_alone_and_so_is_what_follows_a_region_that_is_kept() -> None:
    assert modeled_bytes(ALIKE, dict.fromkeys("abcd", JOIN), 8) == 20 + 20 + 20 + 100 + GRADIENTS
    alone, joining = ({"a": OFFLOAD, "b": kind} for kind in (RECOMPUTE, JOIN))
    assert modeled_bytes(joinable(ALIKE), joining, 8) == modeled_bytes(joinable(ALIKE), alone, 8)
    two = {"a": RECOMPUTE, "b": JOIN}
    assert added_ms(ALIKE, two, 8) == added_ms(ALIKE, {"a": RECOMPUTE, "b": RECOMPUTE}, 8)


@given(profiles(), st.data())
def test_the_model_is_that_of_the_tensors_that_exist(profile, data):
    kinds = [data.draw(st.sampled_from([KEEP, RECOMPUTE, JOIN])) for _ in profile.regions]
    for index, kind in enumerate(kinds):
        if kind is JOIN and (index == 0 or kinds[index - 1] is KEEP):
            kinds[index] = RECOMPUTE
    storage = dict(zip(names(profile), kinds, strict=True))
    held, peak = {}, 0
    for index, (each, kind) in enumerate(zip(profile.regions, kinds, strict=True)):  # forward
        held[index] = {KEEP: each.saved_bytes, RECOMPUTE: each.input_bytes, JOIN: 0}[kind]
    index = len(kinds) - 1
    while index >= 0:  # backward: a segment is recomputed whole, then its regions' passes free what they needed
        first = index
        while kinds[first] is JOIN:
            first -= 1
        for each in range(first, index + 1):
            held[each] = profile.regions[each].saved_bytes
        for each in range(index, first - 1, -1):
            signal, following = profile.regions[each], profile.regions[each + 1 : each + 2]
            largest = max(part.input_bytes for part in (signal, *following))
            peak = max(peak, sum(held.values()) + min(2 * largest, signal.saved_bytes))
            del held[each]
        index = first - 1
    assert modeled_bytes(joinable(profile), storage, profile.micro_batch_size) == peak


def test_segments_save_about_as_much_as_the_largest_region() -> None:
    sizes = (400, 100, 100, 100, 100, 100)
    regions = joinable(profile_of(*(region(str(i), saved_bytes=each) for i, each in enumerate(sizes)))).regions
    ways = [[len(segment) for segment in way] for way in segmentations(regions, [each.name for each in regions])]
    assert ways[:2] == [[1, 4, 1], [3, 3]]
    assert ways[-1] == [6]
    assert segmentations(regions, ["1", "2", "4", "5"])[0] == [(each,) for each in regions[:1]] + [
        regions[1:3], regions[3:4], regions[4:6],
    ]  # fmt: skip
    assert segmentations(ALIKE.regions, names(ALIKE)) == []


def test_a_deep_model_fits_a_budget_that_recomputing_each_region_alone_exceeds() -> None:
    deep = profile_of(*(region(f"{i}") for i in range(36)), **OF_EIGHT, can_split=False)
    deep = replace(deep, to_host_bytes_per_ms=0.0, to_device_bytes_per_ms=0.0)
    measured = measured_of(deep, 8, step_ms=150.0)
    alone = modeled_bytes(deep, dict.fromkeys(names(deep), RECOMPUTE), 8)
    budget = {"budget_bytes": 5000 + alone * 2 // 3, "changeable": names(deep)}
    assert cheapest_plan(deep, measured, **budget).num_micro_batches == 2
    plan = cheapest_plan(joinable(deep), measured, **budget)
    assert (plan.num_micro_batches, JOIN in plan.storage.values()) == (1, True)
    more = cheapest_plan(joinable(deep), measured, **{**budget, "budget_bytes": 5000 + alone})
    assert 0 < len(more.storage) < 36  # less is recomputed than alone, where all would be
    fixed = cheapest_plan(joinable(deep), measured, budget_bytes=5000 + alone, changeable=names(deep)[:30])
    assert fixed is not None
    assert set(fixed.storage) <= set(names(deep)[:30])


@given(profiles(), st.floats(0.0, 1.0), st.sampled_from([0.0, 20.0]))
def test_of_each_way_to_join_the_cheapest_storage_is_found_and_none_joins_at_a_loss(profile, share, pass_ms):
    measured = measured_of(profile, batch_size=profile.micro_batch_size, pass_ms=pass_ms)
    budget = 5000 + int(share * (measured.peak_bytes - 5000))
    alone = cheapest_plan(profile, measured, budget_bytes=budget, changeable=names(profile))
    least_alone = least_plan(profile, measured, changeable=names(profile)).prediction.peak_bytes
    profile = joinable(profile)
    assert least_plan(profile, measured, changeable=names(profile)).prediction.peak_bytes <= least_alone
    plan = cheapest_plan(profile, measured, budget_bytes=budget, changeable=names(profile))
    if plan is not None:
        assert plan.prediction.peak_bytes <= budget
        assert plan.prediction == predict(profile, measured, plan.storage, plan.num_micro_batches)
    if alone is not None:
        assert alone.num_micro_batches != plan.num_micro_batches or plan.prediction.ms <= alone.prediction.ms + 1e-3
    recomputable = [each.name for each in profile.regions if each.input_bytes < each.saved_bytes]
    for segments in segmentations(profile.regions, recomputable):
        firsts = [each[0].name for each in segments if each[0].name in recomputable]
        for chosen in product([False, True], repeat=len(firsts)):
            storage = joined(segments, [name for name, is_chosen in zip(firsts, chosen, strict=True) if is_chosen])
            other = predict(profile, measured, storage, 1)
            if other.peak_bytes <= budget:
                assert plan is not None
                assert plan.num_micro_batches > 1 or plan.prediction.ms <= other.ms + 1e-3


def test_a_run_joins_regions_before_it_divides_the_batch() -> None:
    regions = (region_of(name, saved=100, input=50, offloadable=0, forward_ms=1.0, backward_ms=4.0) for name in REGIONS)
    profile = joinable(profile_of(*regions, can_split=False))
    run = Run(machine=Device(profile=profile, total_bytes=940 * MIB, pass_ms=20.0))
    run.ticks(12)
    assert run.plan.num_micro_batches == 1
    assert JOIN in run.plan.storage.values()
    texts = [reason.text for _, each in run.log for reason in each.reasons if reason.code is ReasonCode.MEMORY_PLAN]
    assert any("4 of 6 regions recomputed in 2 segments" in text for text in texts)
    run.machine = replace(run.machine, taken_bytes=100 * MIB)
    after = run.tick()
    assert codes(after, "memory") == [ReasonCode.MEMORY_PLAN]
    assert list(after.plan.storage.values()) == [RECOMPUTE, JOIN, RECOMPUTE, JOIN, RECOMPUTE, RECOMPUTE]
    assert after.plan.num_micro_batches == 2
