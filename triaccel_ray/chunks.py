"""Samples of a map-style data set, read in chunks by worker processes, the same whoever reads them and when."""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Chunk:
    """What a worker process is asked for."""

    indices: Sequence[int]
    seed: int
    """Of the pass over the data set, for its random transforms."""


class ChunkReader(Dataset[Any]):
    """A data set of chunks, each an item: how `DataLoader` hands them to its worker processes."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, chunk: Chunk) -> tuple[int, list[Any]]:
        """Returns the chunk's size and its collated inputs and targets."""
        return len(chunk.indices), read(self._dataset, chunk.indices, chunk.seed)


def read(dataset: Dataset[Any], indices: Sequence[int], seed: int | None) -> list[Any]:
    """Returns inputs and targets of the samples at `indices`, collated as `DataLoader` would.

    With a `seed`, the global generators of Python, PyTorch (CPU) and NumPy start anew before every sample, from the
    seed and the sample's index: what a random transform makes of it depends neither on the process that reads it nor
    on what was read before.

    Raises:
        TypeError: an item of the data set is no (input, target) pair.
    """
    samples = []
    for index in indices:
        if seed is not None:
            _seed_generators(_mix(seed, index))
        sample = dataset[index]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            kind = type(sample).__name__ + (f" of {len(sample)}" if isinstance(sample, tuple | list) else "")
            raise TypeError(f"item {index} of {type(dataset).__name__} is a {kind}: must be a pair (input, target)")
        samples.append(sample)
    pair: list[Any] = default_collate(samples)
    return pair


@contextmanager
def undisturbed_generators() -> Iterator[None]:
    """Gives the global generators that `read` seeds their states back: dropout draws from the same."""
    python, cpu = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(cpu)
        if numpy is not None and state is not None:
            numpy.random.set_state(state)


def _seed_generators(seed: int) -> None:
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
class Passage:
    """Samples that will be asked for one after the other."""

    order: Tensor
    """int64 [n], on the CPU."""
    seed: int
    cursor: int = 0
    """Samples handed over."""

    @property
    def num_left(self) -> int:
        """Samples that have not been handed over."""
        return len(self.order) - self.cursor

    def goes_on_with(self, indices: Tensor) -> bool:
        """Returns whether these samples, at least one, are the next ones."""
        return len(indices) > 0 and torch.equal(self.order[self.cursor : self.cursor + len(indices)], indices)

    def next_size(self, last: int) -> int:
        """Returns how many samples the next batch will have: as many as the last, or what a feed leaves at the end."""
        return last if self.num_left > last + 1 else self.num_left


@dataclass(frozen=True)
class Part:
    """Collated samples."""

    batch: list[Any]
    size: int

    def cut(self, start: int, end: int) -> Part:
        """Returns the samples from `start` to `end`, or to the last, without a copy."""
        if start == 0 and end >= self.size:
            return self
        return Part(map_tree(lambda leaf: leaf[start:end], self.batch), min(end, self.size) - start)


class Workers:
    """Processes that read a passage in chunks, and the samples that came back and await their batch."""

    def __init__(self, dataset: Dataset[Any], num_workers: int, *, pinned: bool) -> None:
        self._chunks = Chunks(num_workers)
        self._options: dict[str, Any] = {
            "dataset": ChunkReader(dataset),
            "sampler": self._chunks,
            "batch_size": None,  # the chunk is the item
            "collate_fn": _unchanged,
            "num_workers": num_workers,
            "prefetch_factor": _CHUNKS_AHEAD,
            "persistent_workers": True,
            "pin_memory": pinned,
            "generator": torch.Generator(),  # else each pass would draw from the global one
            # Any data set can be forked, local classes and lambdas too, and its memory is shared. A child of a
            # process that uses CUDA must not: these read samples on the CPU and do nothing else.
            "multiprocessing_context": "fork" if sys.platform == "linux" else None,
        }
        self._loader: DataLoader[Any] | None = None
        self._iterator: Iterator[list[Any]] | None = None
        self._passage: Passage | None = None
        self._parts: deque[Part] = deque()
        self._num_ready = 0

    def start(self, passage: Passage | None) -> None:
        """Begins to read at the passage's cursor; what was read for another is dropped."""
        self._parts.clear()
        self._num_ready = 0
        self._passage = self._chunks.passage = passage
        with warnings.catch_warnings():
            # Python warns of forking where threads run, as they do once CUDA is in use.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            if self._loader is None:
                self._loader = DataLoader(**self._options)
            self._iterator = iter(self._loader)

    def peek(self, passage: Passage, num: int) -> list[list[Any]]:
        """Returns the passage's next `num` samples in one or more parts; they stay until they are dropped."""
        if self._passage is not passage:
            self.start(passage)
        while self._num_ready < num:
            part = self._pull()
            self._chunks.adapt(part)
            self._parts.append(part)
            self._num_ready += part.size
        parts, missing = [], num
        for part in self._parts:
            if missing <= 0:
                break
            parts.append(part.cut(0, missing).batch)
            missing -= part.size
        return parts

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
        self._loader = self._iterator = self._passage = self._chunks.passage = None
        self._parts.clear()
        self._num_ready = 0

    def _pull(self) -> Part:
        assert self._iterator is not None
        try:
            size, batch = next(self._iterator)
        except Exception as error:
            failure = error.with_traceback(None)  # its frames hold the iterator; the worker's are in the message
            self.close()
        else:
            return Part(batch, size)
        raise failure


class Chunks:
    """Deals out a passage from its cursor on; the sampler of a `DataLoader`, which begins anew with each passage."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._size = CHUNK_SIZES.start
        self.passage: Passage | None = None

    def __iter__(self) -> Iterator[Chunk]:
        """Returns the chunks that are left, each cut only when a worker can take it."""
        if self.passage is None:
            return
        passage, start = self.passage, self.passage.cursor
        # A passage in few chunks would leave processes idle at its end.
        largest = max(len(passage.order) // (4 * self._num_workers), CHUNK_SIZES.start)
        while start < len(passage.order):
            indices = passage.order[start : start + min(self._size, largest)]
            start += len(indices)
            yield Chunk(indices.tolist(), passage.seed)

    def adapt(self, part: Part) -> None:
        """Chooses the size of the chunks to come by the weight of this one's samples."""
        num_bytes = sum(leaf.nbytes for leaf in leaves_of(part.batch) if isinstance(leaf, Tensor))
        wanted = _CHUNK_BYTES * part.size // max(num_bytes, 1)
        self._size = min(max(wanted, CHUNK_SIZES.start), CHUNK_SIZES.stop - 1)


def _unchanged(chunk: Any) -> Any:
    return chunk


def map_tree(function: Callable[..., Any], *trees: Any) -> Any:
    """Returns `function` of every leaf, of the trees' leaves in the same place when there are several.

    Trees are what `default_collate` makes: dicts, lists, tuples and named tuples over tensors and lists of strings.
    """
    first = trees[0]
    if isinstance(first, dict):
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
