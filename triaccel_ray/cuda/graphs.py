"""Captured CUDA graphs: the memory that they share, how it is given back, and how one is captured."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Device work that was captured."""

    def replay(self) -> None:
        """Launches it once more."""


class GraphPool:
    """One memory pool for all captured graphs of a run: they never run at once, so that the largest sets its size.

    A pool's memory goes back to the device only when every graph in it is gone; whoever keeps one registers with
    `on_release` how to drop it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._callbacks: list[Callable[[], None]] = []
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.handle = self._new_handle()
        """What `torch.cuda.graph(pool=...)` takes; another one after each release. None without CUDA."""

    @property
    def can_capture(self) -> bool:
        """Whether there is a device whose work can be captured."""
        return self.handle is not None

    @property
    def holds_graphs(self) -> bool:
        """Whether any graph captured since the last release is left, and with it memory that eager work cannot have."""
        return len(self._graphs) > 0

    def on_release(self, drop_graphs: Callable[[], None]) -> None:
        """Registers what drops one owner's graphs, and what the owner keeps only for them."""
        self._callbacks.append(drop_graphs)

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Graph:
        """Returns what `work` launches, captured on the current stream with memory of this pool, and not yet run.

        Graphs share the pool's memory only if they are captured on one stream; on the default stream, which cannot
        capture, PyTorch takes one of its own. Random numbers drawn inside come from the device's default generator or
        from one of `generators`.

        When it fails no graph of the pool survives: PyTorch 2.11 leaves generators that they may not be replayed with,
        and a capture that ran out of memory needs theirs. `release` gives the memory back, once the caller has left its
        handler: the error's traceback holds the attempt's tensors.

        Raises:
            Exception: whatever `work`, PyTorch or CUDA raises.
        """
        try:
            graph = self._record(work, generators)
        except Exception:
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
        """Waits for the device: a graph must not be destroyed, nor its memory go, while it replays."""
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
        self._graphs.clear()  # of one that lingers, in a traceback, say, a further release could not help

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Captures what is launched inside into `graph`.

    Other threads (tracking, data loading) may go on using CUDA meanwhile. The garbage collector rests: to destroy
    another graph that it finds would break the capture off.
    """
    was_enabled, outside = gc.isenabled(), torch.cuda.current_stream()
    stream = None if outside == torch.cuda.default_stream(outside.device) else outside
    for generator in generators:
        graph.register_generator_state(generator)
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except Exception:
        torch.cuda.set_stream(outside)  # PyTorch 2.11 leaves the capturing one current
        _mend_after_broken_capture(outside.device, pool, generators)
        raise
    finally:
        if was_enabled:
            gc.enable()


def _mend_after_broken_capture(device: torch.device, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """Undoes what PyTorch, from 2.11 on, leaves behind of a capture that CUDA itself has broken off.

    `CUDAGraph.capture_end` then raises before it has told the allocator, which would go on putting memory aside for the
    capture, and the generators, which would refuse to draw. Where each capture has a state of its own (2.15), a fresh
    one changes nothing.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # the capture ended in good order: the exception was the captured code's own
    torch._C._cuda_releasePool(device.index, pool)
    for generator in (torch.cuda.default_generators[device.index], *generators):
        generator.graphsafe_set_state(generator.clone_state())
