"""The order of the samples: each exactly once an epoch, whatever the batch sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from triaccel_ray.data.batches import next_batch_size
from triaccel_ray.data.sources import DataSource, IterableSource
from triaccel_ray.distributed.ranks import Ranks


class BatchShares(NamedTuple):
    """How a batch is shared by ranks; the same value on all of them."""

    num_samples: int
    """Samples of all ranks."""
    offset: int = 0
    """Place of its first sample in the epoch, modulo the number of ranks; 0 if all shares are equal anyway."""


class Sampler:
    """Walks through a random permutation of the samples, a new one each epoch, in batches of any size.

    Of n ranks, each takes every n-th sample of the epoch's order, so that it can prefetch without knowing batch sizes.
    Its shares of two batches of one size differ by one sample at most.

    Each permutation is announced to the source as soon as it is known, so that it may prefetch. An `IterableSource`
    has an order of its own, and an epoch ends with its samples.
    """

    def __init__(
        self,
        source: DataSource,
        *,
        seed: int,
        device: torch.device,
        epochs: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Starts before the first sample of epoch 0; permutations depend on `seed` and the epoch alone.

        `device` is where the source delivers its batches. `epochs` is the length of the run, if it is known. Positions
        and sizes count the samples of all `ranks`; only the indices, and the augmentation, are this rank's own.

        Raises:
            ValueError: a stream is to be shared by several ranks.
        """
        ranks = ranks or Ranks()
        self.rank, self._world_size = ranks.rank, ranks.world_size
        if isinstance(source, IterableSource) and not ranks.is_alone:
            raise ValueError(
                f"data = an iterable data set, on {ranks.world_size} ranks: must be one with __getitem__ and __len__, "
                "whose samples can be shared; or train on one rank"
            )
        self.source = source
        self._device = device
        self._seed, self._num_epochs = seed, epochs
        self.epoch = 0
        self._cursor = 0
        self._is_closed = False
        self._is_stream = isinstance(source, IterableSource)
        self._num_taken = 0
        """Samples taken in all epochs; used for streams."""
        self.num_samples = source.expected_samples if isinstance(source, IterableSource) else len(source)
        """Samples of an epoch; for a stream those of the last epoch, and 0 in the first if its length is unknown."""
        self._order = self._announced_order(follows=False)
        self._source_epoch: int | None = None
        """The epoch last given to the source by `set_epoch`."""
        self.last_batch = BatchShares(0)
        """The batch last taken."""
        # Augmentation draws on the data's device. PyTorch's generators differ between devices, so do the crops.
        self.generator = torch.Generator(device=device).manual_seed(_seed_of(seed, self.rank) if self.rank else seed)

    @property
    def position(self) -> float:
        """Passes over the samples, fractional; a stream of unknown length counts its first pass once that is over."""
        if self._is_stream and self.num_samples == 0:
            return float(self.epoch)
        share = self._cursor / self.num_samples
        if self._is_stream:
            share = min(share, 0.999)
        return self.epoch + share

    @property
    def samples_left(self) -> int:
        """Samples until the end of the run, 0 beyond it; as many as have been taken if its length is unknown."""
        if self._num_epochs is None or not self.num_samples:
            return self._num_taken if self._is_stream else self.epoch * self.num_samples + self._cursor
        return max(round((self._num_epochs - self.position) * self.num_samples), 0)

    def num_batches(self, batch_size: int) -> int:
        """Returns how many steps of `batch_size` lead to this position: ceil(samples / `batch_size`) for each epoch.

        A partial epoch counts in proportion to its samples, rounded down. A stream counts all samples // `batch_size`.
        """
        if self._is_stream:
            return self._num_taken // batch_size
        per_epoch = -(-self.num_samples // batch_size)
        return self.epoch * per_epoch + per_epoch * self._cursor // self.num_samples

    @property
    def at_epoch_start(self) -> bool:
        """Whether no sample of the current epoch has been taken."""
        return self._cursor == 0

    def take(self, num_samples: int) -> Tensor:
        """Returns the indices of the next samples, int64 [num_samples], fewer at the end of an epoch.

        With several ranks they are this rank's share of the samples, which `last_batch` describes; it may be empty.
        For a resident source they are on the device, as views of the epoch's order; else on the CPU. Batch
        normalization cannot train on one sample. If one would be left over, the last two batches share their samples
        evenly, and 3 samples taken by 2 form one batch. After the last sample the next epoch begins.

        Raises:
            RuntimeError: the sampler, and so its loop, is closed.
        """
        if self._is_closed:
            raise RuntimeError("the loop is closed and makes no more steps; to train on, build another loop")
        if self._source_epoch != self.epoch:
            self.source.set_epoch(self.epoch)
            self._source_epoch = self.epoch
        num_left = self.source.reach(self._cursor, num_samples + 2)  # two more show which batches are the last
        start, size = self._cursor, next_batch_size(num_left, num_samples)
        self._cursor += size
        self._num_taken += size
        indices = torch.arange(start, self._cursor) if self._is_stream else self._order[start : self._cursor]
        is_uneven = size % self._world_size != 0
        self.last_batch = BatchShares(size, start % self._world_size if is_uneven else 0)
        indices = self._share(indices, start)
        if size == num_left:
            self.num_samples = self._cursor
            self.epoch += 1
            self._cursor = 0
            self._order = self._announced_order(follows=True)
        return indices

    def end_epoch(self) -> None:
        """Skips the rest of the current epoch; not for streams."""
        if self._cursor:
            self.epoch += 1
            self._cursor = 0
            self._order = self._announced_order(follows=False)

    def placed(self, indices: Tensor) -> Tensor:
        """Returns indices on the device where the source needs them; the host does not wait for the copy."""
        if not self.source.is_resident or self._device.type != "cuda":
            return indices
        return indices.pin_memory().to(self._device, non_blocking=True)

    def close(self) -> None:
        """Stops the source's prefetching; no more samples can be taken."""
        self._is_closed = True
        self.source.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the augmentation's random state.

        Raises:
            ValueError: a stream that cannot save its state is within an epoch.
        """
        return {
            "epoch": self.epoch,
            "cursor": self._cursor,
            "seed": self._seed,
            "num_samples": self.num_samples,
            "num_taken": self._num_taken,
            "stream": self.source.state_at(self._cursor) if isinstance(self.source, IterableSource) else None,
            "generator": self.generator.get_state(),
            "rank": self.rank,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position and random state that `state_dict` returned.

        Raises:
            ValueError: the state belongs to a data set of another size.
        """
        if not self._is_stream and state["num_samples"] != self.num_samples:
            raise ValueError(
                f"num_samples = {state['num_samples']}: the checkpoint's data set; this one has {self.num_samples}"
            )
        self._seed, self.epoch, self._cursor = state["seed"], state["epoch"], state["cursor"]
        self.num_samples, self._num_taken = state["num_samples"], state["num_taken"]
        self._order = self._announced_order(follows=False)
        self._source_epoch = None
        if isinstance(self.source, IterableSource):
            self.source.resume(self.epoch, self._cursor, state["stream"])
        self.generator.set_state(state["generator"])
        if (saved_by := state["rank"]) != self.rank:  # else this rank would augment as that one does
            drawn = torch.randint(2**62, (), generator=self.generator, device=self.generator.device)
            self.generator.manual_seed(_seed_of(int(drawn), 1 + self.rank + saved_by * self._world_size))

    def _share(self, samples: Tensor, start: int) -> Tensor:
        """Returns this rank's of the samples from place `start` of an epoch on."""
        if self._world_size == 1:
            return samples
        return samples[(self.rank - start) % self._world_size :: self._world_size].contiguous()

    def _announced_order(self, *, follows: bool) -> Tensor:
        """Returns the current epoch's order, int64 [n], and announces its remaining samples."""
        seed = _seed_of(self._seed, self.epoch)
        order = epoch_order(0 if self._is_stream else self.num_samples, seed=self._seed, epoch=self.epoch)
        self.source.announce(self._share(order[self._cursor :], self._cursor), seed=seed, follows=follows)
        return self.placed(order)


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Returns the order of an epoch's samples, counted from 0: int64 [num_samples], on the CPU."""
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(_seed_of(seed, epoch)))


def _seed_of(seed: int, epoch: int) -> int:
    """Returns the seed of an epoch. Each epoch has its own generator, so a position is enough to resume from."""
    return (seed * 1_000_003 + epoch) % 2**63
