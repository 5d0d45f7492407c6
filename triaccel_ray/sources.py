"""Where samples come from: anything with a length that returns a batch for a vector of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Maps inputs [batch, ...] to augmented inputs on the same device, drawing from the generator alone."""


class DataSource(Protocol):
    """A finite set of samples, addressed by index, so that any batch size can be drawn at any step."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Returns inputs and targets of the samples at `indices` (int64 [batch]).

        `generator` drives augmentation and lives on the source's device; None asks for the plain samples.
        """
        ...

    def to(self, device: torch.device) -> Self:
        """Returns the same samples, delivered on `device`."""
        ...


class TensorSource:
    """Samples held whole in two tensors, on the device that trains."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        augment: Augment | None = None,
    ) -> None:
        """Holds inputs [n, ...] and targets [n, ...].

        `augment` acts on the raw inputs of a training batch, `prepare` (cast, normalise, resize) on every batch after
        it.
        """
        if len(inputs) != len(targets):
            raise ValueError(f"inputs and targets hold {len(inputs)} and {len(targets)} samples: must be as many")
        if len(inputs) == 0:
            raise ValueError("inputs hold 0 samples: a source needs at least one")
        self.inputs, self.targets = inputs, targets
        self._prepare, self._augment = prepare, augment

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self.inputs)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets at `indices`, augmented when a generator is given."""
        indices = indices.to(self.inputs.device, non_blocking=True)
        inputs = self.inputs[indices]
        if self._augment is not None and generator is not None:
            inputs = self._augment(inputs, generator)
        if self._prepare is not None:
            inputs = self._prepare(inputs)
        return inputs, self.targets[indices]

    def to(self, device: torch.device) -> TensorSource:
        """Returns a source whose tensors live on `device`."""
        return TensorSource(
            self.inputs.to(device), self.targets.to(device), prepare=self._prepare, augment=self._augment
        )


class DatasetSource:
    """An ordinary map-style PyTorch data set, read sample by sample and collated as `DataLoader` would."""

    def __init__(self, dataset: Dataset[Any], device: torch.device | None = None) -> None:
        """Wraps `dataset`, whose items are (input, target) pairs.

        Raises:
            TypeError: the data set is iterable only; exact epochs at a changing batch size need indices.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} cannot be indexed: every sample exactly once at a changing batch size needs "
                "a map-style data set with __len__ and __getitem__"
            )
        if len(dataset) == 0:  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses
            raise ValueError(f"{type(dataset).__name__} holds 0 samples: a source needs at least one")
        self._dataset = dataset
        self._device = device or torch.device("cpu")

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self._dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Returns the collated samples at `indices`; the data set does its own augmentation."""
        inputs, targets = default_collate([self._dataset[i] for i in indices.tolist()])
        return _to_device(inputs, self._device), targets.to(self._device)

    def to(self, device: torch.device) -> DatasetSource:
        """Returns the same data set with batches delivered on `device`."""
        return DatasetSource(self._dataset, device)


def as_source(data: Any) -> DataSource:
    """Returns `data` as a source: itself, a (inputs, targets) pair of tensors, or a map-style data set.

    Raises:
        TypeError: none of these.
    """
    if hasattr(data, "batch") and hasattr(data, "__len__"):
        return data  # type: ignore[no-any-return]  # the protocol is structural
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return TensorSource(*data)
    return DatasetSource(data)


def _to_device(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to_device(value, device) for value in batch)
    return batch
