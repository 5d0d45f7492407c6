"""Shared parts of kernels on images in channels_last memory: their start, and a program's channels and rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait(EARLY: tl.constexpr):
    """Waits until preceding kernels have ended and their writes are visible, if this kernel may start before that."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def channel_block(block, channel_units, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the number of channels, a block's channels int32 [BLOCK], and the mask of those that exist.

    The number is computed as a product with UNIT, so the compiler knows a divisor of it and can use 16-byte accesses.
    """
    channels = channel_units * UNIT
    columns = block * BLOCK + tl.arange(0, BLOCK)
    return channels, columns, columns < channels


@triton.jit
def row_tiles(channels, columns, BLOCK: tl.constexpr):
    """Returns a tile's rows int32 [BLOCK], its elements' offsets int32 [BLOCK, columns], and a row's stride int64.

    Then the first row of this program's first tile, and the step to its next: program j of n takes tiles j, j + n, ...
    """
    local = tl.arange(0, BLOCK)
    offsets = local[:, None] * channels + columns[None, :]
    stride = channels.to(tl.int64)
    return local, offsets, stride, tl.program_id(1) * BLOCK, tl.num_programs(1) * BLOCK
