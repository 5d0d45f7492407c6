"""CUDA streams that one holder after another computes on."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

import torch


class LentStream:
    """A CUDA stream of its holder's own; once that is gone, the next holder's.

    For each pair of a thread and a stream that has multiplied matrices PyTorch keeps a workspace until the process
    ends, 32 MiB on an H200, and for each such thread a cuBLAS handle, 64 MiB more. So runs that follow one another in a
    process share a stream, and backward passes run in the thread that calls, not in PyTorch's own.

    Successive holders have to wait for the same outside stream: that alone orders what they do.
    """

    _idle: ClassVar[defaultdict[int, list[torch.cuda.Stream]]] = defaultdict(list)
    """Index of a device -> streams that nobody holds; the process's, as workspaces are."""

    def __init__(self, device: torch.device) -> None:
        """Takes a stream of this CUDA device that has been given back, or a new one."""
        index = torch.cuda.current_device() if device.index is None else device.index
        idle = self._idle[index]
        try:
            self._stream = idle.pop()
        except IndexError:
            self._stream = torch.cuda.Stream(index)
        weakref.finalize(self, idle.append, self._stream).atexit = False

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Has what is inside run on this stream, between what is launched before it and after it.

        Backward passes run in the calling thread meanwhile.
        """
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            outside.wait_stream(self._stream)
