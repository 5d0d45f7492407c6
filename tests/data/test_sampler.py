import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.build import CPU
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource


def feed_of(num_samples: int, seed: int = 0) -> Sampler:
    return Sampler(TensorSource(torch.zeros(num_samples), torch.zeros(num_samples)), seed=seed, device=CPU)


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


def test_a_source_of_one_sample_gives_it_every_time() -> None:
    sampler = feed_of(1)
    assert [sampler.take(4).tolist() for _ in range(3)] == [[0]] * 3
    assert sampler.epoch == 3


def test_the_last_two_batches_share_their_samples_where_one_would_be_left() -> None:
    sampler = feed_of(21)
    assert [len(sampler.take(size)) for size in (10, 10, 10, 20, 20)] == [10, 6, 5, 11, 10]


def test_asking_for_single_samples_gives_them_but_for_the_last_two() -> None:
    sampler = feed_of(4)
    assert [len(sampler.take(1)) for _ in range(3)] == [1, 1, 2]
    assert (sampler.epoch, sampler.at_epoch_start) == (1, True)


@given(st.integers(2, 30), SIZES, SIZES, st.integers(0, 2**40))
def test_a_restored_feed_goes_on_alike(num_samples: int, before: list[int], after: list[int], seed: int) -> None:
    sampler, restored = feed_of(num_samples, seed), feed_of(num_samples, seed=1)
    for size in before:
        sampler.take(size)
        torch.rand(3, generator=sampler.generator)
    restored.load_state_dict(sampler.state_dict())
    assert restored.position == sampler.position
    assert [restored.take(size).tolist() for size in after] == [sampler.take(size).tolist() for size in after]
    assert torch.equal(torch.rand(3, generator=restored.generator), torch.rand(3, generator=sampler.generator))


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


def test_a_source_that_listens_hears_every_order_before_it_is_taken() -> None:
    source = Listener(10)
    sampler = Sampler(source, seed=3, device=CPU)
    taken = [sampler.take(6).tolist(), sampler.take(4).tolist(), sampler.take(10).tolist()]
    orders, seeds, follows = zip(*source.heard, strict=True)
    assert orders[0] == taken[0] + taken[1]
    assert orders[1] == taken[2]
    assert follows == (False, True, True)
    assert len(set(seeds)) == 3


def test_a_source_hears_of_an_epoch_with_its_first_batch_and_not_before() -> None:
    source = Listener(10)
    sampler = Sampler(source, seed=3, device=CPU)
    heard = []
    for size in (4, 6, 10, 3):
        sampler.take(size)
        heard.append(source.epochs.copy())
    assert heard == [[0], [0], [0, 1], [0, 1, 2]]
    restored = Sampler(Listener(10), seed=4, device=CPU)
    restored.take(2)
    restored.load_state_dict(sampler.state_dict())
    restored.take(2)
    assert restored.source.epochs == [0, 2]  # type: ignore[attr-defined]  # a Listener


def test_a_restored_feed_announces_what_is_left_in_place_of_what_it_had() -> None:
    sampler, source = Sampler(Listener(10), seed=3, device=CPU), Listener(10)
    sampler.take(10)
    sampler.take(4)
    restored = Sampler(source, seed=4, device=CPU)
    restored.load_state_dict(sampler.state_dict())
    order, seed, follows = source.heard[-1]
    assert order == sampler.take(6).tolist()
    assert (seed, follows) == (sampler.source.heard[1][1], False)  # type: ignore[attr-defined]  # a Listener


@pytest.mark.gpu
def test_indices_of_a_resident_source_are_on_the_device_and_the_same() -> None:
    device = torch.device("cuda")
    source = TensorSource(torch.zeros(100), torch.zeros(100)).to(device)
    sampler, twin = Sampler(source, seed=0, device=device), feed_of(100)
    for size in (30, 69, 20, 100):
        indices = sampler.take(size)
        assert indices.device.type == "cuda"
        assert torch.equal(indices.cpu(), twin.take(size))


def test_a_state_of_another_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples = 5: the checkpoint's data set; this one has 6"):
        feed_of(6).load_state_dict(feed_of(5).state_dict())
