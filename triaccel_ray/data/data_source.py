"""Where samples come from: anything that returns a batch for a vector of indices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DataSource(ABC):
    """Samples addressed by index, so that any batch size can be drawn at any step."""

    streamed_because: str = ""
    """Why samples given as tensors are read from the host all the same; empty where they are not."""
    unpinned_because: str = ""
    """Why samples that were to stay in the host's memory lie on the device all the same; empty where they do not."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Any]:
        """Returns inputs and targets of the samples at `indices` (int64 [batch]).

        `generator` drives augmentation and lives on the source's device; None asks for the plain samples. The model
        takes a mapping of inputs by name, a tuple or list by position, anything else as it is; the loss takes targets
        as they are.
        """

    def views(self, inputs: Any) -> Sequence[Any]:
        """Returns the forms in which samples to be judged are shown to the model, as they are first.

        The outputs, tensors where there are several forms, are averaged ("test-time augmentation"). The source that is
        asked is the one that `to` returns; a source around another passes the call on.
        """
        return (inputs,)

    def reach(self, cursor: int, wanted: int) -> int:
        """Returns how many samples there are from the `cursor`-th of a pass on, `wanted` at most.

        Those before it are not asked for again in this pass.
        """
        return min(wanted, len(self) - cursor)

    def probe(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Returns the indices of samples to measure on, int64 [b], b at most `num_samples`, as many as there are.

        A `generator` chooses them; None takes the first ones.
        """
        if generator is None:
            return torch.arange(min(num_samples, len(self)))
        return torch.randperm(len(self), generator=generator)[:num_samples]

    @abstractmethod
    def to(self, device: torch.device) -> DataSource:
        """Returns the same samples, delivered on `device`."""

    def kept_on_host(self, device: torch.device) -> DataSource:
        """Returns the same samples, delivered on `device` and kept, where that can be, in memory of the host.

        A source around another passes the call on; one that moves tensors of its own in `to` does so here, too.
        """
        return self.to(device)

    @property
    def is_resident(self) -> bool:
        """Whether `batch` works on the device alone, given indices that are there: no copy, no waiting, no host.

        A CUDA graph may then hold it. A source of which this is False gets its indices on the CPU.
        """
        return False

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:  # noqa: B027  # most read nothing ahead
        """Takes notice of the samples asked for next, in batches of any size: int64 [n], each at most once.

        `follows` says whether they come after those announced before, or in their place. `seed` fixes, together with
        a sample's index, what random transforms make of it.
        """

    def set_epoch(self, epoch: int) -> None:  # noqa: B027  # most prepare a sample alike in all of them
        """Takes notice of the pass over the samples, from 0, to which batches asked for from now on belong.

        The next order is announced before. A resident source that prepares samples by it keeps it in one tensor on the
        device, for a captured step does not call `batch` again; a source around another passes the call on.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing running
        """Ends what runs to read ahead."""
