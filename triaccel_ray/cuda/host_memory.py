"""Tensors that a GPU reads directly from host memory (zero-copy, mapped pinned memory)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of `tensor` that is a tensor of the CUDA `device` but takes none of the device's memory.

    It lies in pinned host memory, which kernels read over the bus at a hundredth of the speed of device memory. Use it
    for data that is read a little at a time. PyTorch rounds pinned memory up to a power of two. The memory may be
    reused as soon as its last tensor is gone: synchronize with the device before that.

    Raises:
        RuntimeError: the host cannot pin that much memory, or the device cannot read it in place.
    """
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    if not pinned.numel():
        return pinned.to(device)
    with torch.cuda.device(device):
        raw = torch.as_tensor(_Exposed(pinned), device=device)
    if raw.data_ptr() != pinned.data_ptr():
        raise RuntimeError(f"{device} cannot read the host's memory in place")
    return raw.view(tensor.dtype).view(tensor.shape)


class _Exposed:
    """Exposes the bytes of a pinned tensor as device memory; tensors made of them keep the pinned tensor alive."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pinned.numel() * pinned.element_size(),),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
