"""GPU memory of a process: less of it outside tensors, the peak of what tensors take, and a cap on that."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

DEFAULT_STACK_BYTES = 1024
"""CUDA's default stack limit. Each thread that the device can run at once reserves it: 270,336 of them on an H200."""
LEAN_STACK_BYTES = 256
"""Stack limit for kernels whose depth the compiler cannot know: those that recurse, or call by pointers."""
_STACK_SIZE = 0
"""CU_LIMIT_STACK_SIZE of the driver API."""
_VIRTUAL_MEMORY = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of the driver API."""
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def use_lean_memory(device: torch.device) -> None:
    """Reduces the GPU memory that the process reserves outside tensors; waits for the device. No effect on a CPU.

    Thread stacks become smaller; the driver enlarges them for kernels known to need more. A stack limit other than
    CUDA's default stays, since the user has chosen it. PyTorch's allocator uses expandable segments, in which blocks of
    different sizes can reuse the same memory, unless the environment configures it. Memory allocated earlier stays.

    It affects the whole process. Kernels that recurse or call by pointers may need larger stacks, and tensors in
    expandable segments cannot be shared with other processes.
    """
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if _stack_bytes(index) == DEFAULT_STACK_BYTES:
        _drive(index, "cuCtxSetLimit", ctypes.c_int(_STACK_SIZE), ctypes.c_size_t(LEAN_STACK_BYTES))
    if not any(map(os.environ.get, _ALLOCATOR_VARIABLES)) and _has_virtual_memory(index):
        _set_allocator("expandable_segments:True")


@contextlib.contextmanager
def peak_of_tensors(device: torch.device) -> Iterator[list[int]]:
    """Returns a context that gives the peak bytes of tensors created inside, as a list of one; 0 without a GPU.

    Resets the allocator's peak statistics.
    """
    peak = [0]
    if device.type != "cuda":
        yield peak
        return
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield peak
    peak[0] = torch.cuda.max_memory_allocated(device) - before


def cap_memory(device: torch.device, fraction: float) -> None:
    """Caps the fraction of a GPU's memory that PyTorch's allocator may take, within the user's own cap; 1 ends the cap.

    The process has one cap for each GPU: the last call counts. A cap that was not set here is the user's.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    before = torch.cuda.get_per_process_memory_fraction(device)
    ours, users = _caps.get(uuid, (None, 1.0))
    users = users if before == ours else before
    torch.cuda.set_per_process_memory_fraction(min(fraction, users), device)
    _caps[uuid] = torch.cuda.get_per_process_memory_fraction(device), users  # the first is rounded to bytes


_caps: dict[str, tuple[float, float]] = {}
"""By the UUID of a GPU: the cap that was last set here, and the user's."""


def _set_allocator(settings: str) -> None:
    """Changes the settings of PyTorch's allocator, if it can; the only public way is the environment."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if change is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns on platforms without such segments
        change(settings)


def _stack_bytes(index: int) -> int | None:
    """Returns the limit on each thread's stack; None if the driver does not report it."""
    value = ctypes.c_size_t()
    return value.value if _drive(index, "cuCtxGetLimit", ctypes.byref(value), ctypes.c_int(_STACK_SIZE)) else None


def _has_virtual_memory(index: int) -> bool:
    """Returns whether the device supports virtual memory management; some virtual GPUs do not."""
    value, ordinal = ctypes.c_int(), ctypes.c_int()
    known = _drive(index, "cuCtxGetDevice", ctypes.byref(ordinal)) and _drive(
        index, "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(_VIRTUAL_MEMORY), ordinal
    )
    return known and value.value == 1


def _drive(index: int, function: str, *arguments: Any) -> bool:
    """Calls a driver function in the device's context; returns whether it succeeded. Waits for the device."""
    driver = _driver()
    if driver is None:
        return False
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # makes the context current in this thread
        status: int = getattr(driver, function)(*arguments)
    return status == 0


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
