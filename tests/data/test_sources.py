from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.build import CPU, CountingSource, blobs, plain
from triaccel_ray.config import ControlConfig, DataPlace
from triaccel_ray.data import sources
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import DatasetSource, DataSource, TensorSource, as_source, default_config, delivered
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB, CudaMemory
from triaccel_ray.records.plan import FaultKind

INPUTS, TARGETS = torch.arange(10.0).view(5, 2), torch.arange(5)
INDICES = torch.tensor([3, 0])
Pair = namedtuple("Pair", ["left", "right"])


class Items(Dataset[Any]):
    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Batches(BatchSampler):
    """Another type than the loader makes by itself."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_tensors_come_back_by_index() -> None:
    inputs, targets = as_source((INPUTS, TARGETS)).batch(INDICES, None)
    assert torch.equal(inputs, INPUTS[INDICES])
    assert torch.equal(targets, INDICES)


def test_augmentation_needs_a_generator_and_comes_before_preparation() -> None:
    def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + torch.rand((), generator=generator)

    source = TensorSource(INPUTS, TARGETS, augment=augment, prepare=lambda inputs: 2.0 * inputs).to(CPU)
    assert torch.equal(source.batch(INDICES, None)[0], 2.0 * INPUTS[INDICES])
    drawn = torch.rand((), generator=torch.Generator().manual_seed(1))
    augmented = source.batch(INDICES, torch.Generator().manual_seed(1))[0]
    assert torch.equal(augmented, 2.0 * (INPUTS[INDICES] + drawn))


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (INPUTS, TARGETS[:4], "inputs and targets hold 5 and 4 samples: must be as many"),
        (INPUTS[:0], TARGETS[:0], "inputs hold 0 samples"),
    ],
)
def test_tensors_that_are_no_samples_are_refused(inputs: Tensor, targets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorSource(inputs, targets)


def test_tensors_that_do_not_fit_on_the_device_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, targets = torch.randn(10, 3), torch.arange(10)

    def refuse(self: Tensor, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB.")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", refuse)
        streamed = TensorSource(inputs, targets).to(CPU)
        prepared = TensorSource(inputs, targets, prepare=Tensor.half)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            prepared.to(CPU)
    assert streamed.streamed_because == "CUDA out of memory. Tried to allocate 9 TiB."
    assert "streams if it is a DatasetSource" in caught.value.__notes__[0]
    assert not streamed.is_resident
    chosen = torch.tensor([7, 2])
    assert torch.equal(streamed.batch(chosen, None)[0], inputs[chosen])
    assert torch.equal(streamed.batch(chosen, None)[1], targets[chosen])
    streamed.close()


class Negated(TensorSource):
    def views(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, -inputs


def test_a_source_of_ones_own_keeps_its_views_wherever_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Negated(INPUTS, TARGETS)
    moved = source.to(CPU)
    assert isinstance(moved, Negated)
    assert torch.equal(moved.views(INPUTS)[1], -INPUTS)

    def refuse(tensor: Tensor, device: torch.device) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", refuse)
        streamed = source.to(CPU)
    assert not streamed.is_resident
    assert torch.equal(streamed.views(INPUTS)[1], -INPUTS)
    streamed.close()

    class Shown(DatasetSource):
        def views(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, -inputs

    assert len(Shown(TensorDataset(INPUTS, TARGETS)).to(CPU).views(INPUTS)) == 2


@pytest.mark.gpu
def test_tensors_beyond_a_budget_train_from_the_host() -> None:
    inputs, targets = torch.randn(6000, 20_000), torch.randint(0, 2, (6000,))  # 458 MiB
    model, ticks = nn.Linear(20_000, 2).cuda(), []
    loop = ControlLoop(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4, fused=True),
        nn.functional.cross_entropy,
        (inputs, targets),
        memory_budget=CudaMemory(torch.device("cuda", 0), None).sample() + 350 * MIB,
        on_tick=ticks.append,
    )
    assert not loop.sampler.source.is_resident
    loop.train_epoch()
    loop.close()
    assert loop.memory.peak_bytes <= loop.memory.limit_bytes
    assert FaultKind.DATA_STREAMED in {fault.kind for tick in ticks for fault in tick.observation.faults}


class Here(TensorSource):
    """Stays where it is."""

    def to(self, device: torch.device) -> TensorSource:
        return self


@pytest.mark.parametrize("data_on", ["device", "host"])
def test_on_a_cpu_samples_are_on_the_host_anyway(data_on: DataPlace) -> None:
    drawn, targets = delivered(TensorSource(INPUTS, TARGETS), CPU, data_on).batch(INDICES, None)
    assert torch.equal(drawn, INPUTS[INDICES])
    assert torch.equal(targets, INDICES)
    (drawn, *_), _ = delivered(DatasetSource(Items(((1.0, 2.0), 0))), CPU, data_on).batch(torch.tensor([0]), None)
    assert drawn.tolist() == [1.0]


def test_a_host_that_cannot_pin_the_samples_leaves_them_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: Tensor, device: torch.device) -> Tensor:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(sources, "in_host_memory", refuse)
    source = Here(INPUTS, TARGETS)
    assert delivered(source, torch.device("cuda"), "host") is source


def test_a_data_set_is_collated() -> None:
    source = as_source(TensorDataset(INPUTS, TARGETS)).to(CPU)
    assert len(source) == 5
    inputs, targets = source.batch(INDICES, torch.Generator())
    assert torch.equal(inputs, INPUTS[INDICES])
    assert torch.equal(targets, INDICES)


@pytest.mark.parametrize(
    ("one", "two", "batch"),
    [
        ({"a": 1.0}, {"a": 2.0}, {"a": [1.0, 2.0]}),
        ((1.0, 3.0), (2.0, 4.0), ([1.0, 2.0], [3.0, 4.0])),
        (Pair(1.0, 3.0), Pair(2.0, 4.0), Pair([1.0, 2.0], [3.0, 4.0])),
        ("one", "two", ["one", "two"]),
    ],
)
def test_inputs_of_a_data_set_keep_their_structure(one: Any, two: Any, batch: Any) -> None:
    inputs, _ = DatasetSource(Items((one, 0), (two, 1))).batch(torch.tensor([0, 1]), None)
    assert plain(inputs) == plain(batch)


def test_a_source_is_itself_and_a_list_is_a_data_set() -> None:
    source = CountingSource(INPUTS, TARGETS)
    assert as_source(source) is source
    assert as_source([(1.0, 2), (3.0, 4)]).batch(torch.tensor([1]), None)[1].tolist() == [4]


def test_what_has_no_index_is_refused() -> None:
    with pytest.raises(TypeError, match="int cannot be indexed: must be a map-style data set"):
        as_source(3)
    with pytest.raises(TypeError, match=r"Stream cannot be indexed: .* one that can be iterated over is an Iterable"):
        DatasetSource(Stream())  # type: ignore[arg-type]  # that is what is refused


def test_a_negative_number_of_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_workers = -1: must be 0 or more"):
        DatasetSource(Items((1.0, 2)), num_workers=-1)


def test_sources_say_whether_a_graph_may_hold_them() -> None:
    def double(inputs: Tensor) -> Tensor:
        return 2.0 * inputs

    assert TensorSource(INPUTS, TARGETS).is_resident
    assert not TensorSource(INPUTS, TARGETS, prepare=double).is_resident  # it may well ask the host
    assert TensorSource(INPUTS, TARGETS, prepare=double, capturable=True).to(CPU).is_resident
    assert not as_source([(1.0, 2)]).is_resident


def test_a_source_of_ones_own_reads_nothing_ahead_and_counts_as_the_hosts() -> None:
    class Own(DataSource):
        def __len__(self) -> int:
            return 5

        def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
            return INPUTS[indices], TARGETS[indices]

        def to(self, device: torch.device) -> "Own":
            return self

    source = as_source(Own())
    assert not source.is_resident
    sampler = Sampler(source, seed=0, device=CPU)
    assert torch.equal(torch.cat([sampler.take(3), sampler.take(3)]).sort().values, torch.arange(5))
    sampler.close()


def test_what_looks_like_a_source_is_told_what_to_derive_from() -> None:
    class Alike:
        def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
            return INPUTS[indices], TARGETS[indices]

    with pytest.raises(TypeError, match=r"Alike has a method batch, but is no DataSource: derive it from triaccel"):
        as_source(Alike())


def test_arrays_are_a_pair_like_tensors() -> None:
    images = np.arange(10, dtype=np.float32).reshape(5, 2)
    images.flags.writeable = False
    source = as_source((images, np.arange(5)))
    assert isinstance(source, TensorSource)
    assert source.inputs.data_ptr() == images.ctypes.data
    assert torch.equal(source.batch(INDICES, None)[0], INPUTS[INDICES])
    assert torch.equal(as_source((INPUTS, np.arange(5))).batch(INDICES, None)[1], INDICES)


def test_tensors_in_a_data_set_are_held_as_tensors() -> None:
    assert isinstance(as_source(TensorDataset(INPUTS, TARGETS)), TensorSource)
    assert isinstance(as_source(DataLoader(TensorDataset(INPUTS, TARGETS), shuffle=True)), TensorSource)
    assert isinstance(as_source(Subset(TensorDataset(INPUTS, TARGETS), [0, 1])), DatasetSource)


def test_columns_are_refused_and_a_stack_of_them_is_a_data_set() -> None:
    columns = {"ids": INPUTS, "labels": TARGETS}
    with pytest.raises(TypeError, match=r"dict of ids, labels holds columns, not samples: give .*StackDataset"):
        as_source(columns)
    inputs, targets = as_source(StackDataset(**columns)).batch(INDICES, None)
    assert inputs is targets
    assert plain(inputs) == plain({"ids": INPUTS[INDICES], "labels": INDICES})


def summed(items: list[Any]) -> tuple[Tensor, None]:
    return torch.tensor([a + b for a, b in items]), None


def test_a_loader_gives_its_data_set_collate_fn_and_number_of_workers() -> None:
    items = Items((1.0, 2), (3.0, 4), (5.0, 6))
    for loader in (DataLoader(items, 2, collate_fn=summed, num_workers=1), DataLoader(items, 2, True, drop_last=True)):
        source = as_source(loader)
        assert isinstance(source, DatasetSource)
        assert source._num_workers == loader.num_workers
        assert len(source) == 3
        inputs, targets = source.batch(torch.tensor([2, 0]), None)
        assert (plain(inputs), plain(targets)) == (([11.0, 3.0], None) if loader.num_workers else ([5.0, 1.0], [6, 2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": Batches([0, 1], 2, drop_last=False)}, "batch_size = None: .* and no batch_sampler"),
        ({"sampler": WeightedRandomSampler([1.0, 2.0], 2)}, "sampler = WeightedRandomSampler: .*Subset"),
        ({"sampler": RandomSampler([0, 1], replacement=True)}, "sampler = RandomSampler"),
        ({"sampler": RandomSampler([0, 1], num_samples=1)}, "sampler = RandomSampler"),
        ({"batch_size": None}, "batch_size = None: the loop draws every sample once an epoch.*give it a batch_size"),
        ({"worker_init_fn": summed}, "worker_init_fn = summed: .* prepare in the data set's __getitem__"),
    ],
)
def test_what_a_loader_does_in_its_own_way_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_source(DataLoader(Items((1.0, 2), (3.0, 4)), **options))


def test_a_collate_fn_has_to_give_inputs_and_targets() -> None:
    source = DatasetSource(Items(1, 2), collate_fn=torch.tensor)
    with pytest.raises(TypeError, match=r"what collate_fn returned is a Tensor: must be a pair .* or a mapping"):
        source.batch(torch.tensor([0]), None)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="Items holds 0 samples"):
        as_source(Items())


@pytest.mark.parametrize(
    ("loader", "start", "minimum", "maximum"),
    [
        ({"batch_size": 64}, 64, 32, 512),
        ({"batch_size": 33}, 33, 16, 264),
        ({"batch_size": 3}, 3, 3, 24),
        ({"batch_size": 2}, 2, 2, 16),
        ({}, 96, 32, 512),
    ],
)
def test_a_loaders_batch_size_is_the_first_by_default(
    loader: dict[str, int], start: int, minimum: int, maximum: int
) -> None:
    batch = default_config(DataLoader(TensorDataset(*blobs(700)), **loader)).batch
    assert (batch.start, batch.minimum, batch.maximum) == (start, minimum, maximum)
    assert default_config(blobs(700)) == ControlConfig()
