"""Where samples come from: anything with a length that returns a batch for a vector of indices."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from triaccel_ray.config import DataPlace
from triaccel_ray.host_memory import in_host_memory
from triaccel_ray.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.stream import SampleStream

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Maps inputs [batch, ...] to augmented inputs on the same device, drawing from the generator alone."""


class DataSource(ABC):
    """A finite set of samples, addressed by index, so that any batch size can be drawn at any step."""

    streamed_because: str = ""
    """Why samples given as tensors are read from the host all the same; empty where they are not."""

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Returns inputs and targets of the samples at `indices` (int64 [batch]).

        `generator` drives augmentation and lives on the source's device; None asks for the plain samples.
        """

    def views(self, inputs: Any) -> Sequence[Any]:
        """Returns the forms in which samples to be judged are shown to the model, as they are first.

        The outputs, tensors where there are several forms, are averaged ("test-time augmentation"). The source that is
        asked is the one that `to` returns; a source around another passes the call on.
        """
        return (inputs,)

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
        """Hears which samples will be asked for next, in batches of any size: int64 [n], at most once each.

        `follows` says whether they come after those announced before, or in their place. `seed` fixes, together with
        a sample's index, what random transforms make of it.
        """

    def set_epoch(self, epoch: int) -> None:  # noqa: B027  # most prepare a sample alike in all of them
        """Hears which pass over the samples, from 0, the batches asked for from now on belong to.

        The next order is announced before. A resident source that prepares samples by it keeps it in one tensor on the
        device, for a captured step does not call `batch` again; a source around another passes the call on.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing running
        """Ends what runs to read ahead."""


class TensorSource(DataSource):
    """Samples held whole in two tensors, on the device that trains if they fit there.

    A subclass stays one wherever it moves. If its `batch` draws or waits on the host, its `is_resident` has to say so.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        augment: Augment | None = None,
        capturable: bool = False,
    ) -> None:
        """Holds inputs [n, ...] and targets [n, ...].

        `augment` acts on the raw inputs of a training batch, `prepare` (cast, normalise, resize) on every batch after
        it. `capturable` says that both, where given, work on the device alone, without the host's waiting or
        drawing; they may then become part of a CUDA graph.
        """
        for name, part in (("inputs", inputs), ("targets", targets)):
            if not isinstance(part, Tensor):
                raise TypeError(f"{name} are a {type(part).__name__}: must be a tensor; use torch.as_tensor({name})")
            if part.dim() == 0:
                raise ValueError(f"{name} are a single number: must be a tensor with one row for each sample")
        if len(inputs) != len(targets):
            raise ValueError(f"inputs and targets hold {len(inputs)} and {len(targets)} samples: must be as many")
        if len(inputs) == 0:
            raise ValueError("inputs hold 0 samples: a source needs at least one")
        self.inputs, self.targets = inputs, targets
        self._prepare, self._augment, self._capturable = prepare, augment, capturable

    @property
    def is_resident(self) -> bool:
        """Whether no function of the user's stands in the way, or they are said to be capturable."""
        return self._capturable or (self._prepare is None and self._augment is None)

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

    def to(self, device: torch.device) -> DataSource:
        """Returns a source whose tensors live on `device`; where they do not fit there, one that streams them.

        Raises:
            torch.OutOfMemoryError: they do not fit, and are augmented or prepared by functions meant for whole batches.
        """
        try:
            inputs, targets = self.inputs.to(device), self.targets.to(device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._augment is not None or self._prepare is not None:
                error.add_note("a data set that does not fit on the device streams if it is a DatasetSource")
                raise
            reason = first_line(error)
        else:
            return self._with(inputs, targets)
        streamed = DatasetSource(TensorDataset(self.inputs, self.targets), device)
        streamed.streamed_because = reason
        streamed.views = self.views  # type: ignore[method-assign]  # a subclass may have its own
        return streamed

    def kept_on_host(self, device: torch.device) -> DataSource:
        """Returns a source of which a GPU reads the inputs out of pinned memory; targets lie on `device`.

        Where the host cannot pin as much, all of it lies on `device`.
        """
        if device.type != "cuda" or self.inputs.is_cuda:
            return self.to(device)
        try:
            inputs = in_host_memory(self.inputs, device)
        except RuntimeError:
            return self.to(device)
        return self._with(inputs, self.targets.to(device))

    def _with(self, inputs: Tensor, targets: Tensor) -> Self:
        moved = copy.copy(self)
        moved.inputs, moved.targets = inputs, targets
        return moved


class DatasetSource(DataSource):
    """An ordinary map-style PyTorch data set, read sample by sample and collated as `DataLoader` would.

    Training reads ahead of itself, in worker processes, and a GPU gets each batch by a copy that overlaps with the
    step before it. A random transform in the data set that draws from the global generators of Python, PyTorch or
    NumPy gives the same whatever the batch sizes, the number of workers and the moment at which a run was resumed;
    one that keeps a generator of its own does not.
    """

    def __init__(
        self, dataset: Dataset[Any], device: torch.device | None = None, *, num_workers: int | None = None
    ) -> None:
        """Wraps `dataset`, whose items are (input, target) pairs.

        `num_workers` processes read ahead; 0 reads in this process, when a batch is asked for. None means 0 for a
        CPU, which is busy training, and for a GPU one less than the CPUs at hand, 4 at most. Processes are forked on
        Linux: the data set is not copied, and must not use CUDA.

        Raises:
            TypeError: the data set is iterable only; exact epochs at a changing batch size need indices.
            ValueError: the data set is empty, or `num_workers` negative.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} cannot be indexed: every sample exactly once at a changing batch size needs "
                "a map-style data set with __len__ and __getitem__"
            )
        if len(dataset) == 0:  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses
            raise ValueError(f"{type(dataset).__name__} holds 0 samples: a source needs at least one")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers = {num_workers}: must be 0 or more")
        self._dataset, self._num_workers = dataset, num_workers
        self._deliver_on(device or torch.device("cpu"))

    def _deliver_on(self, device: torch.device) -> None:
        workers = _default_workers(device) if self._num_workers is None else self._num_workers
        self._stream = SampleStream(self._dataset, device, workers)

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self._dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:
        """Begins to read ahead the samples that will be asked for next."""
        self._stream.announce(order, seed=seed, follows=follows)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Tensor]:
        """Returns the collated samples at `indices`; the data set does its own augmentation.

        Samples other than the announced ones are read at once, in this process.
        """
        inputs, targets = self._stream.batch(indices)
        return inputs, targets

    def to(self, device: torch.device) -> Self:
        """Returns the same data set with batches delivered on `device`."""
        moved = copy.copy(self)
        moved._deliver_on(device)
        return moved

    def close(self) -> None:
        """Ends the worker processes, as dropping the last reference to this source does too."""
        self._stream.close()


def _default_workers(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, num_cpus - 1)


def as_source(data: Any) -> DataSource:
    """Returns `data` as a source: itself, a (inputs, targets) pair of tensors, or a map-style data set.

    Raises:
        TypeError: none of these.
    """
    if isinstance(data, DataSource):
        return data
    if hasattr(data, "batch"):
        raise TypeError(
            f"{type(data).__name__} has a method batch, but is no DataSource: derive it from "
            "triaccel_ray.sources.DataSource"
        )
    if isinstance(data, tuple) and len(data) == 2 and not all(isinstance(part, tuple | list) for part in data):
        return TensorSource(*data)
    return DatasetSource(data)


def delivered(source: DataSource, device: torch.device, data_on: DataPlace) -> DataSource:
    """Returns the same samples, delivered on `device` and kept where `data_on` says."""
    return source.kept_on_host(device) if data_on == "host" else source.to(device)
