"""The order of the samples: each exactly once an epoch, whatever the batch sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triaccel_ray.sources import DataSource


class Feed:
    """Walks through a random permutation of the samples, a new one each epoch, in batches of any size.

    The source is told each permutation as soon as it is known, so that it may read ahead.
    """

    def __init__(self, source: DataSource, *, seed: int, device: torch.device) -> None:
        """Starts before the first sample of epoch 0; permutations depend on `seed` and the epoch alone.

        `device` is where the source delivers its batches.
        """
        self.source = source
        self._device = device
        self._seed = seed
        self.epoch = 0
        self._cursor = 0
        self._order = self._announced_order(follows=False)
        self._told_epoch: int | None = None
        """The epoch that the source knows its batches to belong to."""
        # Augmentation draws where the data is; PyTorch's generators differ between devices, so do its crops.
        self.generator = torch.Generator(device=device).manual_seed(seed)

    @property
    def position(self) -> float:
        """Passes over the samples, fractional."""
        return self.epoch + self._cursor / len(self.source)

    @property
    def at_epoch_start(self) -> bool:
        """Whether no sample of the present epoch has been taken."""
        return self._cursor == 0

    def take(self, num_samples: int) -> Tensor:
        """Returns the indices of the next samples, int64 [num_samples], fewer at the end of an epoch.

        They are on the device for a source that is resident there, views of the epoch's order; else on the CPU.
        A single sample is never left over for a batch of its own, which batch normalisation could not take: it joins
        the one before. After the last sample the next epoch begins.
        """
        if self._told_epoch != self.epoch:
            self.source.set_epoch(self.epoch)
            self._told_epoch = self.epoch
        end = self._cursor + num_samples
        if end >= len(self.source) - 1:
            end = len(self.source)
        indices = self._order[self._cursor : end]
        self._cursor = end
        if end == len(self.source):
            self.epoch += 1
            self._cursor = 0
            self._order = self._announced_order(follows=True)
        return indices

    def placed(self, indices: Tensor) -> Tensor:
        """Returns indices from the CPU where the source wants them, without having the host wait for the device."""
        if not self.source.is_resident or self._device.type != "cuda":
            return indices
        return indices.pin_memory().to(self._device, non_blocking=True)

    def close(self) -> None:
        """Ends what the source may have running to read ahead."""
        self.source.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the augmentation's random state."""
        return {
            "epoch": self.epoch,
            "cursor": self._cursor,
            "seed": self._seed,
            "num_samples": len(self.source),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position that `state_dict` returned.

        Raises:
            ValueError: the state belongs to a data set of another size.
        """
        if state["num_samples"] != len(self.source):
            raise ValueError(
                f"num_samples = {state['num_samples']}: the checkpoint's data set; this one has {len(self.source)}"
            )
        self._seed, self.epoch, self._cursor = state["seed"], state["epoch"], state["cursor"]
        self._order = self._announced_order(follows=False)
        self.generator.set_state(state["generator"])

    def _announced_order(self, *, follows: bool) -> Tensor:
        """Returns the present epoch's order, int64 [n], and announces what is left of it."""
        # A generator of its own an epoch, so that a position is enough to resume from.
        seed = (self._seed * 1_000_003 + self.epoch) % 2**63
        order = torch.randperm(len(self.source), generator=torch.Generator().manual_seed(seed))
        self.source.announce(order[self._cursor :], seed=seed, follows=follows)
        if self.source.is_resident and self._device.type == "cuda":
            return order.pin_memory().to(self._device, non_blocking=True)
        return order
