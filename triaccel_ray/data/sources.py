"""Data sources for tensors, and conversion of PyTorch data sets, loaders and NumPy arrays to sources."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from triaccel_ray.config import ControlConfig, DataPlace
from triaccel_ray.cuda.host_memory import in_host_memory
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.data.batches import Collate
from triaccel_ray.data.data_source import DataSource as DataSource
from triaccel_ray.data.dataset import DatasetSource as DatasetSource
from triaccel_ray.data.iterable import IterableSource as IterableSource

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Maps inputs [batch, ...] to augmented inputs on the same device, drawing from the generator alone."""


class TensorSource(DataSource):
    """Samples held in two tensors, on the training device if they fit there.

    Moving keeps the class. If the `batch` of a subclass draws or waits on the host, `is_resident` must be False.
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

        `augment` acts on the raw inputs of training batches, then `prepare` (cast, normalize, resize) on those of
        every batch. `capturable` declares that both run on the device alone, without waiting or drawing on the host,
        so that a CUDA graph can capture them.
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
        """Whether there is neither `prepare` nor `augment`, or both are declared capturable."""
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
        """Returns a source whose tensors are on `device`, or one that streams them if they do not fit there.

        Raises:
            torch.OutOfMemoryError: they do not fit, and `augment` or `prepare`, for whole batches, prevent streaming.
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
        streamed.streamed_because, streamed.streamed_bytes = reason, self.inputs.nbytes + self.targets.nbytes
        streamed.views = self.views  # type: ignore[method-assign]  # a subclass may have its own
        return streamed

    def kept_on_host(self, device: torch.device) -> DataSource:
        """Returns a source whose inputs a GPU reads from pinned host memory; targets are on `device`.

        If the host cannot pin as much, inputs are on `device`, too, and `unpinned_because` says why.
        """
        if device.type != "cuda" or self.inputs.is_cuda:
            return self.to(device)
        try:
            inputs = in_host_memory(self.inputs, device)
        except RuntimeError as error:
            moved = copy.copy(self.to(device))
            moved.unpinned_because = first_line(error)
            return moved
        return self._with(inputs, self.targets.to(device))

    def part(self, indices: Tensor) -> Self:
        """Returns a source of the samples at `indices` alone."""
        indices = indices.to(self.inputs.device)
        return self._with(self.inputs[indices], self.targets[indices.to(self.targets.device)])

    def _with(self, inputs: Tensor, targets: Tensor) -> Self:
        moved = copy.copy(self)
        moved.inputs, moved.targets = inputs, targets
        return moved


def as_source(data: Any) -> DataSource:
    """Converts a source, an (inputs, targets) pair of tensors or arrays, a data set or a `DataLoader` to a source.

    Of a `DataLoader` it takes the data set, `collate_fn` and `num_workers`; order and later batch sizes are the loop's.

    Raises:
        TypeError: `data` is none of these.
        ValueError: a `DataLoader` chooses samples or batches in a way of its own, or has a `worker_init_fn`.
    """
    if isinstance(data, DataSource):
        return data
    if isinstance(data, DataLoader):
        return _source_of_loader(data)
    if hasattr(data, "batch"):
        raise TypeError(
            f"{type(data).__name__} has a method batch, but is no DataSource: derive it from triaccel_ray.DataSource"
        )
    if isinstance(data, tuple) and len(data) == 2 and not all(isinstance(part, tuple | list) for part in data):
        return TensorSource(*map(_tensor_of, data))
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return TensorSource(*data.tensors)
    return _source_of(data)


def _source_of(dataset: Any, num_workers: int | None = None, collate: Collate | None = None) -> DataSource:
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        return IterableSource(dataset, num_workers=num_workers or 0, collate_fn=collate)
    return DatasetSource(dataset, num_workers=num_workers, collate_fn=collate)


def _tensor_of(part: Any) -> Any:
    """Returns a NumPy array as a tensor that shares its memory; anything else unchanged."""
    if "numpy" not in sys.modules or not isinstance(part, sys.modules["numpy"].ndarray):
        return part
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing here writes to it
        return torch.from_numpy(part)


def _source_of_loader(loader: DataLoader[Any]) -> DataSource:
    dataset: Any = loader.dataset
    batches: Any = loader.batch_sampler
    in_batches = type(batches) is BatchSampler
    sampler: Any = batches.sampler if in_batches else loader.sampler  # else an unused default
    draws_each_once = isinstance(dataset, IterableDataset)
    if type(sampler) in (RandomSampler, SequentialSampler):
        draws_each_once = len(sampler.data_source) == len(sampler) == len(dataset)
        draws_each_once &= not getattr(sampler, "replacement", False)
    for name, value, is_fine, way_out in (
        (
            "iterator",
            type(loader).__name__,
            type(loader).__iter__ is DataLoader.__iter__,
            "give a DataLoader of PyTorch's own, and change samples in the data set or in collate_fn",
        ),
        ("batch_size", loader.batch_size, in_batches, "give it a batch_size and no batch_sampler"),
        (
            "sampler",
            type(sampler).__name__,
            draws_each_once,
            "give every rank all samples, the loop shares them out"
            if isinstance(sampler, DistributedSampler)
            else "choose samples by torch.utils.data.Subset(dataset, indices)",
        ),
        (
            "worker_init_fn",
            getattr(loader.worker_init_fn, "__name__", loader.worker_init_fn),
            loader.worker_init_fn is None,
            "prepare in the data set's __getitem__, when it is first called",
        ),
    ):
        if not is_fine:
            raise ValueError(
                f"the DataLoader has {name} = {value}: the loop draws every sample once an epoch, in batches of its "
                f"own size; {way_out}"
            )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    if collate is None and type(dataset) is TensorDataset:
        return as_source(dataset)
    return _source_of(dataset, loader.num_workers, collate)


def default_config(data: Any) -> ControlConfig:
    """Returns the default settings, which start at a `DataLoader`'s batch size unless that is its default, 1."""
    config = ControlConfig()
    batch_size = None
    if isinstance(data, DataLoader):
        batch_size = data.batch_size or getattr(data.batch_sampler, "batch_size", None)
    if batch_size not in (None, 1):
        config = replace(config, batch=config.batch.around(batch_size))
    return config


def delivered(source: DataSource, device: torch.device, data_on: DataPlace) -> DataSource:
    """Returns the same samples, delivered on `device` and kept where `data_on` says."""
    return source.kept_on_host(device) if data_on == "host" else source.to(device)
