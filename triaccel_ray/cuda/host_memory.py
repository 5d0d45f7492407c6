"""Tensors that a GPU reads out of the host's memory ("zero-copy", mapped pinned memory)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def in_host_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of `tensor` that is a tensor of the CUDA `device` and takes none of its memory.

    It lies in pinned memory of the host, which kernels read through the bus at a hundredth of the speed of their own:
    for what is read a little of at a time. PyTorch rounds what it pins up to a power of two. The memory may be used
    again as soon as the last tensor of it is gone: wait for the device before.

    Raises:
        RuntimeError: the host has not as much memory that can be pinned, or the device cannot read it in place.
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
    """The bytes of a pinned tensor, as device memory; whoever holds what is made of them holds the tensor."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (pinned.numel() * pinned.element_size(),),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "strides": None,
            "version": 3,
        }
