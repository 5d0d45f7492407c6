"""How much of a GPU CUDA sets aside as stacks for its threads, by default a quarter of a GiB on a large one."""

from __future__ import annotations

import ctypes
import functools

import torch

DEFAULT_BYTES = 1024
"""Of each thread that the device can run at once, 270,336 on an H200: CUDA's own choice."""
SMALL_BYTES = 256
"""What kernels are left with of which the compiler cannot tell how deep they go, those that recurse."""
_STACK_SIZE = 0
"""CU_LIMIT_STACK_SIZE of the driver's interface."""


def shrink_stacks(device: torch.device) -> None:
    """Gives back what CUDA sets aside for stacks beyond `SMALL_BYTES` a thread; waits for the device.

    The driver enlarges stacks by itself for kernels that are known to need more. A limit other than CUDA's own stays:
    somebody has set it. Without effect on a CPU, and where the driver's library is not to be found.
    """
    if device.type == "cuda" and _limit(device) == DEFAULT_BYTES:
        _set_limit(device, SMALL_BYTES)


def restore_stacks(device: torch.device) -> None:
    """Undoes `shrink_stacks`, for what is to be measured as CUDA has it; waits for the device."""
    if device.type == "cuda" and SMALL_BYTES <= (_limit(device) or DEFAULT_BYTES) < DEFAULT_BYTES:
        _set_limit(device, DEFAULT_BYTES)


def _limit(device: torch.device) -> int | None:
    """Returns the bytes of stack of each thread; None if the driver does not say."""
    driver, value = _driver(), ctypes.c_size_t()
    if driver is None:
        return None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context the thread's
        status = driver.cuCtxGetLimit(ctypes.byref(value), ctypes.c_int(_STACK_SIZE))
    return None if status else value.value


def _set_limit(device: torch.device, num_bytes: int) -> None:
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
