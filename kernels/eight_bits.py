"""Optimizer state in 8 bits: a code per number and a scale per group of numbers.

Blocks of `BLOCK` numbers follow one another: their codes, a byte each, then an fp32 scale for each `GROUP`. The last
block is padded. A group's scale s is its largest magnitude. Codes are nonlinear, finer near zero, so that small numbers
beside large ones keep digits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; the functions are
our own):

    signed       c = round(127 sign(x) sqrt(|x| / s)), an int8     x = s (c / 127) |c / 127|
    unsigned     c = floor(255 (x / s)^(1/4) + u), at least 1 if x > 0, a uint8     x = s (c / 255)^4

Second moments change by a thousandth per step, less than a code. Rounded to nearest, they would never change. So they
are rounded stochastically: u is uniform in [0, 1), a hash of the number's position and the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Numbers per block; a program of the kernels steps one block."""
GROUP = 64
"""Numbers that share a scale."""
BLOCK_BYTES = BLOCK + 4 * (BLOCK // GROUP)


def num_bytes(number: int) -> int:
    """Returns the number of bytes that `number` numbers take; bytes of zeros decode to zeros."""
    return -(-number // BLOCK) * BLOCK_BYTES


def encode(values: Tensor, step: Tensor | None = None) -> Tensor:
    """Returns fp32 `values` [n] as uint8 [num_bytes(n)]: signed codes, or unsigned ones if a step count is given."""
    number = len(values)
    padded = torch.zeros(-(-number // BLOCK) * BLOCK, device=values.device)
    padded[:number] = values
    groups = padded.view(-1, BLOCK // GROUP, GROUP)
    scales = groups.abs().amax(-1)
    ratio = torch.where(scales.unsqueeze(-1) > 0, groups / scales.unsqueeze(-1), 0.0)
    if step is None:
        whole = (127.0 * ratio.abs().sqrt() + 0.5).floor()
        codes = (ratio.sign() * whole).to(torch.int8).view(torch.uint8)
    else:
        dithered = 255.0 * ratio.sqrt().sqrt() + _dither(len(padded), step).view(groups.shape)
        codes = torch.where(groups > 0, dithered.floor().clamp(1.0, 255.0), 0.0).to(torch.uint8)
    return torch.cat([codes.flatten(1), scales.view(torch.uint8)], dim=1).flatten()


def decode(codes: Tensor, number: int, *, signed: bool) -> Tensor:
    """Returns the fp32 numbers [number] that `encode` was given, up to rounding."""
    blocks = codes.view(-1, BLOCK_BYTES)
    scales = blocks[:, BLOCK:].contiguous().view(torch.float32).unsqueeze(-1)
    bytes_ = blocks[:, :BLOCK].reshape(-1, BLOCK // GROUP, GROUP)
    if signed:
        roots = bytes_.view(torch.int8).float() / 127.0
        values = scales * (roots * roots.abs())
    else:
        roots = bytes_.float() / 255.0
        values = scales * (roots * roots * (roots * roots))
    return values.flatten()[:number]


def _dither(number: int, step: Tensor) -> Tensor:
    """Returns uniform numbers in [0, 1), hashed from each position and the step: fp32 [number]."""
    mixed = torch.arange(number, dtype=torch.int32, device=step.device) * -1640531535 + step.int() * -2048144789
    for shift, factor in ((15, 739982445), (12, 695872825)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (32 - shift)) - 1))) * factor
    return ((mixed >> 8) & 0xFFFFFF).float() * 2.0**-24
