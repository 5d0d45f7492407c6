"""Pool of CUDA streams that successive holders reuse."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import ClassVar

import torch


class PooledStream:
    """A CUDA stream lent to one holder at a time; the next holder reuses it once this object is gone.

    For each pair of a thread and a stream that has multiplied matrices, PyTorch keeps a workspace until the process
    ends: 32 MiB on an H200. Each such thread also keeps a cuBLAS handle: 64 MiB more. So successive runs in a process
    share a stream, and backward passes run in the calling thread instead of PyTorch's own.

    Successive holders must wait for the same outer stream: nothing else orders their work.
    """

    _idle: ClassVar[defaultdict[int, list[torch.cuda.Stream]]] = defaultdict(list)
    """Index of a device -> streams without a holder; they belong to the process, as workspaces do."""

    def __init__(self, device: torch.device) -> None:
        """Takes an idle stream of this CUDA device, or a new one."""
        index = torch.cuda.current_device() if device.index is None else device.index
        idle = self._idle[index]
        try:
            self.stream = idle.pop()
        except IndexError:
            self.stream = torch.cuda.Stream(index)
        """The stream; it is another holder's once this object is gone."""
        weakref.finalize(self, idle.append, self.stream).atexit = False

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Returns a context on this stream, ordered between earlier and later work of the outer stream.

        Inside it, backward passes run in the calling thread.
        """
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self.stream), torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            outside.wait_stream(self.stream)
