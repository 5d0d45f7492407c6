"""The interface to training data: a source returns a batch for a vector of indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DataSource(ABC):
    """Samples addressed by index, so that any batch size can be drawn at any step."""

    streamed_because: str = ""
    """Why samples given as tensors are streamed from the host, not held on the device; empty if they are not."""
    streamed_bytes: int = 0
    """Bytes of inputs and targets that are streamed for this reason; 0 if none are."""
    unpinned_because: str = ""
    """Why samples lie on the device although host memory was requested; empty if they do not."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Any]:
        """Returns inputs and targets of the samples at `indices` (int64 [batch]).

        `generator` drives augmentation and lives on the source's device; None disables augmentation. The model takes a
        mapping of inputs by name, a tuple or list by position, anything else as one argument; the loss takes targets
        unchanged.
        """

    def views(self, inputs: Any) -> Sequence[Any]:
        """Returns the views of evaluation inputs that the model sees ("test-time augmentation"), the original first.

        The model's outputs are averaged over the views; with several views they must be tensors. This is called on the
        source that `to` returns; a wrapper passes the call on to its inner source.
        """
        return (inputs,)

    def reach(self, cursor: int, wanted: int) -> int:
        """Returns how many samples a pass has from position `cursor` on, at most `wanted`.

        Samples before `cursor` are not requested again in this pass.
        """
        return min(wanted, len(self) - cursor)

    def probe(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns indices of samples to measure on, int64 [b]: `num_samples` of them, or fewer if there are fewer.

        A `generator` draws them at random; None takes the first ones.
        """
        if generator is None:
            return torch.arange(min(num_samples, len(self)))
        return torch.randperm(len(self), generator=generator)[:num_samples]

    @abstractmethod
    def to(self, device: torch.device) -> DataSource:
        """Returns the same samples, delivered on `device`."""

    def kept_on_host(self, device: torch.device) -> DataSource:
        """Returns the same samples, delivered on `device` and, if possible, kept in host memory.

        A wrapper passes the call on. A source that moves its own tensors in `to` must do so here, too.
        """
        return self.to(device)

    @property
    def is_resident(self) -> bool:
        """Whether `batch`, given indices on the device, runs there alone: no copies, synchronization or host work.

        A CUDA graph can then capture it. If False, `batch` gets its indices on the CPU.
        """
        return False

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:  # noqa: B027  # most read nothing ahead
        """Announces the samples to be requested next, in batches of any size: int64 [n], each at most once.

        `follows` says whether they come after those announced before, or replace them. `seed` and a sample's index
        together seed its random transforms.
        """

    def set_epoch(self, epoch: int) -> None:  # noqa: B027  # most treat all epochs alike
        """Sets the epoch, from 0, to which batches requested from now on belong.

        Its order is announced before. A resident source whose batches depend on the epoch keeps it in one tensor on the
        device, because a replayed step does not call `batch`. A wrapper passes the call on to its inner source.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing running
        """Stops prefetching."""
