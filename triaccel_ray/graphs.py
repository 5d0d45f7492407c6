"""Captured CUDA graphs: the memory that they share, how it is given back, and how one is captured."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class GraphPool:
    """One memory pool for all captured graphs of a run: they never run at once, so that the largest sets its size.

    A pool's memory goes back to the device only when every graph in it is gone; whoever keeps one registers with
    `on_release` how to drop it.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts empty; without effect where there is no CUDA."""
        self._device = device
        self._callbacks: list[Callable[[], None]] = []
        self.handle = self._new_handle()
        """What `torch.cuda.graph(pool=...)` takes; another one after each release. None without CUDA."""

    def on_release(self, drop_graphs: Callable[[], None]) -> None:
        """Registers what drops one owner's graphs."""
        self._callbacks.append(drop_graphs)

    def release(self) -> None:
        """Drops all graphs and gives their memory back to the device; waits for the device."""
        for drop_graphs in self._callbacks:
            drop_graphs()
        if self.handle is not None:
            torch.cuda.synchronize(self._device)  # a graph must not be destroyed, nor its memory go, while it replays
            torch.cuda.empty_cache()
        self.handle = self._new_handle()

    def _new_handle(self) -> Any:
        return torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    stream: torch.cuda.Stream | None,
    generators: Sequence[torch.Generator] = (),
) -> Iterator[None]:
    """Captures what is launched inside into `graph`, with memory from `pool`, on `stream` (None: one of PyTorch's own).

    Random numbers drawn inside come from the device's default generator or from one of `generators`. Graphs share a
    pool's memory only if they are captured on one stream. Other threads (tracking, data loading) may go on using CUDA
    meanwhile. The garbage collector rests: to destroy another graph that it finds would break the capture off.
    """
    was_enabled, outside = gc.isenabled(), torch.cuda.current_stream()
    for generator in generators:
        graph.register_generator_state(generator)
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    except Exception:
        torch.cuda.set_stream(outside)
        _mend_after_broken_capture(outside.device, pool, generators)
        raise
    finally:
        if was_enabled:
            gc.enable()


def _mend_after_broken_capture(device: torch.device, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """Undoes what PyTorch leaves behind of a capture that CUDA itself has broken off.

    `CUDAGraph.capture_end` then raises before it has told the allocator, which would go on putting memory aside for the
    capture and give none of it back, and before it has told the generators, which would refuse to draw.
    """
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:
        return  # the capture ended in good order: the exception was the captured code's own
    torch._C._cuda_releasePool(device.index, pool)
    for generator in (torch.cuda.default_generators[device.index], *generators):
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Has PyTorch warn (`warn`) or raise RuntimeError (`error`) where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode(mode)
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
