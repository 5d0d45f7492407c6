"""Map-style data sets as a source: samples are prefetched, and each batch is copied while the last one trains."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.data.batches import Collate, inputs_and_targets, joined, map_tree, moved, next_batch_size, read
from triaccel_ray.data.data_source import DataSource
from triaccel_ray.data.prefetch import EpochOrder, Workers

_BATCHES_IN_FLIGHT = 8
"""Batches that the host may be ahead of the device: enough to keep it busy, with few pending copies."""


class _Copied(NamedTuple):
    """A batch on the device, or on its way there."""

    batch: Any
    size: int
    done: torch.cuda.Event | None
    """None if there is nothing to wait for."""


class DatasetSource(DataSource):
    """An ordinary map-style PyTorch data set, read sample by sample and collated as `DataLoader` would.

    Items are (input, target) pairs, or mappings such as {"input_ids": ..., "labels": ...}. With mappings, the model
    gets the batch by name, labels included, and the loss gets the same batch as targets. A model that computes its own
    loss trains with `lambda outputs, batch: outputs.loss`, any other with a loss that looks up `batch["labels"]`.

    Worker processes prefetch samples, and the copy of a batch to a GPU overlaps with the step before it. Random
    transforms that draw from the global generators of Python, PyTorch or NumPy are reproducible. Batch sizes, the
    number of workers, and resuming a run do not change them. Transforms with a generator of their own are not.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        device: torch.device | None = None,
        *,
        num_workers: int | None = None,
        collate_fn: Collate | None = None,
    ) -> None:
        """Wraps `dataset`. A `collate_fn` turns a list of items, then of any type, into a pair or a mapping.

        `num_workers` processes prefetch; 0 reads in this process, when a batch is requested. None means 0 for a CPU,
        which is busy training, and for a GPU one less than the available CPUs, at most 4. Processes are forked on
        Linux: the data set is not copied, and must not use CUDA.

        Raises:
            TypeError: the data set cannot be indexed, or is a mapping of columns.
            ValueError: the data set is empty, or `num_workers` negative.
        """
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} cannot be indexed: must be a map-style data set with __len__ and "
                "__getitem__; one that can be iterated over is an IterableSource"
            )
        if isinstance(dataset, Mapping):
            raise TypeError(
                f"{type(dataset).__name__} of {', '.join(map(str, list(dataset)[:4]))} holds columns, not samples: "
                "give torch.utils.data.StackDataset(**columns)"
            )
        if len(dataset) == 0:  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses
            raise ValueError(f"{type(dataset).__name__} holds 0 samples: a source needs at least one")
        if num_workers is not None and num_workers < 0:
            raise ValueError(f"num_workers = {num_workers}: must be 0 or more")
        self._dataset, self._num_workers, self._collate = dataset, num_workers, collate_fn
        self._deliver_on(device or torch.device("cpu"))

    def _deliver_on(self, device: torch.device) -> None:
        """Sets the device; reads nothing, and starts no worker before the first announced batch."""
        num_workers = _default_workers(device) if self._num_workers is None else self._num_workers
        is_cuda = device.type == "cuda"
        self._device = device
        self._workers: Workers | None = None
        if num_workers:
            self._workers = Workers(self._dataset, num_workers, collate=self._collate, pinned=is_cuda)
        self._order: EpochOrder | None = None
        self._following: EpochOrder | None = None
        self._seed: int | None = None
        """Seed of the pass that the last batch belongs to."""
        self._prefetched: _Copied | None = None
        self._copy_stream = torch.cuda.Stream(device) if is_cuda else None
        self._in_flight: deque[torch.cuda.Event] = deque()

    def __len__(self) -> int:
        """Returns the number of samples."""
        return len(self._dataset)  # type: ignore[arg-type]  # torch's Dataset leaves __len__ to its subclasses

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:
        """Announces the samples to be requested, int64 [n]: after those announced before, or in their place."""
        announced = EpochOrder(order.cpu(), seed)
        if follows and self._order is not None:
            self._following = announced
        else:
            self._begin(announced)
            self._seed = seed

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Any, Any]:
        """Returns the collated samples at `indices`; the data set does its own augmentation.

        Samples that are not next in the announced order, such as a repeated batch, are read at once in this process.
        They come out the same, because random transforms are seeded by pass and sample.
        """
        indices = indices.cpu()
        announced = [order for order in (self._order, self._following) if order is not None]
        order = next((each for each in announced if each.continues_with(indices)), None)
        if order is None:
            return inputs_and_targets(self._read_in_process(indices))
        if order is self._following:
            self._begin(order)
        self._seed = order.seed
        if self._workers is None:
            batch = self._read_in_process(indices)
            order.cursor += len(indices)
        else:
            batch = self._next_batch(order, len(indices), self._workers)
        if order.num_left == 0 and self._following is not None:
            following = self._following
            self._begin(following)
            if self._workers is not None:  # read the first chunks while this batch trains
                self._workers.start(following)
        return inputs_and_targets(batch)

    def to(self, device: torch.device) -> Self:
        """Returns the same data set with batches delivered on `device`."""
        same = copy.copy(self)
        same._deliver_on(device)
        return same

    def close(self) -> None:
        """Ends the worker processes, as does dropping the last reference to this source; a batch starts new ones."""
        self._prefetched = None
        if self._workers is not None:
            self._workers.close()

    def _begin(self, order: EpochOrder) -> None:
        self._order, self._following, self._prefetched = order, None, None

    def _next_batch(self, order: EpochOrder, size: int, workers: Workers) -> Any:
        """Returns the order's next samples and, on a GPU, starts to copy the batch after them."""
        copied = self._prefetched
        self._prefetched = None
        if copied is None or copied.size != size:
            copied = self._start_copy(order, size, workers)
        workers.drop(size)
        order.cursor += size
        if copied.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied.done)
            # The memory belongs to the side stream, which must not reuse it before this stream is done with it.
            map_tree(lambda leaf: leaf.record_stream(stream) if isinstance(leaf, Tensor) else None, copied.batch)
            self._limit_in_flight(stream)
            if order.num_left:
                # A batch that does not fit beside the current one is copied when it is requested.
                with suppress(torch.OutOfMemoryError):
                    self._prefetched = self._start_copy(order, next_batch_size(order.num_left, size), workers)
        return copied.batch

    def _start_copy(self, order: EpochOrder, size: int, workers: Workers) -> _Copied:
        parts = workers.peek(order, size)
        if self._copy_stream is None:
            return _Copied(joined(parts, self._device), size, done=None)
        with torch.cuda.stream(self._copy_stream):
            batch = joined(parts, self._device)
            done = torch.cuda.Event()
            done.record(self._copy_stream)
        return _Copied(batch, size, done)

    def _limit_in_flight(self, stream: torch.cuda.Stream) -> None:
        """Waits while the device is too many batches behind; else their copies would fill its memory."""
        reached = torch.cuda.Event()
        reached.record(stream)
        self._in_flight.append(reached)
        if len(self._in_flight) > _BATCHES_IN_FLIGHT:
            self._in_flight.popleft().synchronize()

    def _read_in_process(self, indices: Tensor) -> Any:
        # dropout draws from the same generators
        with nullcontext() if self._seed is None else preserved_random_states(cuda=False):
            batch = read(self._dataset, indices.tolist(), self._seed, self._collate)
        return moved(batch, self._device)


def _default_workers(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, num_cpus - 1)
