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
        """Starts empty; without effect where there is no CUDA."""
        self._device = device
        self._callbacks: list[Callable[[], None]] = []
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._memory = self._new_memory()

    @property
    def on_gpu(self) -> bool:
        """Whether there is a CUDA device."""
        return self._memory is not None

    @property
    def can_capture(self) -> bool:
        """Whether there is a device whose work can be captured."""
        return self.on_gpu

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

        When it fails no graph of the pool survives: of a capture that CUDA has broken off, PyTorch leaves generators
        that graphs captured before may not be replayed with (2.11, say), and one that ran out of memory needs theirs.
        `release` gives the memory back, once the caller has left its handler: the error's traceback holds the
        attempt's tensors.

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
        self._memory = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._memory = self._new_memory()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Has what this thread allocates inside, on the stream that captures, lie in the graphs' memory.

        None of them may replay meanwhile. Tensors that are left behind, which a replay would overwrite, cost the
        graphs: they are released. Without effect where there are no graphs.
        """
        memory = self._memory if self.holds_graphs else None
        if memory is None:
            yield
            return
        before = _tensors_in(memory)
        try:
            with torch.cuda.device(self._device), torch.cuda.use_mem_pool(memory):
                yield
        finally:
            if memory is self._memory and _tensors_in(memory) - before:
                self.release()

    def synchronize(self) -> None:
        """Waits for the device: a graph must not be destroyed, nor its memory go, while it replays."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)

    def _record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> Graph:
        assert self._memory is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _capturing(graph, self._memory.id, generators):
            work()
        return graph

    def _drop(self) -> None:
        self.synchronize()
        for drop_graphs in self._callbacks:
            drop_graphs()
        self._graphs.clear()  # one that lingers (in a traceback, say) goes with that: a further release could not help

    def _new_memory(self) -> torch.cuda.MemPool | None:
        return torch.cuda.MemPool() if self._device.type == "cuda" else None


def _tensors_in(memory: torch.cuda.MemPool) -> set[int]:
    """Returns the addresses of what lies in `memory`."""
    segments = torch.cuda.memory_snapshot(memory.id)
    blocks = (block for segment in segments for block in segment["blocks"])
    return {block["address"] for block in blocks if block["state"] == "active_allocated"}


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
    """Undoes what PyTorch leaves behind of a capture that CUDA itself has broken off.

    `CUDAGraph.capture_end` then raises before it has told the allocator, which would go on putting memory aside for the
    capture and give none of it back: so in 2.11 and in what has followed; a version that does tell it raises here, and
    nothing is done. Where a generator has one state for all captures (2.11), it has not told the generators either,
    which would refuse to draw; where each capture has a state of its own (2.15), a fresh one changes nothing. A PyTorch
    without these private calls keeps that memory aside.
    """
    end, give_back = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is not None and give_back is not None:
        try:
            end(device.index, pool)
        except RuntimeError:
            return  # the capture ended in good order: the exception was the captured code's own
        give_back(device.index, pool)
    for generator in (torch.cuda.default_generators[device.index], *generators):
        generator.graphsafe_set_state(generator.clone_state())
