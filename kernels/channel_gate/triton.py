"""Triton kernels of pooling and gating, on each sample's [R, C] matrix of pixels and channels, channels contiguous.

Program (i, j, n) takes tiles j, j + parts, ... of the rows of sample n, for block i of the channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triaccel_ray.kernels.channels_last_triton import channel_block, row_tiles, wait

_RUNTIME = ["num_rows", "channel_units"]
"""Arguments that Triton must not specialize on: a new batch or image size must not cost a compilation."""


@triton.jit(do_not_specialize=_RUNTIME)
def sums(
    x, factor, out, share, num_rows, channel_units,
    EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes `share` times the sum of x, or of x factor, over each part of a sample's rows to `out`, [parts, N, C]."""
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    sample = tl.program_id(2).to(tl.int64)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        mask = (start + local < num_rows)[:, None] & exists[None, :]
        at = (sample * num_rows + start) * stride
        value = tl.load(x + at + offsets, mask=mask, other=0.0).to(tl.float32)
        if factor is not None:
            value *= tl.load(factor + at + offsets, mask=mask, other=0.0).to(tl.float32)
        total += value
    row = tl.program_id(1) * tl.num_programs(2) + sample
    tl.store(out + row * stride + columns, tl.sum(total, axis=0) * share, mask=exists)


@triton.jit(do_not_specialize=_RUNTIME)
def scale(
    x, gate, offset, y, share, num_rows, channel_units,
    EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes y = x gate + `share` offset; gate and offset are [N, C], or None for ones and zeros."""
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    sample = tl.program_id(2).to(tl.int64)
    factor = tl.full([BLOCK_CHANNELS], 1.0, dtype=tl.float32)
    if gate is not None:
        factor = tl.load(gate + sample * stride + columns, mask=exists, other=0.0).to(tl.float32)
    summand = tl.zeros([BLOCK_CHANNELS], dtype=tl.float32)
    if offset is not None:
        summand = tl.load(offset + sample * stride + columns, mask=exists, other=0.0).to(tl.float32) * share
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        mask = (start + local < num_rows)[:, None] & exists[None, :]
        at = (sample * num_rows + start) * stride
        value = tl.load(x + at + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at + offsets, value * factor[None, :] + summand[None, :], mask=mask)
