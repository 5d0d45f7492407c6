"""Shared parts of kernels over a `TensorTable`: its dtype codes, and loading of elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triaccel_ray.kernels.multi_tensor import DTYPE_CODES

FP32 = tl.constexpr(DTYPE_CODES[torch.float32])
FP16 = tl.constexpr(DTYPE_CODES[torch.float16])
BF16 = tl.constexpr(DTYPE_CODES[torch.bfloat16])
INT16 = tl.constexpr(DTYPE_CODES[torch.int16])
UINT8 = tl.constexpr(DTYPE_CODES[torch.uint8])


@triton.jit
def load_fp32(address, dtype: tl.constexpr, offsets, length, FULL: tl.constexpr, ALIGN: tl.constexpr):
    """Returns the elements of `dtype` at `address` + `offsets` as fp32.

    FULL promises that all of them exist and that the address is a multiple of ALIGN bytes, which a thread then reads at
    once. Otherwise elements from `length` on read as 0.
    """
    pointer = address.to(tl.pointer_type(dtype))
    if FULL:
        values = tl.load(tl.multiple_of(pointer, ALIGN) + offsets)
    else:
        values = tl.load(pointer + offsets, mask=offsets < length, other=0.0)
    return values.to(tl.float32)
