"""Plans that compile regions anew, on a simulated device: what they cost counts, and that of others does not."""

from dataclasses import replace

import pytest

from tests.decide.memory_device import MIB, REGIONS, SMALL, Device, Run, profile_of, region_of
from triaccel_ray.decide.planner import Planner


def selective(device: Device, **others: object) -> Device:
    regions = tuple(replace(each, can_select=True) for each in device.profile.regions)
    return replace(device, profile=replace(device.profile, regions=regions, **others))


@pytest.mark.parametrize(("samples_left", "pays"), [(10**5, False), (10**8, True)])
def test_regions_are_compiled_anew_only_if_that_pays(samples_left: int, pays: bool):
    """The first plan took a minute, most of which was compilation; others take 100 ms."""
    run = Run(machine=selective(SMALL))
    run.adapting_ms = 60_000.0
    for _ in range(20):
        run.tick(samples_left=samples_left)
    kinds = set(run.plan.storage.values())
    assert any(kind.is_selective for kind in kinds) == pays
    assert kinds
    assert run.num_failures == 1
    assert run.num_changes(last=10) == 0
    known = Run(machine=SMALL)
    known.ticks(20)
    assert run.machine.step_ms(run.plan) <= 1.03 * known.machine.step_ms(known.plan)


def test_a_plan_that_pays_without_compilation_is_made_though_another_does_not_pay():
    """At first, any plan seems to cost as much as the first. A short last batch then shows what others cost."""
    found, device = [], replace(SMALL, total_bytes=1725 * MIB)
    for machine in (device, selective(device)):
        run = Run(machine=machine)
        for tick in range(30):
            before, run.adapting_ms = run.plan, run.adapting_ms if tick else 60_000.0
            run.adapting_ms += 100.0 * (tick == 10)
            seen = {"regions": REGIONS, "adapting_ms": run.adapting_ms, "samples_left": 10**5}
            _, decision = run.step(**seen)
            if tick > 10 and not decision.plan.steps_as(before):
                run.adapting_ms += 100.0
        found.append(machine.step_ms(run.plan))
    assert found[1] <= found[0] < 70.0
    assert run.log[-1][1].state.memory.unpaid.compiles


def test_what_a_compilation_costs_is_not_what_other_plans_cost():
    run = Run(machine=selective(SMALL))
    run.adapting_ms = 60_000.0
    for tick in range(40):
        before = set(run.plan.storage.values())
        decision = run.tick(samples_left=10**7 if tick < 20 else 3 * 10**5)
        new = set(run.plan.storage.values()) - before
        run.adapting_ms += 60_000.0 * any(kind.is_selective for kind in new)
        if tick == 19:
            assert any(kind.is_selective for kind in run.plan.storage.values())
            slow = run.machine.step_ms(run.plan)
            run.machine = replace(run.machine, total_bytes=2100 * MIB)
    assert decision.state.throughput.later_ms < 1000.0 < decision.state.throughput.compile_ms
    assert run.machine.step_ms(run.plan) < slow


def test_a_plan_that_does_not_pay_is_not_searched_for_at_every_tick(monkeypatch: pytest.MonkeyPatch):
    searches, search = [], Planner.cheapest
    monkeypatch.setattr(Planner, "cheapest", lambda *args: searches.append(args) or search(*args))
    run = Run(machine=selective(replace(SMALL, total_bytes=1500 * MIB)))
    run.adapting_ms = 20_000.0
    run.ticks(20)
    for _ in range(12):
        run.machine = replace(run.machine, total_bytes=run.machine.total_bytes + 25 * MIB)
        run.ticks(8)
        searches.clear()
        run.ticks(10)
        assert len(searches) < 9


@pytest.mark.parametrize(("forward_ms", "backward_ms", "total"), [(8.0, 6.0, 1025), (12.0, 2.0, 1000)])
def test_where_micro_batches_change_the_results_fewer_are_worth_a_compilation(
    forward_ms: float, backward_ms: float, total: int
):
    costs = {"saved": 300, "input": 30, "offloadable": 0, "forward_ms": forward_ms, "backward_ms": backward_ms}
    profile = profile_of(*(region_of(name, **costs) for name in REGIONS), bandwidth=0.0)
    run = Run(machine=selective(Device(profile=profile, total_bytes=total * MIB, pass_ms=1.0), can_split=False))
    run.adapting_ms = 60_000.0
    for _ in range(80):
        run.tick(samples_left=3 * 10**5)
    assert run.plan.num_micro_batches == 2
