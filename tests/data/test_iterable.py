"""Iterable data sets: an epoch is what they give, resumable where they tell their state."""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from tests.build import CPU, QUIET, Limited, blobs, loop_of, mlp, run, same, values
from tests.data.test_items import QUIET_WITH_CURVATURE
from triaccel_ray.data.iterable import NUM_KEPT, IterableSource
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import as_source
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint

NUM = 300


class Rows(IterableDataset[Any]):
    """Rows of a table, in its order; each worker has its share."""

    def __init__(self, num: int = NUM) -> None:
        self.features, self.labels = blobs(num)
        self.epochs: list[int] = []
        self.num_passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.labels), step):
            yield self.features[index], self.labels[index]


class Telling(Rows):
    """Says where it is, and goes on there; a sample is shifted at random."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.labels):
            self.at += 1
            yield self.features[self.at - 1] + 0.1 * random.random(), self.labels[self.at - 1]
        self.at = 0


class Sized(Rows):
    def __len__(self) -> int:
        return 200  # too few: as data sets are that drop what is broken, or count their files


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.rows = iter(zip(*blobs(20), strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def sampler_of(data: Any) -> Sampler:
    return Sampler(IterableSource(data), seed=3, device=CPU)


@pytest.mark.parametrize("num", [2, 60, NUM_KEPT, NUM])
def test_batches_of_any_size_are_the_samples_in_their_order(num: int) -> None:
    rows, sizes = Rows(num), random.Random(1)
    sampler = sampler_of(rows)
    assert torch.equal(sampler.source.batch(sampler.source.probe(2), None)[0], rows.features[:2])  # for curvature
    epochs: list[list[Tensor]] = [[], [], []]
    while (epoch := sampler.epoch) < 3:
        epochs[epoch].append(sampler.source.batch(sampler.take(sizes.randint(2, 90)), sampler.generator)[0])
    for batches in epochs:
        assert torch.equal(torch.cat(batches), rows.features)
        assert all(len(batch) >= 2 for batch in batches)
    assert (sampler.num_samples, sampler.position, sampler.num_batches(7)) == (num, 3.0, 3 * num // 7)
    assert (rows.epochs, rows.num_passes) == ([0, 1, 2], 3)


def test_what_is_read_ahead_is_little_and_what_is_done_with_is_given_up() -> None:
    telling = Telling(1000)
    sampler = sampler_of(telling)
    for _ in range(20):
        sampler.take(40)
    assert telling.at <= 20 * 40 + 2
    assert len(sampler.source._buffer) <= 42  # type: ignore[attr-defined]  # an IterableSource


def test_the_position_within_the_first_epoch_counts_where_the_length_is_known() -> None:
    known, unknown = sampler_of(Sized()), sampler_of(Rows())
    seen = []
    for _ in range(4):
        known.take(75)
        unknown.take(75)
        seen.append((known.position, unknown.position))
    assert seen == [(0.375, 0.0), (0.75, 0.0), (0.999, 0.0), (1.0, 1.0)]
    known.take(75)
    assert known.position == 1.25


class Uncounted(Rows):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("data", [ChainDataset([Rows(20), Rows(20)]), Uncounted(40)])
def test_a_length_that_is_not_known_is_none(data: Any) -> None:
    assert IterableSource(data).expected_samples == 0
    loop, _ = loop_of(mlp(), data, QUIET)
    assert loop.train_epoch().num_samples == 40
    assert IterableSource(ChainDataset([Sized(), Sized()])).expected_samples == 400
    loop.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_it_trains_is_judged_as_a_table_is_and_leaves_no_process(num_workers: int) -> None:
    loader = DataLoader(Rows(), batch_size=8, num_workers=num_workers)
    loop, ticks = loop_of(nn.Sequential(mlp(), Limited(7, message="out of memory")), loader, QUIET_WITH_CURVATURE)
    stats = [loop.train_epoch() for _ in range(3)]
    assert [each.num_samples for each in stats] == [NUM] * 3
    assert stats[-1].loss < stats[0].loss
    assert any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers)
    judged, expected = loop.evaluate(loader), loop.evaluate(blobs(NUM))  # in parts that are tried again
    assert (judged.num_samples, judged.metrics) == (NUM, expected.metrics)
    assert judged.loss == pytest.approx(expected.loss)
    loop.close()
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_steps", [3, 38])
def test_a_resumed_run_goes_on_alike(num_steps: int, tmp_path: Path) -> None:
    def loop(seed: int) -> Any:
        return loop_of(mlp(seed=seed), Telling(), QUIET_WITH_CURVATURE, seed=5)[0]

    whole, first, resumed = loop(0), loop(0), loop(1)
    run(whole, num_steps + 20)
    run(first, num_steps)
    save_checkpoint(tmp_path / "checkpoint.pt", first.state_dict())
    resumed.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    run(resumed, 20)
    assert resumed.sampler.position == whole.sampler.position
    assert same(values(resumed.model), values(whole.model))
    for each in (whole, first, resumed):
        each.close()


def test_without_a_state_a_run_is_saved_between_epochs_alone(tmp_path: Path) -> None:
    loop, _ = loop_of(mlp(), Rows(), QUIET)
    loop.train_epoch()
    save_checkpoint(tmp_path / "checkpoint.pt", loop.state_dict())
    loop.step()
    with pytest.raises(ValueError, match=r"Rows has no state_dict: a position within an epoch .* save between epochs"):
        loop.state_dict()
    resumed, _ = loop_of(mlp(seed=1), Rows(), QUIET)
    resumed.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    resumed.step()
    assert same(values(resumed.model), values(loop.model))
    with pytest.raises(ValueError, match="Telling is read by 2 processes: a position within an epoch"):
        IterableSource(Telling(), num_workers=2).state_at(8)
    loop.close()
    resumed.close()


def test_what_an_iterable_cannot_do_is_refused() -> None:
    sampler, once = sampler_of(Telling()), sampler_of(Once())
    sampler.take(8)
    sampler.take(NUM // 2)
    once.take(20)
    with pytest.raises(ValueError, match="Rows has no load_state_dict, or is read by processes of its own"):
        sampler_of(Rows()).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="Telling has no sample after 158 in epoch 0, where the checkpoint had some"):
        sampler_of(Telling(100)).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="Once gave no sample in epoch 1: must give all of them in each"):
        once.take(20)
    with pytest.raises(TypeError, match="list_iterator can be iterated over once: must give its samples in each epoch"):
        as_source(iter([(1.0, 2)]))
    with pytest.raises(TypeError, match="num_workers = 2 for set: must be 0; derive it from IterableDataset"):
        IterableSource({1, 2}, num_workers=2)
    with pytest.raises(TypeError, match="set is iterable, of no known length: must be a map-style data set here"):
        len(as_source({1, 2}))
    with pytest.raises(TypeError, match=r"item -1 of set is a int: must be a pair \(input, target\), or a mapping"):
        loop_of(mlp(), {1, 2})


def test_a_collate_fn_makes_the_batches() -> None:
    source = IterableSource({3, 4}, collate_fn=lambda items: {"x": torch.tensor(items)})
    inputs, targets = source.batch(torch.arange(source.reach(0, 2)), None)
    assert inputs is targets
    assert sorted(inputs["x"].tolist()) == [3, 4]


@pytest.mark.gpu
def test_it_trains_from_captured_steps() -> None:
    loop, ticks = loop_of(mlp().cuda(), Rows(), QUIET)
    stats = [loop.train_epoch() for _ in range(3)]
    assert stats[-1].loss < stats[0].loss
    faults = [fault for tick in ticks for fault in tick.observation.faults]
    reason = "Sequential compiled as a whole: it does not consist of equal blocks"
    assert [str(fault.detail) for fault in faults] == [reason]
    assert loop.evaluate(Rows()).metrics["accuracy"] == 100.0
    loop.close()
