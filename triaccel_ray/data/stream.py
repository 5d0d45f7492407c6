"""Batches of any size on their way to a device: cut from what was read ahead, copied while the last one trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from triaccel_ray.cuda.random_states import preserved_random_states
from triaccel_ray.data.prefetch import Collate, EpochOrder, Workers, leaves_of, map_tree, read

_BATCHES_IN_FLIGHT = 8
"""Batches the host may be ahead of the device: it stays busy, and the copies that await it stay few."""


@dataclass(frozen=True)
class _Copied:
    """A batch on the device, or on its way there."""

    batch: Any
    size: int
    done: torch.cuda.Event | None
    """None where there was nothing to wait for."""


class SampleStream:
    """Batches of a data set, read ahead in the announced order, the next one already on its way to the device.

    Whatever else is asked for, such as a batch's samples a second time, is read on the spot, in this process, and
    comes out the same: the data set's random transforms are seeded by pass and sample.
    """

    def __init__(self, dataset: Dataset[Any], device: torch.device, num_workers: int, collate: Collate | None) -> None:
        """Reads nothing and starts no process before the first announced batch; with `num_workers` 0 none ever."""
        self._dataset, self._device, self._collate = dataset, device, collate
        pinned = device.type == "cuda"
        self._workers = Workers(dataset, num_workers, collate=collate, pinned=pinned) if num_workers else None
        self._current: EpochOrder | None = None
        self._following: EpochOrder | None = None
        self._seed: int | None = None
        self._prefetched: _Copied | None = None
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._in_flight: deque[torch.cuda.Event] = deque()

    def announce(self, order: Tensor, *, seed: int, follows: bool) -> None:
        """Makes known which samples will be asked for, int64 [n]: after those announced before, or in their place."""
        announced = EpochOrder(order.cpu(), seed)
        if follows and self._current is not None:
            self._following = announced
        else:
            self._begin(announced)
            self._seed = seed

    def batch(self, indices: Tensor) -> Any:
        """Returns the collated samples at `indices`, int64 [b], on the device."""
        indices = indices.cpu()
        order = self._order_with(indices)
        if order is None:
            return self._read_in_process(indices)
        self._seed = order.seed
        if self._workers is None:
            batch = self._read_in_process(indices)
            order.cursor += len(indices)
        else:
            batch = self._next_batch(order, len(indices), self._workers)
        if order.num_left == 0 and self._following is not None:
            self._begin(self._following)
            if self._workers is not None:  # the first chunks are read while this batch is computed with
                self._workers.start(self._current)
        return batch

    def close(self) -> None:
        """Ends the worker processes; another batch would start others."""
        self._prefetched = None
        if self._workers is not None:
            self._workers.close()

    def _begin(self, order: EpochOrder) -> None:
        self._current, self._following, self._prefetched = order, None, None

    def _order_with(self, indices: Tensor) -> EpochOrder | None:
        """Returns the order that goes on with these samples, after turning to the following one if that does."""
        if self._current is not None and self._current.continues_with(indices):
            return self._current
        if self._following is not None and self._following.continues_with(indices):
            self._begin(self._following)
            return self._current
        return None

    def _next_batch(self, order: EpochOrder, size: int, workers: Workers) -> Any:
        """Returns the order's next samples and, on a GPU, sets out with the batch after them."""
        copied = self._prefetched
        self._prefetched = None
        if copied is None or copied.size != size:
            copied = self._copy(order, size, workers)
        workers.drop(size)
        order.cursor += size
        if copied.done is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied.done)
            # The memory belongs to the side stream, which must not fill it again before this stream is done with it.
            for leaf in leaves_of(copied.batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(stream)
            self._limit_in_flight(stream)
            if order.num_left:
                # What does not fit beside the present batch is copied when its turn comes.
                with suppress(torch.OutOfMemoryError):
                    self._prefetched = self._copy(order, workers.expected_size(order, size), workers)
        return copied.batch

    def _copy(self, order: EpochOrder, size: int, workers: Workers) -> _Copied:
        parts = workers.peek(order, size)
        if self._copy_stream is None:
            return _Copied(_join(parts, self._device), size, done=None)
        with torch.cuda.stream(self._copy_stream):
            batch = _join(parts, self._device)
            done = torch.cuda.Event()
            done.record(self._copy_stream)
        return _Copied(batch, size, done)

    def _limit_in_flight(self, stream: torch.cuda.Stream) -> None:
        """Waits while the device has several batches before it; else their copies would fill its memory."""
        reached = torch.cuda.Event()
        reached.record(stream)
        self._in_flight.append(reached)
        if len(self._in_flight) > _BATCHES_IN_FLIGHT:
            self._in_flight.popleft().synchronize()

    def _read_in_process(self, indices: Tensor) -> Any:
        with (
            nullcontext() if self._seed is None else preserved_random_states(cuda=False)
        ):  # dropout draws from the same
            batch = read(self._dataset, indices.tolist(), self._seed, self._collate)
        return moved(batch, self._device)


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch from the host on `device`, by copies that the host does not wait for."""
    if device.type == "cuda":
        batch = map_tree(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, batch)
    return _join([batch], device)


def _join(parts: Sequence[Any], device: torch.device) -> Any:
    """Returns the parts' samples as one batch on `device`; pinned memory is left to be read when its turn comes."""
    return map_tree(lambda *leaves: _join_leaves(leaves, device), *parts)


def _join_leaves(leaves: Sequence[Any], device: torch.device) -> Any:
    first = leaves[0]
    if not isinstance(first, Tensor):
        return first if len(leaves) == 1 else [sample for leaf in leaves for sample in leaf]
    if len(leaves) == 1:
        return first.to(device, non_blocking=True)
    if any(leaf.shape[1:] != first.shape[1:] or leaf.dtype is not first.dtype for leaf in leaves):
        seen = sorted({f"{leaf.dtype} {list(leaf.shape[1:])}" for leaf in leaves})
        raise ValueError(f"samples of one batch have {' and '.join(seen)}: the data set must return one type and shape")
    if device.type == "cpu":
        return torch.cat(list(leaves))
    whole = torch.empty((sum(map(len, leaves)), *first.shape[1:]), dtype=first.dtype, device=device)
    for place, leaf in zip(whole.split([len(leaf) for leaf in leaves]), leaves, strict=True):
        place.copy_(leaf, non_blocking=True)
    return whole
