"""Worker processes that prefetch a data set's samples, in the order in which they will be requested."""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from triaccel_ray.data.batches import Collate, map_tree, next_batch_size, read

CHUNK_SIZES = range(32, 513)
"""Samples that a worker process may read at a time."""
_CHUNK_BYTES = 4 * 2**20
"""Target size of a chunk: handing one over costs a millisecond, whatever its size, and takes shared memory."""
_CHUNKS_AHEAD = 2
"""Chunks a worker keeps ready."""


@dataclass
class EpochOrder:
    """The order in which samples will be requested, and the position in it."""

    indices: Tensor
    """int64 [n], on the CPU."""
    seed: int
    """Seed of the pass over the data set, for its random transforms."""
    cursor: int = 0
    """Samples delivered so far."""

    @property
    def num_left(self) -> int:
        """Samples not yet delivered."""
        return len(self.indices) - self.cursor

    def continues_with(self, indices: Tensor) -> bool:
        """Returns whether `indices`, at least one, are the next samples."""
        return len(indices) > 0 and torch.equal(self.indices[self.cursor : self.cursor + len(indices)], indices)


class Workers:
    """Worker processes that read an order in chunks, and a buffer of the samples that they return.

    Chunks are cut and joined to batches of any size. A user's `collate` may pad or mix samples. With one, a chunk is a
    batch, and a new batch size restarts reading at the cursor.
    """

    def __init__(self, dataset: Dataset[Any], num_workers: int, *, collate: Collate | None, pinned: bool) -> None:
        self._chunks, self._has_collate = ChunkSampler(num_workers), collate is not None
        self._new_loader = partial(
            item_loader,
            _ChunkReader(dataset, collate),
            num_workers,
            sampler=self._chunks,
            prefetch_factor=_CHUNKS_AHEAD,
            persistent_workers=True,
            pin_memory=pinned,
            generator=torch.Generator(),  # else each pass would draw from the global one
        )
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[tuple[int, Any]] = iter(())
        self._parts: deque[tuple[int, Any]] = deque()
        """Number of samples, and the samples, of each chunk or the rest of one."""

    def start(self, order: EpochOrder) -> None:
        """Starts to read at the order's cursor; samples read for another order are dropped."""
        self._parts.clear()
        self._chunks.order = order
        if self._loader is None:
            self._loader = self._new_loader()
        self._iterator = iterate(self._loader)

    def peek(self, order: EpochOrder, num_samples: int) -> list[Any]:
        """Returns the order's next `num_samples` samples in one or more parts; they stay until `drop`."""
        if self._chunks.order is not order or (self._has_collate and self._next_size() != num_samples):
            self._chunks.batch_size = num_samples if self._has_collate else None
            self.start(order)
        while sum(size for size, _ in self._parts) < num_samples:
            self._take_chunk()
        parts = []
        num_left = num_samples
        for size, batch in self._parts:
            parts.append(batch if size <= num_left else _cut(batch, 0, num_left))
            num_left -= size
            if num_left <= 0:
                break
        return parts

    def drop(self, num_samples: int) -> None:
        """Removes the next `num_samples` samples, which `peek` has returned, from the buffer."""
        num_left = num_samples
        while num_left:
            size, batch = self._parts.popleft()
            if size > num_left:
                self._parts.appendleft((size - num_left, _cut(batch, num_left, size)))
            num_left -= min(num_left, size)

    def close(self) -> None:
        """Ends the processes: DataLoader's iterator does so when the last reference to it is gone."""
        self._loader = self._chunks.order = None
        self._iterator = iter(())
        self._parts.clear()

    def _next_size(self) -> int:
        """Returns the size of the next chunk."""
        if not self._parts:
            self._take_chunk()
        return self._parts[0][0]

    def _take_chunk(self) -> None:
        """Adds the next chunk to the buffer."""
        try:
            self._parts.append(next(self._iterator))
        except Exception as error:
            self.close()
            raise error.with_traceback(None) from None  # its frames hold the iterator; the message has the worker's
        self._chunks.adapt(*self._parts[-1])


class _ChunkReader(Dataset[Any]):
    """A data set whose items are chunks, so that `DataLoader` hands whole chunks to its worker processes."""

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, chunk: tuple[list[int], int]) -> tuple[int, Any]:
        """Returns the size and the collated samples of a chunk, which is given by indices and the pass's seed."""
        indices, seed = chunk
        return len(indices), read(self._dataset, indices, seed, self._collate)


class ChunkSampler:
    """Sampler of a `DataLoader` that yields an order's chunks from its cursor on; iterated anew for each order."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._size = num_workers, CHUNK_SIZES.start
        self.order: EpochOrder | None = None
        self.batch_size: int | None = None
        """Samples of each chunk if a chunk is a batch, else None."""

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """Yields the remaining chunks as (indices, seed), each cut only when a worker can take it."""
        if self.order is None:
            return
        order, start = self.order, self.order.cursor
        # With few chunks, processes would idle at the end of an order.
        largest = max(len(order.indices) // (4 * self._num_workers), CHUNK_SIZES.start)
        batch_size = self.batch_size  # of the first chunk; later ones follow `next_batch_size`
        while start < len(order.indices):
            size = batch_size or min(self._size, largest)
            indices = order.indices[start : start + size]
            start += len(indices)
            yield indices.tolist(), order.seed
            if self.batch_size is not None:
                batch_size = next_batch_size(len(order.indices) - start, self.batch_size)

    def adapt(self, num_samples: int, batch: Any) -> None:
        """Chooses the size of later chunks by the bytes of this chunk's samples."""
        leaves: list[Any] = []
        map_tree(leaves.append, batch)
        num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        wanted = _CHUNK_BYTES * num_samples // max(num_bytes, 1)
        self._size = min(max(wanted, CHUNK_SIZES.start), CHUNK_SIZES.stop - 1)


def item_loader(dataset: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:
    """Returns a loader whose worker processes return the data set's items unchanged."""
    # Forking works for any data set, local classes and lambdas too, and shares its memory. A child of a process that
    # uses CUDA must not use CUDA itself: these only read samples on the CPU.
    context = "fork" if sys.platform == "linux" else None
    return DataLoader(
        dataset,
        num_workers=num_workers,
        batch_size=None,
        collate_fn=_unchanged,
        multiprocessing_context=context,
        **options,
    )


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Returns a new iterator over the loader, without Python's warning about forking while threads run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        return iter(loader)


def _unchanged(item: Any) -> Any:
    return item


def _cut(batch: Any, start: int, end: int) -> Any:
    """Returns the samples from `start` to `end`, without a copy."""
    return map_tree(lambda leaf: leaf[start:end], batch)
