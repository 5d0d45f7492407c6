"""FP32 numbers as two 16-bit words: the nearest BF16 number, and the difference that restores the FP32 number."""

from __future__ import annotations

import torch
from torch import Tensor


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the high words (bf16) and the low words (int16) of fp32 `values`, in their shape.

    With b the 32 bits of a number: high = (b + 2^15) >> 16 and low = b - (high << 16), as a signed integer. The high
    word is the BF16 number nearest to the FP32 one; ties go to the larger magnitude. `join` restores every number bit
    for bit. Truncation would lose no bit either, but layers would compute with weights that are smaller by up to 0.8 %,
    all in one direction. A NaN is not rounded, since it might become a number; it stays a NaN, perhaps of other bits.
    """
    bits = values.view(torch.int32)
    high = torch.where(values.isnan(), bits, bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Returns the fp32 numbers that `split` turned into these words.

    A high word of zero never has a negative low one. The exception is a write of zeros to the high words alone, as by
    `parameter.data.zero_()`. The low word then counts as 0, for the sum would be a NaN.
    """
    upper, lower = high.view(torch.int16).int(), low.int()
    lower = torch.where((upper & 0x7FFF) == 0, lower.clamp(min=0), lower)
    return ((upper << 16) + lower).view(torch.float32)
