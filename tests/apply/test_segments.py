"""Regions recomputed in segments: the same gradients, statistics and random numbers, and fewer tensors held."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.captured import fixed, loop_of, sgd
from tests.apply.fusible import fused
from tests.apply.test_activations import Network, assert_same, fused_step, storing
from tests.build import CPU, ONE, cache_of, run
from triaccel_ray.apply import offload
from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.apply.divide import divide
from triaccel_ray.apply.step import Step
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.measure.saved_bytes import counting_saved_bytes
from triaccel_ray.model.regions import find_regions
from triaccel_ray.records.plan import FaultKind, Plan, Precision, Storage
from triaccel_ray.trainables.models import efficientnet_b0, resnet18

KEEP, RECOMPUTE, OFFLOAD, JOIN, *SELECTIVE = Storage


def new_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return resnet18(10, "cifar") if name == "resnet18" else efficientnet_b0(10)


def segments(step: Step, *lengths: int) -> dict[str, Storage]:
    """The first regions in segments of these lengths."""
    kinds = [kind for length in lengths for kind in [RECOMPUTE] + [JOIN] * (length - 1)]
    step.activations.recompute_all()  # finds the regions of the graph
    return dict(zip(step.activations.regions, kinds, strict=False))


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_gradients_statistics_and_random_numbers_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1024)
    kept, changing = (fused_step(new_model(name)) for _ in range(2))
    lengths = [(3, 1, 2), (8,), (1, 1, 4), (2, 2, 2, 2)]
    plans = [(segments(changing, *each), [*each]) for each in lengths]
    mixed = dict(zip(changing.activations.regions, (KEEP, OFFLOAD, OFFLOAD, KEEP, RECOMPUTE), strict=False))
    for index, (storage, expected) in enumerate([*plans, (mixed, [1]), ({}, [])]):
        changing.activations.set(storage)
        assert [len(each) for each in changing.activations._segments.values()] == expected
        module = changing._forward_of(None, is_divided=bool(storage))
        assert module is (changing.activations.divided if storage else changing.fusion).module
        assert_same(kept, changing, index=index, num_samples=8)
    assert kept.activations.divided is None


def held_bytes(step: Step, storage: dict[str, Storage]) -> int:
    step.activations.set(storage)
    module = step._forward_of(None, is_divided=True)
    with counting_saved_bytes(step.model) as held, step.activations.in_force(module, step._recomputing):
        module(torch.randn(8, 3, 32, 32)).sum()
    return sum(held.values())


def test_a_segment_holds_the_inputs_of_its_first_region_alone() -> None:
    step = fused_step(new_model("resnet18"))
    names = list(find_regions(step.model))
    one = 8 * 64 * 32 * 32 * 4  # an output of the first stage
    alone, joined = (held_bytes(step, segments(step, *lengths)) for lengths in ((1, 1, 1), (3,)))
    assert alone - joined == 2 * one
    assert list(step.activations.divided.regions) == [names[0], *names[3:]]
    assert held_bytes(step, segments(step, 1, 1, 1)) == alone


def test_a_region_is_recomputed_alone_where_it_cannot_join() -> None:
    step = storing(Network())
    step.activations.set({"blocks.0": RECOMPUTE, "blocks.1": JOIN})
    assert step.activations.storage == {"blocks.0": RECOMPUTE, "blocks.1": RECOMPUTE}
    step = fused_step(new_model("resnet18"))
    first, second, third, *_ = find_regions(step.model)
    step.activations.set({second: JOIN, third: JOIN})
    assert step.activations.storage == {second: RECOMPUTE, third: JOIN}
    step.activations._bar([second], RECOMPUTE, "for this test", 0)
    assert step.activations.storage == {third: RECOMPUTE}
    (fault,) = step.activations._bar([third], RECOMPUTE, "for this test", 0)
    assert (fault.kind, third in fault.detail) == (FaultKind.ACTIVATIONS_KEPT, True)
    assert step.activations.storage == {}
    assert first in step.activations.divided.regions


def test_without_memory_segments_stay_and_their_costs_are_not_measured() -> None:
    step = fused_step(new_model("resnet18"))
    step.activations.request_costs()
    step.activations.set(segments(step, 4, 4))
    before = dict(step.activations.storage)
    assert step.activations.stores_least
    assert not step.activations.recompute_all()
    assert step.activations.storage == before
    step.run(torch.arange(8), ONE, step=0)
    assert step.recorder is None
    step.activations.set({})
    for index in range(2):
        step.run(torch.arange(8), ONE, step=index)
    signals = step.region_costs(8)[1]
    assert [each.can_join for each in signals] == [False] + [True] * 7
    step.activations._bar([signals[2].name], RECOMPUTE, "for this test", 0)
    step.activations._barred.add((signals[5].name, JOIN))
    can_join = [each.can_join for each in step.region_costs(8)[1]]
    assert can_join == [False, True, False, False, True, False, True, True]
    step.model.layer1.eval()  # then the model is called as it is
    assert not any(each.can_join for each in step.region_costs(8)[1])


def test_costs_of_a_size_that_was_first_used_with_segments_are_in_proportion() -> None:
    step = fused_step(new_model("resnet18"))
    step.activations.request_costs()
    for index in range(2):
        step.run(torch.arange(8), ONE, step=index)
    _, known = step.region_costs(8)
    step.activations.set(segments(step, 4, 4))
    step.set_num_micro_batches(2)
    size, half = step.region_costs(8)
    assert size == 4
    assert [2 * each.saved_bytes for each in half] == [each.saved_bytes for each in known]
    assert [2 * each.forward_ms for each in half] == pytest.approx([each.forward_ms for each in known])
    step.precision.set(dict.fromkeys(step.precision._regions, Precision.BF16))
    assert [4 * each.saved_bytes for each in step.region_costs(8)[1]] == [each.saved_bytes for each in known]


def test_a_checkpoint_has_segments_and_the_costs_of_their_regions() -> None:
    first, second = (fused_step(new_model("resnet18")) for _ in range(2))
    first.activations.request_costs()
    for index in range(2):
        first.run(torch.arange(8), ONE, step=index)
    storage = segments(first, 3, 1, 4)
    plan = Plan(batch_size=8, precision={}, lr_scale={}, storage=storage)
    actuators = [Actuators(plan, cache_of(step), GraphPool(CPU)) for step in (first, second)]
    state = actuators[0].state_dict()
    second.activations.set({})
    actuators[1].load_state_dict(decode_saved(state), {}, adapts_precision=True, adapts_batch=True)
    assert second.activations.storage == storage
    assert second.region_costs(8) == first.region_costs(8)


def decode_saved(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Counting(nn.ReLU):
    """Changes a buffer, so that it cannot be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return super().forward(x)


class Steady(nn.Module):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.activation = activation or nn.SiLU()  # saves its input, not its output

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class Fickle(Steady):
    def __init__(self) -> None:
        super().__init__(Counting())


class Overwriting(Steady):
    """Writes into its inputs, as a dropout in place does."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


@pytest.mark.parametrize(("block", "first"), [(Fickle, 0), (Overwriting, 1)])
def test_a_segment_that_fails_is_recomputed_region_by_region_before_any_is_blamed(block: Any, first: int) -> None:
    """Regions 1 and 3 cannot be recomputed."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Steady(), block(), Steady(), block())
    step = fused_step(nn.Sequential(blocks, nn.Flatten(), nn.Linear(3 * 32 * 32, 4)))
    names = list(step.activations.regions)
    joined = {names[first]: RECOMPUTE, names[first + 1]: JOIN}
    step.activations.set({names[0]: RECOMPUTE, names[2]: RECOMPUTE, **joined})
    assert step.activations.storage.items() >= joined.items()
    together, alone = step.run(torch.arange(8), ONE, step=0).faults
    assert f"recomputing {names[first]} to {names[first + 1]} as one segment failed" in together.detail
    assert f"activations of {names[1]} are kept" in alone.detail
    assert step.activations.storage == {names[0]: RECOMPUTE, names[2]: RECOMPUTE}


class Skipping(nn.Module):
    """The sum after the third block also gets the output of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Steady(nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        return self.blocks[3](self.blocks[2](self.blocks[1](first)) + first)


def test_only_regions_that_get_all_from_the_one_before_can_join() -> None:
    model = Skipping()
    names = [f"blocks.{index}" for index in range(4)]
    divided = divide(model, fused(model).module, names)
    assert divided.before == {"blocks.1": "blocks.0", "blocks.3": "blocks.2"}
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(divided.module(x), model(x), rtol=0.0, atol=0.0)
    joined = divide(model, fused(model).module, names, ["blocks.1", "blocks.3"])
    assert list(joined.regions) == ["blocks.0", "blocks.2"]
    torch.testing.assert_close(joined.module(x), model(x), rtol=0.0, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
def test_segments_of_captured_and_eager_steps_compute_the_same(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    found = []
    for lengths in ((), (3, 1, 2, 2)):
        torch.manual_seed(0)
        data = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
        config = replace(fixed(Precision.BF16, capture=capture), every_steps=100)
        loop = loop_of(resnet18(10, "cifar").cuda(), config, sgd, data)
        run(loop, 3)
        storage = segments(loop._training.steps.step, *lengths) if lengths else {}
        assert loop._actuators.apply(replace(loop.plan, storage=storage), step=3).faults == ()
        run(loop, 6)
        assert loop._training.steps.num_captured == capture
        assert list(loop._training.steps.step.activations.storage.values()).count(JOIN) == (4 if lengths else 0)
        found.append({key: value.clone() for key, value in loop.model.state_dict().items()})
        assert {fault.kind for fault in loop.tick().observation.faults} <= {FaultKind.COMPILED}
        loop.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0] if key.endswith("num_batches_tracked"))
