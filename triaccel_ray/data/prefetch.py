"""Samples of a map-style data set, read in chunks by worker processes; transforms are seeded by sample."""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

CHUNK_SIZES = range(32, 513)
"""Samples that a worker process may read at a time."""
_CHUNK_BYTES = 4 * 2**20
"""What a chunk should weigh: passing one on costs a millisecond, whatever its size, and its memory is shared memory."""
_CHUNKS_AHEAD = 2
"""Chunks a worker keeps ready."""

Collate = Callable[[list[Any]], Any]
"""Maps a list of items to a batch: a pair (inputs, targets), or a mapping."""


@dataclass(frozen=True)
class Chunk:
    """What a worker process is asked for."""

    indices: Sequence[int]
    seed: int
    """Of the pass over the data set, for its random transforms."""


class ChunkReader(Dataset[Any]):
    """A data set of chunks, each an item: how `DataLoader` hands them to its worker processes."""

    def __init__(self, dataset: Dataset[Any], collate: Collate | None) -> None:
        self._dataset, self._collate = dataset, collate

    def __getitem__(self, chunk: Chunk) -> tuple[int, Any]:
        """Returns the chunk's size and its collated samples."""
        return len(chunk.indices), read(self._dataset, chunk.indices, chunk.seed, self._collate)


def read(dataset: Dataset[Any], indices: Sequence[int], seed: int | None, collate: Collate | None = None) -> Any:
    """Returns the samples at `indices` as a batch, by `collate`, or else as `DataLoader` would.

    With a `seed`, the global generators of Python, PyTorch (CPU) and NumPy start anew before every sample, from the
    seed and the sample's index: what a random transform makes of it depends neither on the process that reads it nor
    on what was read before.

    Raises:
        TypeError: an item, without `collate`, is neither an (input, target) pair nor a mapping.
    """
    samples = []
    for index in indices:
        if seed is not None:
            seed_generators(seed, index)
        samples.append(dataset[index])
        if collate is None:
            require_pair(samples[-1], f"item {index} of {type(dataset).__name__}")
    return default_collate(samples) if collate is None else collate(samples)


def require_pair(value: Any, what: str) -> None:
    """Checks that `value` has inputs and targets: an item, or what a `collate_fn` made of several.

    Raises:
        TypeError: it is neither a pair nor a mapping; the message begins with `what`.
    """
    if isinstance(value, Mapping) or (isinstance(value, tuple | list) and len(value) == 2):
        return
    kind = type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
    raise TypeError(
        f"{what} is a {kind}: must be a pair (input, target), or a mapping of names to tensors; give "
        "DatasetSource(dataset, collate_fn=...) a function that makes one of a list of items"
    )


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Returns the two halves of a batch; a mapping is both: the model takes what it needs by name, so does the loss."""
    return (batch, batch) if isinstance(batch, Mapping) else (batch[0], batch[1])


def next_batch_size(num_left: int, wanted: int) -> int:
    """Returns how many of an epoch's last `num_left` samples the next batch has, at most `wanted`, or 3.

    The last two batches share their samples where one sample would be left over, which batch norm could not take. The
    larger half goes first, so that a schedule never counts fewer batches than were taken.
    """
    if num_left != wanted + 1:
        return min(wanted, num_left)
    return num_left if num_left <= 3 else (num_left + 1) // 2


def seed_generators(seed: int, index: int) -> None:
    """Seeds the global generators of Python, PyTorch (CPU) and NumPy, by a pass's seed and a sample's index."""
    seed = _mix(seed, index)
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also touch CUDA, which a worker must not
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _mix(seed: int, index: int) -> int:
    """Returns a number of 63 bits that looks random: the output function of SplitMix64 (Steele et al. 2014)."""
    word = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return (word ^ word >> 31) >> 1


@dataclass
class EpochOrder:
    """Samples that will be asked for one after the other."""

    indices: Tensor
    """int64 [n], on the CPU."""
    seed: int
    cursor: int = 0
    """Samples handed over."""

    @property
    def num_left(self) -> int:
        """Samples that have not been handed over."""
        return len(self.indices) - self.cursor

    def continues_with(self, indices: Tensor) -> bool:
        """Returns whether these samples, at least one, are the next ones."""
        return len(indices) > 0 and torch.equal(self.indices[self.cursor : self.cursor + len(indices)], indices)


@dataclass(frozen=True)
class Part:
    """Collated samples."""

    batch: Any
    size: int

    def cut(self, start: int, end: int) -> Part:
        """Returns the samples from `start` to `end`, or to the last, without a copy."""
        if start == 0 and end >= self.size:
            return self
        return Part(map_tree(lambda leaf: leaf[start:end], self.batch), min(end, self.size) - start)


class Workers:
    """Processes that read an order in chunks, and the samples that came back and await their batch.

    Chunks are cut and joined to batches of any size, unless they come from a `collate` of the user's, which may pad
    them, or mix their samples: then a chunk is a batch, and another size than the last begins anew at the cursor.
    """

    def __init__(self, dataset: Dataset[Any], num_workers: int, *, collate: Collate | None, pinned: bool) -> None:
        self._chunks = ChunkSampler(num_workers)
        self._has_collate = collate is not None
        self._new_loader = partial(
            item_loader,
            ChunkReader(dataset, collate),
            num_workers,
            sampler=self._chunks,
            prefetch_factor=_CHUNKS_AHEAD,
            persistent_workers=True,
            pin_memory=pinned,
            generator=torch.Generator(),  # else each pass would draw from the global one
        )
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[tuple[int, Any]] | None = None
        self._order: EpochOrder | None = None
        self._parts: deque[Part] = deque()
        self._num_ready = 0

    def start(self, order: EpochOrder | None) -> None:
        """Begins to read at the order's cursor; what was read for another is dropped."""
        self._parts.clear()
        self._num_ready = 0
        self._order = self._chunks.order = order
        if self._loader is None:
            self._loader = self._new_loader()
        self._iterator = iterate(self._loader)

    def peek(self, order: EpochOrder, num: int) -> list[Any]:
        """Returns the order's next `num` samples in one or more parts; they stay until they are dropped."""
        if self._order is not order or (self._has_collate and self._next_whole() != num):
            self._chunks.batch_size = num if self._has_collate else None
            self.start(order)
        while self._num_ready < num:
            self._pull()
        parts, missing = [], num
        for part in self._parts:
            if missing <= 0:
                break
            parts.append(part.cut(0, missing).batch)
            missing -= part.size
        return parts

    def expected_size(self, order: EpochOrder, last: int) -> int:
        """Returns how many samples the next batch may have, at least one, where the last had `last`."""
        return self._next_whole() if self._has_collate else next_batch_size(order.num_left, last)

    def _next_whole(self) -> int:
        """Returns the size of the next chunk, 0 at the order's end."""
        if not self._parts and self._order is not None and self._order.num_left:
            self._pull()
        return self._parts[0].size if self._parts else 0

    def drop(self, num: int) -> None:
        """Gives up the next `num` samples, which `peek` has returned."""
        self._num_ready -= num
        while num:
            part = self._parts.popleft()
            if part.size > num:
                self._parts.appendleft(part.cut(num, part.size))
            num -= min(num, part.size)

    def close(self) -> None:
        """Ends the processes: DataLoader's iterator does so when the last reference to it is gone."""
        self._loader = self._iterator = self._order = self._chunks.order = None
        self._parts.clear()
        self._num_ready = 0

    def _pull(self) -> None:
        """Takes in the next chunk."""
        assert self._iterator is not None
        try:
            size, batch = next(self._iterator)
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the iterator; the worker's are in the message
            self.close()
        else:
            self._parts.append(Part(batch, size))
            self._num_ready += size
            self._chunks.adapt(self._parts[-1])
            return
        raise failure


class ChunkSampler:
    """Deals out an order from its cursor on; the sampler of a `DataLoader`, which begins anew with each order."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._size = CHUNK_SIZES.start
        self.order: EpochOrder | None = None
        self.batch_size: int | None = None
        """Samples of each chunk, where it is to be a batch as it is."""

    def __iter__(self) -> Iterator[Chunk]:
        """Returns the chunks that are left, each cut only when a worker can take it."""
        if self.order is None:
            return
        order, start = self.order, self.order.cursor
        if self.batch_size is not None:
            size = self.batch_size  # of the first; of the others what a feed leaves at the end of an epoch
            while start < len(order.indices):
                indices = order.indices[start : start + size]
                start += len(indices)
                size = next_batch_size(len(order.indices) - start, self.batch_size)
                yield Chunk(indices.tolist(), order.seed)
            return
        # An order in few chunks would leave processes idle at its end.
        largest = max(len(order.indices) // (4 * self._num_workers), CHUNK_SIZES.start)
        while start < len(order.indices):
            indices = order.indices[start : start + min(self._size, largest)]
            start += len(indices)
            yield Chunk(indices.tolist(), order.seed)

    def adapt(self, part: Part) -> None:
        """Chooses the size of the chunks to come by the weight of this one's samples."""
        num_bytes = sum(leaf.nbytes for leaf in leaves_of(part.batch) if isinstance(leaf, Tensor))
        wanted = _CHUNK_BYTES * part.size // max(num_bytes, 1)
        self._size = min(max(wanted, CHUNK_SIZES.start), CHUNK_SIZES.stop - 1)


def item_loader(dataset: Dataset[Any], num_workers: int, **options: Any) -> DataLoader[Any]:
    """Returns a loader whose worker processes hand over the data set's items as they are."""
    # Any data set can be forked, local classes and lambdas too, and its memory is shared. A child of a process that
    # uses CUDA must not: these read samples on the CPU and do nothing else.
    context = "fork" if sys.platform == "linux" else None
    return DataLoader(
        dataset,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=num_workers,
        multiprocessing_context=context,
        **options,
    )


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Returns the loader's items, from the first on, without Python's warning of forking where threads run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        return iter(loader)


def _unchanged(item: Any) -> Any:
    return item


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Returns `function` of every leaf, of the trees' leaves in the same place when there are several.

    Trees are what `default_collate` makes: mappings, lists, tuples and named tuples over tensors and lists of strings.
    """
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(map_tree(function, *leaves) for leaves in zip(*trees, strict=True)))
    if isinstance(first, list | tuple) and not isinstance(next(iter(first), None), str | bytes):
        return type(first)(map_tree(function, *leaves) for leaves in zip(*trees, strict=True))
    return function(*trees)


def leaves_of(tree: Any) -> list[Any]:
    """Returns the leaves, tensors and others."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found
