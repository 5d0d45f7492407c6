"""Storage that changes between steps, by plan or because a batch does not fit: the same gradients all the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.test_activations import ALL, Network, assert_same, images, recomputing, storing
from tests.apply.test_split_weights import FIXED, run
from tests.build import BF16, CPU, FP16, FP32, ONE, RerunPool, cache_of, loop_of, step_of
from triaccel_ray.apply import offload
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import FaultKind, Plan, Storage
from triaccel_ray.trainables.text import GPT


class Transformer(Network):
    """Projections are split, so that saved tensors are views."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.Sequential(*GPT(layers=3, width=8, heads=2, context=36).blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).mT).mean(1))


MIXED = {"blocks.0": Storage.OFFLOAD, "blocks.1": Storage.RECOMPUTE, "blocks.2": Storage.KEEP}


@pytest.mark.parametrize(("levels", "num_parts"), [((FP32,), 1), ((BF16,), 1), ((FP16, BF16), 3)])
@pytest.mark.parametrize("make", [Network, Transformer])
def test_storage_changes_between_steps_and_gradients_do_not(
    make: Any, levels: Any, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 64)
    kept, changing = step_of(make(), images()), storing(make())
    plans = [{}, dict.fromkeys(ALL, Storage.OFFLOAD), MIXED, dict.fromkeys(ALL, Storage.RECOMPUTE), MIXED, {}]
    for index, plan in enumerate(plans):
        changing.activations.set(plan)
        assert changing.activations.storage == {name: each for name, each in plan.items() if each is not Storage.KEEP}
        for step in (kept, changing):
            names = [layer.name for layer in find_layers(step.model)]
            step.precision.set({name: levels[index % len(levels)] for index, name in enumerate(names)})
            step.set_num_micro_batches(num_parts)
        assert_same(kept, changing, index=index)


def test_storage_of_unknown_regions_is_refused_and_a_fixed_one_stays() -> None:
    step = storing(Network())
    with pytest.raises(KeyError, match=r"regions \['blocks.7'\] are not in the model"):
        step.activations.set({"blocks.7": Storage.OFFLOAD})
    without_regions = Activations({}, CPU)  # any more
    without_regions.set({"blocks.0": Storage.RECOMPUTE})
    assert not without_regions.storage
    fixed = recomputing(Network())
    fixed.activations.set({"blocks.0": Storage.OFFLOAD})
    assert fixed.activations.storage == dict.fromkeys(ALL, Storage.RECOMPUTE)
    assert not fixed.activations.recompute_all()
    assert not fixed.activations.stores_least


class Hungry(Network):
    """Has memory for all regions' tensors of `limit` samples, or for all samples if `frugal` holds."""

    def __init__(self, limit: int) -> None:
        super().__init__(0.0, 0.0, 0.0)
        self.limit, self.sizes = limit, []
        self.frugal: Any = lambda: False

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        if len(x) > self.limit and not self.frugal():
            raise torch.OutOfMemoryError("no room")
        return super().forward(x)


@pytest.mark.parametrize(
    ("limit", "suffices", "sizes"), [(6, True, [12, 12]), (6, False, [12, 12, 6, 6]), (0, True, [1, 1])]
)
def test_a_step_without_memory_recomputes_all_before_it_is_split(limit: int, suffices: bool, sizes: list[int]) -> None:
    model, samples = Hungry(limit), torch.arange(sizes[0])
    step = storing(model)
    step.activations.set({"blocks.0": Storage.OFFLOAD})
    model.frugal = lambda: suffices and step.activations.stores_least
    (fault,) = step.run(samples, ONE, step=3).faults
    assert (fault.kind, fault.stores_least) == (FaultKind.OUT_OF_MEMORY, True)
    assert (fault.batch_size, fault.micro_batch_size) == (sizes[0], sizes[-1])
    assert model.sizes == sizes
    assert step.activations.storage == dict.fromkeys(ALL, Storage.RECOMPUTE)
    assert step.run(samples, ONE, step=4).faults == ()
    step.activations.set({})
    assert step.activations.storage == {}
    model.limit, model.frugal = 0, lambda: False
    with pytest.raises(torch.OutOfMemoryError):
        step.run(samples, ONE, step=5)


def test_a_waived_budget_restores_the_storage() -> None:
    def check() -> None:
        raise BudgetExceededError("the process holds too much")

    step = storing(Network())
    step._memory = replace(step._memory, check=check)
    (fault,) = step.run(torch.arange(2), ONE, step=0).faults
    assert fault.kind is FaultKind.BUDGET_EXCEEDED
    assert (step.activations.storage, step.num_micro_batches) == ({}, 1)


def test_a_captured_step_is_of_one_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 64)
    cache = cache_of(storing(Network(0.0, 0.0, 0.0)), pool=RerunPool())
    for index in range(2):
        cache.run(torch.arange(4), ONE, step=index)
    cache.step.activations.set(MIXED)
    for index in range(3):
        assert cache.run(torch.arange(4), ONE, step=index) == ()
    (kind,) = cache._entries
    assert sorted(storage for _, storage in kind.storage) == [Storage.OFFLOAD, Storage.RECOMPUTE]


def test_a_plan_carries_the_storage_and_a_resumed_step_the_one_it_fell_back_to() -> None:
    step = storing(Network())
    cache = cache_of(step)
    plan = Plan(batch_size=4, precision={}, storage=MIXED)
    actuators = Actuators(plan, cache, GraphPool(CPU))
    assert step.activations.storage == {name: each for name, each in MIXED.items() if each is not Storage.KEEP}
    assert actuators.apply(replace(plan, storage={}), step=0).faults == ()
    assert step.activations.storage == {}
    step.activations.recompute_all()
    state = actuators.state_dict()
    step.activations.set({})
    actuators.load_state_dict(state, {}, adapts_precision=True, adapts_batch=True)
    assert step.activations.storage == dict.fromkeys(ALL, Storage.RECOMPUTE)
    (fault,) = actuators.apply(replace(plan, storage={"x": Storage.OFFLOAD}), step=1).faults
    assert fault.kind is FaultKind.APPLY_FAILED


@pytest.mark.parametrize("limited", [True, False])
def test_a_tick_observes_costs_only_if_memory_is_limited(limited: bool) -> None:
    budget = 2**40 if limited else None
    loop, _ = loop_of(Network(), images(40), FIXED, memory_headroom=budget)
    run(loop, 3)
    profile: Any = loop.tick().observation.profile
    assert (profile is not None) == limited
    if limited:
        assert [each.name for each in profile.regions] == list(ALL)
        assert profile.micro_batch_size == loop.plan.batch_size
        assert not profile.can_split
