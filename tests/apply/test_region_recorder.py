"""What regions save and how long they take, counted and timed in the steps themselves."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.test_activations import assert_same
from tests.build import CPU, ONE, RerunPool, blobs, cache_of, step_of
from triaccel_ray.apply import offload
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.region_recorder import RegionRecorder
from triaccel_ray.apply.step import Step
from triaccel_ray.measure.profile import ProfileMeter
from triaccel_ray.records.plan import Storage
from triaccel_ray.records.signals import RegionSignal

ALL = torch.arange(16)


def perceptron(width: int = 24, block: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """Each block saves its input [n, width] and its output, of a sigmoid."""
    torch.manual_seed(0)
    blocks = [block(nn.Linear(width, width), nn.Sigmoid()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 4))


def recorded(model: nn.Module) -> Step:
    step = step_of(model, blobs(16))
    step.activations = Activations({name: model.get_submodule(name) for name in ("1", "2", "3")}, CPU)
    step.activations.request_costs()
    return step


def signals(step: Step) -> tuple[RegionSignal, ...]:
    return step.region_costs(16)[1]


@pytest.mark.parametrize("storage", Storage)
def test_sizes_are_exact_in_any_storage(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1024)
    step, kept = recorded(perceptron()), step_of(perceptron(), blobs(16))
    step.activations.set(dict.fromkeys("123", storage))
    assert signals(step) == ()
    for index in range(2):
        assert_same(step, kept, index=index, num_samples=16)
    one = 16 * 24 * 4
    # A block's output is the input of the next one, and counts there; the last block's is its own.
    sizes = [(each.name, each.saved_bytes, each.input_bytes, each.offloadable_bytes) for each in signals(step)]
    assert sizes == [("1", one, one, one), ("2", one, one, one), ("3", 2 * one, one, 2 * one)]


@pytest.mark.parametrize("storage", Storage)
def test_an_attempt_without_enough_memory_leaves_nothing_behind(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 1024)
    alive: list[int] = []

    class Scarce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gc.collect()
            wide = (each for each in gc.get_objects() if isinstance(each, Tensor) and each.shape[1:] == (77,))
            alive.append(sum(each.untyped_storage().nbytes() for each in wide))
            if len(alive) < 4:
                raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
            return x

    model = perceptron(width=77)
    model.add_module("scarce", Scarce())
    step = recorded(model)
    step.activations.set(dict.fromkeys("123", storage))
    step.run(ALL, ONE, step=0)
    assert len(alive) > 3
    assert alive[-1] <= alive[0]


@pytest.mark.parametrize("captured", [False, True])
def test_the_second_step_of_a_kind_is_timed_and_costs_stay_until_they_are_measured_again(captured: bool) -> None:
    step = recorded(perceptron())
    cache = cache_of(step, pool=RerunPool() if captured else None)
    found: list[tuple[RegionSignal, ...]] = []
    for _ in range(2):
        recorders = []
        for index in range(4):
            cache.run(ALL, ONE, step=index)
            recorders.append(step.recorder)
            assert bool(signals(step)) == (index > 0 or bool(found))
        assert recorders[0].counts
        assert found or not recorders[1].counts
        assert captured or recorders[2:] == [None, None]
        assert all(each.forward_ms > 0.0 and each.backward_ms > 0.0 for each in signals(step))
        found.append(signals(step))
        step.activations.measure_costs_again()
        cache._pool.release()
        assert signals(step) == found[-1]
    sizes = [[(each.name, each.saved_bytes, each.input_bytes) for each in costs] for costs in found]
    assert sizes[0] == sizes[1]


def test_costs_of_another_number_of_parts_are_measured_too() -> None:
    step = recorded(perceptron())
    for num_parts, saved_bytes in ((1, {1536, 3072}), (2, {768, 1536})):
        step.set_num_micro_batches(num_parts)
        assert signals(step) == ()
        for index in range(2):
            step.run(ALL, ONE, step=index)
        assert {each.saved_bytes for each in signals(step)} == saved_bytes
        assert step.region_costs(16)[0] == 16 // num_parts


def test_recomputation_does_not_count_as_backward_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            now[0] += 1.0
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda _: now.__setitem__(0, now[0] + 0.25))  # before the block's own time begins
            return y

    monkeypatch.setattr(RegionRecorder, "mark", lambda _: now[0])
    step = recorded(perceptron(block=Slow))
    step.activations.set(dict.fromkeys("12", Storage.RECOMPUTE))
    for index in range(2):
        step.run(ALL, ONE, step=index)
    assert [each.forward_ms for each in signals(step)] == [1000.0] * 3
    assert [each.backward_ms for each in signals(step)] == [0.0, 250.0, 250.0]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(24), nn.LayerNorm(24)])
def test_a_profile_is_there_once_costs_are_known(norm: nn.Module) -> None:
    model = nn.Sequential(*perceptron()[:4], norm, nn.Linear(24, 4))
    step = recorded(model)
    meter = ProfileMeter(model, CPU, step.region_costs)
    assert meter.read(16) is None
    for index in range(2):
        step.run(ALL, ONE, step=index)
    profile: Any = meter.read(16)
    assert (profile.regions, profile.micro_batch_size) == (signals(step), 16)
    assert profile.can_split == isinstance(norm, nn.LayerNorm)
    assert profile.accumulation_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert profile.to_host_bytes_per_ms == profile.to_device_bytes_per_ms == 0.0
    assert meter.read(8) is None
