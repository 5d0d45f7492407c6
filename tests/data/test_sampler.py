import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.build import CPU
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.distributed.ranks import Ranks


class Listener(TensorSource):
    """Writes down what is announced."""

    def __init__(self, num_samples: int) -> None:
        super().__init__(torch.zeros(num_samples), torch.zeros(num_samples))
        self.heard: list[tuple[list[int], int, bool]] = []
        self.epochs: list[int] = []

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:
        self.heard.append((order.tolist(), seed, follows))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def feed_of(num_samples: int, seed: int = 0) -> Sampler:
    return Sampler(Listener(num_samples), seed=seed, device=CPU)


SIZES = st.lists(st.integers(2, 40), min_size=1, max_size=40)


@given(st.integers(2, 60), SIZES)
def test_every_sample_exactly_once_an_epoch_whatever_the_batch_sizes(num_samples: int, sizes: list[int]) -> None:
    sampler = feed_of(num_samples)
    epochs: dict[int, list[int]] = {}
    for size in sizes:
        epoch = sampler.epoch
        batch = sampler.take(size)
        assert 2 <= len(batch) <= max(size, 3)
        left = num_samples - len(epochs.setdefault(epoch, [])) - size
        assert len(batch) == size or left <= 1
        epochs.setdefault(epoch, []).extend(batch.tolist())
    finished = [epochs[epoch] for epoch in range(sampler.epoch)]
    assert all(sorted(samples) == list(range(num_samples)) for samples in finished)
    started = epochs.get(sampler.epoch, [])
    assert len(set(started)) == len(started)
    assert sampler.position == sampler.epoch + len(started) / num_samples
    assert sampler.at_epoch_start == (not started)


def test_each_epoch_and_seed_has_an_order_of_its_own() -> None:
    sampler = feed_of(50)
    first, second = sampler.take(50).tolist(), sampler.take(50).tolist()
    assert first != second != sorted(second)
    assert feed_of(50).take(50).tolist() == first
    assert feed_of(50, seed=1).take(50).tolist() != first


@pytest.mark.parametrize(
    ("num_samples", "asked", "taken"),
    [
        (21, [10, 10, 10, 20, 20], [10, 6, 5, 11, 10]),  # the last two share where one would be left
        (4, [1, 1, 1, 1], [1, 1, 2, 1]),
        (1, [4, 4, 4], [1, 1, 1]),
    ],
)
def test_no_sample_is_left_alone(num_samples: int, asked: list[int], taken: list[int]) -> None:
    sampler = feed_of(num_samples)
    assert [len(sampler.take(size)) for size in asked] == taken


@given(st.integers(2, 30), SIZES, SIZES, st.integers(0, 2**40))
def test_a_restored_feed_goes_on_alike(num_samples: int, before: list[int], after: list[int], seed: int) -> None:
    sampler, restored = feed_of(num_samples, seed), feed_of(num_samples, seed=1)
    for size in before:
        sampler.take(size)
        torch.rand(3, generator=sampler.generator)
    restored.take(2)
    restored.load_state_dict(sampler.state_dict())
    assert restored.position == sampler.position
    order, _, follows = restored.source.heard[-1]  # type: ignore[attr-defined]  # a Listener
    epoch, taken = sampler.epoch, []
    for size in after:
        mine, theirs = restored.take(size).tolist(), sampler.take(size).tolist()
        assert mine == theirs
        taken += mine
    assert (order[: len(taken)], follows) == (taken[: len(order)], False)
    assert restored.source.epochs[1] == epoch  # type: ignore[attr-defined]  # a Listener
    assert torch.equal(torch.rand(3, generator=restored.generator), torch.rand(3, generator=sampler.generator))


def test_a_source_hears_every_order_before_it_is_taken_and_each_epoch_with_its_first_batch() -> None:
    source = Listener(10)
    sampler = Sampler(source, seed=3, device=CPU)
    taken, epochs = [], []
    for size in (6, 4, 10, 3):
        taken += sampler.take(size).tolist()
        epochs.append(source.epochs.copy())
    orders, seeds, follows = zip(*source.heard, strict=True)
    assert taken == [*orders[0], *orders[1], *orders[2][:3]]
    assert follows == (False, True, True)
    assert len(set(seeds)) == 3
    assert epochs == [[0], [0], [0, 1], [0, 1, 2]]


@pytest.mark.gpu
def test_indices_of_a_resident_source_are_on_the_device_and_the_same() -> None:
    device = torch.device("cuda")
    source = TensorSource(torch.zeros(100), torch.zeros(100)).to(device)
    sampler, twin = Sampler(source, seed=0, device=device), feed_of(100)
    for size in (30, 69, 20, 100):
        indices = sampler.take(size)
        assert indices.device.type == "cuda"
        assert torch.equal(indices.cpu(), twin.take(size))


def test_the_samples_left_count_down_to_the_runs_end_or_are_as_many_as_were_taken() -> None:
    source = TensorSource(torch.zeros(10, 1), torch.zeros(10))
    known, unknown = Sampler(source, seed=0, device=CPU, epochs=2.5), Sampler(source, seed=0, device=CPU)
    left = []
    for _ in range(8):
        left.append((known.samples_left, unknown.samples_left))
        known.take(4)
        unknown.take(4)
    assert left == [(25, 0), (21, 4), (17, 8), (15, 10), (11, 14), (7, 18), (5, 20), (1, 24)]
    known.take(4)
    assert known.samples_left == 0


class OneOf(Ranks):
    """One of several ranks, whose others are not there: the sampler sends no messages."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


@given(st.integers(2, 60), SIZES, st.integers(2, 5))
def test_ranks_share_each_batch_evenly_and_know_their_samples_ahead(
    num_samples: int, sizes: list[int], world_size: int
) -> None:
    sources = [Listener(num_samples) for _ in range(world_size)]
    samplers = [
        Sampler(source, seed=0, device=CPU, ranks=OneOf(rank, world_size)) for rank, source in enumerate(sources)
    ]
    alone = feed_of(num_samples)
    taken: list[list[int]] = [[] for _ in samplers]
    for size in sizes:
        whole = alone.take(size)
        shares = [sampler.take(size) for sampler in samplers]
        assert sorted(torch.cat(shares).tolist()) == sorted(whole.tolist())
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all(share.is_contiguous() for share in shares)  # a kernel that cuts out images takes no other
        assert {sampler.last_batch for sampler in samplers} == {samplers[0].last_batch}
        assert samplers[0].last_batch.num_samples == len(whole)
        for mine, share in zip(taken, shares, strict=True):
            mine.extend(share.tolist())
    for source, mine in zip(sources, taken, strict=True):
        announced = [index for order, _, _ in source.heard for index in order]
        assert announced[: len(mine)] == mine
