"""Captures CUDA graphs in one shared memory pool, and releases that pool."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Captured device work."""

    def replay(self) -> None:
        """Launches the work once more."""


class GraphPool:
    """One memory pool for all captured graphs of a run. They never run at once, so the largest sets its size.

    A pool's memory goes back to the device only when all its graphs are gone. Each owner of graphs registers a callback
    with `on_release` that drops them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._callbacks: list[Callable[[], None]] = []
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.handle = self._new_handle()
        """The `pool` argument of `torch.cuda.graph`; a new one after each release. None without CUDA."""

    @property
    def can_capture(self) -> bool:
        """Whether the device can capture graphs."""
        return self.handle is not None

    @property
    def holds_graphs(self) -> bool:
        """Whether graphs captured since the last release exist, whose memory eager work cannot use."""
        return len(self._graphs) > 0

    def on_release(self, drop_graphs: Callable[[], None]) -> None:
        """Registers a callback that drops one owner's graphs, and all that the owner keeps only for them."""
        self._callbacks.append(drop_graphs)

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Graph:
        """Captures what `work` launches on the current stream, in this pool's memory; returns a graph not yet run.

        Graphs share the pool's memory only if they are captured on one stream. On the default stream, which cannot
        capture, PyTorch uses one of its own. Random numbers drawn inside must come from the device's default generator
        or from one of `generators`.

        A failure drops all graphs of the pool: PyTorch 2.11 leaves generators with which they cannot be replayed, and a
        capture that ran out of memory needs their memory. `release` frees it, once the caller has left its exception
        handler: the error's traceback holds the attempt's tensors.

        Raises:
            Exception: whatever `work`, PyTorch or CUDA raises first.
        """
        try:
            graph = self._record(work, generators)
        except Exception:  # whatever the captured code raises ends the capture; it is raised on
            self._drop()
            raise
        self._graphs.add(graph)
        return graph

    def release(self) -> None:
        """Drops all graphs and gives their memory back to the device; waits for the device."""
        self._drop()
        if self.handle is not None:
            torch.cuda.empty_cache()
        self.handle = self._new_handle()

    def synchronize(self) -> None:
        """Waits for the device: a graph must not be destroyed, nor its memory freed, while it replays."""
        if self.handle is not None:
            torch.cuda.synchronize(self._device)

    def _record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _capturing(graph, self.handle, generators):
            work()
        return graph

    def _drop(self) -> None:
        self.synchronize()
        for drop_graphs in self._callbacks:
            drop_graphs()
        self._graphs.clear()  # another release could not free one that is still held, by a traceback say

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Returns a context whose launches are captured into `graph`.

    Other threads (tracking, data loading) may use CUDA meanwhile. Garbage collection is disabled: if it destroyed
    another graph, that would abort the capture.
    """
    was_enabled, outside = gc.isenabled(), torch.cuda.current_stream()
    stream = None if outside == torch.cuda.default_stream(outside.device) else outside
    for generator in generators:
        graph.register_generator_state(generator)
    gc.disable()
    first: list[Exception] = []
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:  # whatever the captured code raises
                first.append(error)
                raise
    except Exception:
        torch.cuda.set_stream(outside)  # PyTorch 2.11 leaves the capturing one current
        _mend_after_broken_capture(outside.device, pool, generators)
        if not first:
            raise
    finally:
        if was_enabled:
            gc.enable()
    # The error that ends an aborted capture does not say why it was aborted. In the handler, the first one would refer
    # to that one, whose frames refer to it: the attempt's tensors would live until garbage is collected.
    if first:
        raise first.pop()


def _mend_after_broken_capture(device: torch.device, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """Cleans up the state that PyTorch, from 2.11 on, leaves behind after a capture that CUDA itself has aborted.

    `CUDAGraph.capture_end` then raises before it notifies the allocator, which would keep reserving memory for the
    capture, and the generators, which would refuse to draw. If each capture has a generator state of its own (2.15), a
    fresh state changes nothing.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # the capture ended normally: the captured code raised the exception
    torch._C._cuda_releasePool(device.index, pool)
    for generator in (torch.cuda.default_generators[device.index], *generators):
        generator.graphsafe_set_state(generator.clone_state())
