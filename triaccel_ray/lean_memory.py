"""What a process holds on a GPU without computing with it, and how to have less of that."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from typing import ClassVar

import torch

DEFAULT_STACK_BYTES = 1024
"""Set aside for each thread that the device can run at once, 270,336 on an H200: CUDA's own choice."""
LEAN_STACK_BYTES = 256
"""What kernels are left with of which the compiler cannot tell how deep they go, those that recurse."""
_STACK_SIZE = 0
"""CU_LIMIT_STACK_SIZE of the driver's interface."""


def set_lean(device: torch.device, lean: bool) -> None:
    """Has this process hold less of a GPU's memory, or what any other would; waits for the device.

    Without effect on a CPU. Stacks: the driver enlarges them by itself for kernels that are known to need more; a size
    other than CUDA's own stays, for somebody has chosen it. Segments: PyTorch's allocator enlarges them in place, so
    that blocks of different sizes can follow one another in the same memory, unless the environment says how it shall
    work. What has been allocated before stays as it is.
    """
    if device.type != "cuda":
        return
    stack = _stack_bytes(device)
    if lean and stack == DEFAULT_STACK_BYTES:
        _set_stack_bytes(device, LEAN_STACK_BYTES)
    elif not lean and stack is not None and LEAN_STACK_BYTES <= stack < DEFAULT_STACK_BYTES:
        _set_stack_bytes(device, DEFAULT_STACK_BYTES)
    _Segments.expand(lean)


class _Segments:
    """The setting of PyTorch's allocator, which is one for the process and cannot be read back."""

    are_expandable: ClassVar[bool] = False

    @classmethod
    def expand(cls, wanted: bool) -> None:
        """Makes what is allocated from now on expandable, or no longer so; not where the user has settings."""
        if cls.are_expandable != wanted and not any(map(os.environ.get, _ALLOCATOR_VARIABLES)):
            _set_allocator(f"expandable_segments:{wanted}")
            cls.are_expandable = wanted


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _set_allocator(settings: str) -> None:
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is not None:  # there is no public way but the environment, before the process's first tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of platforms that have no such segments
            change(settings)


def _stack_bytes(device: torch.device) -> int | None:
    """Returns the bytes of stack of each thread; None if the driver does not say."""
    driver, value = _driver(), ctypes.c_size_t()
    if driver is None:
        return None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context the thread's
        status = driver.cuCtxGetLimit(ctypes.byref(value), ctypes.c_int(_STACK_SIZE))
    return None if status else value.value


def _set_stack_bytes(device: torch.device, num_bytes: int) -> None:
    driver = _driver()
    if driver is not None:
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            driver.cuCtxSetLimit(ctypes.c_int(_STACK_SIZE), ctypes.c_size_t(num_bytes))  # a refusal costs memory alone


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
