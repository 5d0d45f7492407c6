from collections.abc import Iterator
from types import SimpleNamespace
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
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.build import CPU, QUIET, blobs, loop_of, mlp, plain
from triaccel_ray.config import ControlConfig
from triaccel_ray.data import sources
from triaccel_ray.data.sources import DatasetSource, DataSource, TensorSource, as_source, default_config, delivered
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB, CudaMemory
from triaccel_ray.records.plan import FaultKind

INPUTS, TARGETS = torch.arange(10.0).view(5, 2), torch.arange(5)
INDICES = torch.tensor([3, 0])


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


def shown(self: DataSource, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, -inputs


def augment(inputs: Tensor, generator: torch.Generator) -> Tensor:
    return inputs + torch.rand((), generator=generator)


def double(inputs: Tensor) -> Tensor:
    return 2.0 * inputs


def test_augmentation_needs_a_generator_and_comes_before_preparation() -> None:
    source = TensorSource(INPUTS, TARGETS, augment=augment, prepare=double).to(CPU)
    assert torch.equal(source.batch(INDICES, None)[0], 2.0 * INPUTS[INDICES])
    drawn = torch.rand((), generator=torch.Generator().manual_seed(1))
    augmented = source.batch(INDICES, torch.Generator().manual_seed(1))[0]
    assert torch.equal(augmented, 2.0 * (INPUTS[INDICES] + drawn))


def test_tensors_that_do_not_fit_on_the_device_are_streamed_with_their_views(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown(TensorSource):
        views = shown

    class ShownItems(DatasetSource):
        views = shown

    def refuse(self: Tensor, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB.")

    assert isinstance(Shown(INPUTS, TARGETS).to(CPU), Shown)
    assert len(ShownItems(TensorDataset(INPUTS, TARGETS)).to(CPU).views(INPUTS)) == 2
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", refuse)
        streamed = Shown(INPUTS, TARGETS).to(CPU)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            TensorSource(INPUTS, TARGETS, prepare=Tensor.half).to(CPU)
    assert "streams if it is a DatasetSource" in caught.value.__notes__[0]
    assert streamed.streamed_because == "CUDA out of memory. Tried to allocate 9 TiB."
    assert not streamed.is_resident
    inputs, targets = streamed.batch(INDICES, None)
    assert torch.equal(inputs, INPUTS[INDICES])
    assert torch.equal(targets, INDICES)
    assert torch.equal(streamed.views(INPUTS)[1], -INPUTS)
    streamed.close()


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


def test_a_host_that_cannot_pin_the_samples_leaves_them_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(TensorSource):
        def to(self, device: torch.device) -> TensorSource:
            return self

    def refuse(tensor: Tensor, device: torch.device) -> Tensor:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(sources, "in_host_memory", refuse)
    source = Here(INPUTS, TARGETS)
    assert delivered(source, torch.device("cuda"), "host").unpinned_because == "no memory to pin"
    assert source.unpinned_because == ""
    assert delivered(source, CPU, "host") is source
    told = TensorSource(*blobs(24))
    told.unpinned_because = "no memory to pin"
    loop, ticks = loop_of(mlp(), told, QUIET)
    loop.tick()
    loop.close()
    noted = [(fault.kind, fault.detail) for fault in ticks[0].observation.faults]
    assert (FaultKind.DATA_NOT_PINNED, "no memory to pin") in noted
    drawn, _ = delivered(DatasetSource(Items((1.0, 0))), CPU, "host").batch(torch.tensor([0]), None)
    assert drawn.tolist() == [1.0]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda: TensorSource(INPUTS, TARGETS[:4]), ValueError, "inputs and targets hold 5 and 4 samples"),
        (lambda: TensorSource(INPUTS[:0], TARGETS[:0]), ValueError, "inputs hold 0 samples"),
        (Items, ValueError, "Items holds 0 samples"),
        (lambda: 3, TypeError, "int cannot be indexed: must be a map-style data set"),
        (lambda: DatasetSource(Stream()), TypeError, "Stream cannot be indexed: .* that can be iterated over is an It"),  # type: ignore[arg-type]  # that is what is refused
        (lambda: DatasetSource(Items((1.0, 2)), num_workers=-1), ValueError, "num_workers = -1: must be 0 or more"),
        (
            lambda: SimpleNamespace(batch=None),
            TypeError,
            "has a method batch, but is no DataSource: derive it from",
        ),
        (lambda: {"ids": INPUTS, "labels": TARGETS}, TypeError, "dict of ids, labels holds columns.*StackDataset"),
        (lambda: Doubling(Items((1.0, 2))), ValueError, "iterator = Doubling: .* in the data set or in collate_fn"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_source(data())


def test_tensors_and_arrays_are_held_as_they_are_wherever_they_come_from() -> None:
    images = np.arange(10, dtype=np.float32).reshape(5, 2)
    images.flags.writeable = False
    source = as_source((images, np.arange(5)))
    assert isinstance(source, TensorSource)
    assert source.inputs.data_ptr() == images.ctypes.data
    assert as_source(source) is source
    pairs = TensorDataset(INPUTS, TARGETS)
    for each in (
        source,
        as_source((INPUTS, np.arange(5))),
        as_source(pairs),
        as_source(DataLoader(pairs, shuffle=True)),
    ):
        assert each.is_resident
        assert torch.equal(each.batch(INDICES, None)[1], INDICES)
    assert not TensorSource(INPUTS, TARGETS, prepare=double).is_resident  # it may well ask the host
    assert TensorSource(INPUTS, TARGETS, prepare=double, capturable=True).to(CPU).is_resident
    assert isinstance(as_source(Subset(pairs, [0, 1])), DatasetSource)
    inputs, targets = as_source(StackDataset(ids=INPUTS, labels=TARGETS)).batch(INDICES, None)
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
        inputs, targets = source.batch(torch.tensor([2, 0]), None)
        assert (plain(inputs), plain(targets)) == (([11.0, 3.0], None) if loader.num_workers else ([5.0, 1.0], [6, 2]))
    source = DatasetSource(items, collate_fn=lambda batch: torch.tensor(batch))
    with pytest.raises(TypeError, match=r"what collate_fn returned is a Tensor: must be a pair .* or a mapping"):
        source.batch(torch.tensor([0]), None)


class Reversed(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self))[::-1])


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_sampler": Batches([0, 1], 2, drop_last=False)}, "batch_size = None: .* and no batch_sampler"),
        ({"sampler": WeightedRandomSampler([1.0, 2.0], 2)}, "sampler = WeightedRandomSampler: .*Subset"),
        ({"sampler": RandomSampler([0, 1], replacement=True)}, "sampler = RandomSampler"),
        ({"sampler": RandomSampler([0, 1], num_samples=1)}, "sampler = RandomSampler"),
        ({"sampler": RandomSampler([0])}, "sampler = RandomSampler"),
        ({"sampler": SequentialSampler([0])}, "sampler = SequentialSampler"),
        ({"sampler": Reversed([0, 1])}, "sampler = Reversed"),
        (
            {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0, 2.0], 2), 2, drop_last=False)},
            "sampler = WeightedRandomSampler",
        ),
        ({"batch_size": None}, "batch_size = None: the loop draws every sample once an epoch.*give it a batch_size"),
        ({"worker_init_fn": summed}, "worker_init_fn = summed: .* prepare in the data set's __getitem__"),
    ],
)
def test_what_a_loader_does_in_its_own_way_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_source(DataLoader(Items((1.0, 2), (3.0, 4)), **options))


@pytest.mark.parametrize(
    ("size", "sizes"), [(64, (64, 32, 512)), (33, (33, 16, 264)), (2, (2, 2, 16)), (1, (96, 32, 512))]
)
def test_a_loaders_batch_size_is_the_first_by_default(size: int, sizes: tuple[int, int, int]) -> None:
    batch = default_config(DataLoader(TensorDataset(*blobs(700)), batch_size=size)).batch
    assert (batch.start, batch.minimum, batch.maximum) == sizes
    assert default_config(blobs(700)) == ControlConfig()
    data = TensorDataset(*blobs(700))
    batches = BatchSampler(RandomSampler(data), size, drop_last=False)
    assert default_config(DataLoader(data, batch_sampler=batches)).batch == batch
    assert as_source(DataLoader(data, batch_sampler=batches)).targets.equal(data.tensors[1])
