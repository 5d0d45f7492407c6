"""Data sets read sample by sample: their order, transforms and batches, here and in worker processes."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.build import plain
from triaccel_ray.data.batches import moved
from triaccel_ray.data.prefetch import CHUNK_SIZES
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import DatasetSource

CPU = torch.device("cpu")
CHUNK_SIZE = CHUNK_SIZES.start
NUM = 6 * CHUNK_SIZE + 17
"""Samples of most data sets here: a last partial chunk."""
DEVICES = [(CPU, 0), (CPU, 2), pytest.param((torch.device("cuda"), 2), marks=pytest.mark.gpu)]
WORKERS = DEVICES[1:]
Pair = namedtuple("Pair", ["left", "right"])
Place = tuple[torch.device, int]


class Squares(Dataset[Any]):
    """Sample i is ([i, i^2], i), or what `shape` makes of i."""

    def __init__(self, num: int = NUM, shape: Callable[[int], Any] | None = None) -> None:
        self.num, self.shape = num, shape
        self.reader = os.getpid()
        self.read_here: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        if os.getpid() == self.reader:
            self.read_here.append(index)
        return self.shape(index) if self.shape else (torch.tensor([index, index**2]), index)


class Noisy(Squares):
    """Every sample draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]
        return torch.tensor([index, *drawn], dtype=torch.float64), index


class Broken(Squares):
    def __getitem__(self, index: int) -> Any:
        if index == 100:
            raise LookupError("sample 100 is damaged")
        return super().__getitem__(index)


OPEN: weakref.WeakSet[Sampler] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    for sampler in OPEN:
        sampler.close()
    gc.collect()
    assert multiprocessing.active_children() == []


def feed_of(dataset: Dataset[Any], place: Place, seed: int = 0, **options: Any) -> Sampler:
    device, num_workers = place
    sampler = Sampler(DatasetSource(dataset, device, num_workers=num_workers, **options), seed=seed, device=device)
    OPEN.add(sampler)
    return sampler


def batch_of(sampler: Sampler, size: int) -> tuple[Any, Tensor, Tensor]:
    """Returns inputs, targets and the indices they were asked for by."""
    indices = sampler.take(size)
    return *sampler.source.batch(indices, sampler.generator), indices


def sizes(seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    while True:
        yield generator.randint(2, 150)


def in_order(sampler: Sampler, num_epochs: int, batch_sizes: Iterator[int]) -> Tensor:
    """Returns the inputs of the epochs, each sorted by sample."""
    epochs: list[list[Tensor]] = [[] for _ in range(num_epochs)]
    while (epoch := sampler.epoch) < num_epochs:
        epochs[epoch].append(batch_of(sampler, next(batch_sizes))[0].cpu())
    return torch.stack([(whole := torch.cat(parts))[whole[:, 0].argsort()] for parts in epochs])


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("num", [2, CHUNK_SIZE + 1, NUM])
def test_batches_of_changing_size_are_the_samples_asked_for(place: Place, num: int) -> None:
    """One sample after another, and in parts."""
    dataset = Squares(num)
    sampler = feed_of(dataset, place)
    seen: dict[int, list[int]] = {}
    for size in itertools.chain([10_000, 100], sizes(1)):
        if (epoch := sampler.epoch) == 4:
            break
        indices = sampler.take(size)
        read = [sampler.source.batch(part, None) for part in indices.tensor_split(3 if size == 100 and num > 3 else 1)]
        inputs, targets = (torch.cat(parts) for parts in zip(*read, strict=True))
        assert inputs.device.type == targets.device.type == place[0].type
        assert torch.equal(targets.cpu(), indices)
        assert torch.equal(inputs.cpu(), torch.stack([indices, indices**2], 1))
        seen.setdefault(epoch, []).extend(indices.tolist())
    assert all(sorted(samples) == list(range(num)) for samples in seen.values())
    assert bool(dataset.read_here) == (place[1] == 0)


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (lambda i: ({"a": i, "b": (torch.tensor(i), float(i))}, i), lambda i: {"a": i, "b": [i, i.double()]}),
        (lambda i: (Pair(i, [2 * i]), i), lambda i: Pair(i, [2 * i])),
        (lambda i: (Pair(f"sample {i}", i), i), lambda i: Pair([f"sample {index}" for index in i.tolist()], i)),
        (lambda i: (i, i), lambda i: i),
        (lambda i: {"a": i, "b": 2 * i}, lambda i: {"a": i, "b": 2 * i}),
        (lambda i: (np.full(2, i), np.int64(i)), lambda i: torch.stack([i, i], 1)),
        (lambda i: (f"sample {i}", i), lambda i: [f"sample {index}" for index in i.tolist()]),
        (lambda i: ((f"sample {i}", i), i), lambda i: [[f"sample {index}" for index in i.tolist()], i]),
    ],
)
def test_what_a_data_set_returns_keeps_its_structure(place: Place, shape: Any, expected: Any) -> None:
    sampler = feed_of(Squares(shape=shape), place)
    for size in (30, 70, 100, 2):  # within a chunk, over one border, over two
        inputs, targets, indices = batch_of(sampler, size)
        assert inputs is targets if isinstance(targets, dict) else torch.equal(targets.cpu(), indices)
        assert plain(inputs) == plain(expected(indices))


@pytest.mark.parametrize("place", DEVICES)
def test_random_transforms_depend_on_seed_epoch_and_sample_alone(place: Place) -> None:
    reference, sampler = feed_of(Noisy(), (CPU, 0)), feed_of(Noisy(), place)
    first = in_order(reference, 3, sizes(2))
    assert torch.equal(first, in_order(sampler, 3, sizes(3)))
    assert not torch.equal(first, in_order(feed_of(Noisy(), (CPU, 0), seed=1), 3, sizes(2)))
    assert len(first[:, :, 1:].flatten().unique()) == 3 * NUM * 3


@pytest.mark.parametrize("place", DEVICES)
def test_samples_asked_for_again_and_others_leave_the_stream_and_global_generators_where_they_are(place: Place) -> None:
    sampler, twin = feed_of(Noisy(), place), feed_of(Noisy(), (CPU, 0))
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    while sampler.epoch < 2:  # batches at the end of an epoch too, when the next one is announced already
        inputs, _, indices = batch_of(sampler, 50)
        again = [sampler.source.batch(part, sampler.generator)[0] for part in indices.tensor_split(3)]
        assert torch.equal(torch.cat(again), inputs)
        assert torch.equal(twin.source.batch(twin.take(50), None)[0], inputs.cpu())
        assert sampler.source.batch(torch.tensor([7, 2, 7]), None)[1].tolist() == [7, 2, 7]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize("place", DEVICES)
def test_a_restored_feed_goes_on_with_the_same_samples_and_transforms(place: Place) -> None:
    sampler, restored = feed_of(Noisy(), place), feed_of(Noisy(), place, seed=5)
    for _ in range(3):
        batch_of(sampler, 60)
    batch_of(restored, 60)
    restored.load_state_dict(sampler.state_dict())
    for size in (60, 31, 90, 150):
        inputs, _, indices = batch_of(sampler, size)
        also, _, same = batch_of(restored, size)
        assert torch.equal(indices, same)
        assert torch.equal(inputs, also)


@pytest.mark.parametrize("place", WORKERS)
def test_a_passage_whose_rest_is_not_wanted_gives_way_to_the_next(place: Place) -> None:
    dataset = Squares()
    sampler = feed_of(dataset, place)
    batch_of(sampler, 40)
    sampler.take(NUM)  # and never asked for
    indices = sampler.take(80)
    assert torch.equal(sampler.source.batch(indices, None)[1].cpu(), indices)
    assert not dataset.read_here


@pytest.mark.parametrize("place", WORKERS)
def test_an_error_in_a_worker_names_the_sample_and_ends_the_processes(place: Place) -> None:
    sampler = feed_of(Broken(), place)
    with pytest.raises(LookupError, match="sample 100 is damaged") as raised:
        in_order(sampler, 1, sizes(4))
    assert multiprocessing.active_children() == []
    assert "worker process" in str(raised.value)


@pytest.mark.parametrize("place", WORKERS)
def test_processes_start_with_the_first_batch_and_end_with_the_source(place: Place) -> None:
    sampler = feed_of(Squares(), place)
    sampler.source.batch(torch.arange(3), None)
    assert multiprocessing.active_children() == []
    for _ in range(2):  # a closed one serves all the same
        _, targets, indices = batch_of(sampler, 20)
        assert torch.equal(targets.cpu(), indices)
        assert len(multiprocessing.active_children()) == 2
        sampler.source.close()
        assert multiprocessing.active_children() == []
    batch_of(sampler, 20)
    del sampler  # the fixture waits for nothing: they are gone


@pytest.mark.parametrize("place", DEVICES)
def test_an_item_that_is_no_pair_is_refused(place: Place) -> None:
    sampler = feed_of(Squares(shape=lambda i: (i, i, i)), place)
    with pytest.raises(TypeError, match=r"of Squares is a tuple of 3: must be a pair \(input, target\), or a mapping"):
        batch_of(sampler, 4)


def padded(items: list[Tensor]) -> dict[str, Any]:
    """Samples of different lengths in one tensor; the longest one of a batch tells how wide it is."""
    texts = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=-1)
    return {"ids": texts, "lengths": [len(item) for item in items]}


class Texts(Squares):
    """Sample i is i, written 1 + i % 7 times."""

    def __getitem__(self, index: int) -> Tensor:
        super().__getitem__(index)
        return torch.full((1 + index % 7,), index)


@pytest.mark.parametrize("place", DEVICES)
def test_a_collate_fn_is_given_the_samples_of_one_batch_each_time(place: Place) -> None:
    dataset = Texts(CHUNK_SIZE * 3 + 1)
    sampler = feed_of(dataset, place, collate_fn=padded)
    wanted = [CHUNK_SIZE] * 12 + [50, 50, 20, 30] * 6  # of one size for several epochs, then of others
    for size in wanted:
        inputs, targets, indices = batch_of(sampler, size)
        assert inputs is targets
        assert inputs["ids"].device.type == place[0].type
        items = [torch.full((1 + index % 7,), index) for index in indices.tolist()]
        assert plain(inputs) == plain(padded(items))
    parts = [sampler.source.batch(part, None)[0]["lengths"] for part in sampler.take(20).tensor_split(3)]
    assert [len(part) for part in parts] == [7, 7, 6]
    assert bool(dataset.read_here) == (place[1] == 0)


@pytest.mark.parametrize("place", DEVICES)
def test_samples_of_different_shapes_make_no_batch(place: Place) -> None:
    def grown(index: int) -> tuple[Tensor, int]:
        return torch.zeros(1 if order[index] < 2 * CHUNK_SIZE else 3), index

    sampler = feed_of(Squares(shape=grown), place)
    order = torch.empty(NUM, dtype=torch.long).scatter_(0, sampler._order, torch.arange(NUM)).tolist()
    batch_of(sampler, CHUNK_SIZE)
    with pytest.raises((RuntimeError, ValueError), match=r"equal size|must return one type and shape"):
        batch_of(sampler, CHUNK_SIZE + 10)


def test_tensors_of_a_named_tuple_that_begins_with_a_string_are_moved() -> None:
    batch = moved(Pair("text", torch.ones(2)), torch.device("meta"))
    assert (batch.left, batch.right.device.type) == ("text", "meta")


@pytest.mark.gpu
def test_the_copies_never_overtake_the_computation() -> None:
    """A slow device, the host far ahead of it: every batch is still whole when its turn comes."""
    sampler = feed_of(Squares(40 * CHUNK_SIZE), (torch.device("cuda"), 2))
    sums, expected = [], []
    while sampler.epoch < 2:
        inputs, _, indices = batch_of(sampler, 48)
        torch.cuda._sleep(2_000_000)
        sums.append(inputs.sum(0))
        expected.append(torch.stack([indices, indices**2], 1).sum(0))
        del inputs
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))
