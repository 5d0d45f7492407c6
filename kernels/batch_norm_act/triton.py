"""Triton kernels of fused batch normalization, on [R, C] matrices of pixels and channels with channels contiguous.

Each direction takes three launches: one writes partial results for each part of the rows, a tiny one combines them, one
applies the result. On GPUs with programmatic dependent launch, each kernel starts while its predecessor ends and waits
before it touches memory, which saves a microsecond per launch. Programs take tiles in turn, so that together they sweep
memory from front to back. Two other ways to combine were slower. In the last program of the first launch, the fence and
the lone reading take longer than a launch. In every program of the third, registers are lacking, and so are loads in
flight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triaccel_ray.kernels.channels_last_triton import channel_block, row_tiles, wait

_RUNTIME = ["num_rows", "channel_units", "num_parts", "tile_rows"]
"""Arguments that Triton must not specialize on: a new batch size must not cost a compilation."""


@triton.jit
def _affine(mean, rstd, weight, bias, columns, exists):
    """Returns shift fp32 [1, C], rstd fp32 [C], scale and offset fp32 [1, C]: (x - shift) scale + offset is normalized.

    C stands for the columns of this program.
    """
    shift = tl.load(mean + columns, mask=exists, other=0.0)[None, :]
    inverse = tl.load(rstd + columns, mask=exists, other=0.0)
    scale = (inverse * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32))[None, :]
    offset = tl.load(bias + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
    return shift, inverse, scale, offset


@triton.jit
def _activated(z, ACTIVATION: tl.constexpr):
    """Returns the activation of fp32 z; NaN stays NaN."""
    if ACTIVATION == "relu":
        z = tl.where(z < 0.0, 0.0, z)
    elif ACTIVATION == "relu6":
        z = tl.where(z < 0.0, 0.0, tl.where(z > 6.0, 6.0, z))
    elif ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "hardswish":
        gate = z + 3.0
        z = z * tl.where(gate < 0.0, 0.0, tl.where(gate > 6.0, 6.0, gate)) * (1.0 / 6.0)
    return z


@triton.jit
def _through_activation(dy, z, ACTIVATION: tl.constexpr):
    """Returns the gradient before the activation from the one after it; for ReLU, z may also be its output."""
    if ACTIVATION == "relu":
        dy = tl.where(z <= 0.0, 0.0, dy)
    elif ACTIVATION == "relu6":
        dy = tl.where((z <= 0.0) | (z >= 6.0), 0.0, dy)
    elif ACTIVATION == "silu":
        gate = tl.sigmoid(z)
        dy = dy * gate * (1.0 + z * (1.0 - gate))
    elif ACTIVATION == "hardswish":
        dy = tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, dy * (z * (1.0 / 3.0) + 0.5), dy))
    return dy


@triton.jit(do_not_specialize=_RUNTIME)
def statistics(
    x, partials, num_rows, channel_units,
    EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the mean and sum of squared deviations of each part of the rows to `partials`, fp32 [2, parts, C].

    A lane takes every BLOCK_ROWS-th row of a part and sums deviations from its first value. As one of its n values, the
    first is at most sqrt(n) standard deviations from their mean. So for any data, rounding errors grow by less than a
    factor of n, tens to hundreds. Lanes are combined after Chan, Golub, LeVeque 1983, equation 2.1.
    """
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    count = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    mask = (first + local < num_rows)[:, None] & exists[None, :]
    origin = tl.load(x + first * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        valid = start + local < num_rows
        mask = valid[:, None] & exists[None, :]
        value = tl.load(x + start * stride + offsets, mask=mask, other=0.0).to(tl.float32)
        deviation = tl.where(valid[:, None], value - origin, 0.0)
        count += tl.where(valid, 1.0, 0.0)
        total += deviation
        squares += deviation * deviation
    offset = total / tl.maximum(count, 1.0)[:, None]
    mean = origin + offset
    part_mean = tl.sum(mean * count[:, None], axis=0) / tl.sum(count, axis=0)
    deviation = mean - part_mean[None, :]
    part_squares = tl.sum(squares - total * offset + count[:, None] * deviation * deviation, axis=0)
    row = tl.program_id(1)
    tl.store(partials + row * channels + columns, part_mean, mask=exists)
    tl.store(partials + (tl.num_programs(1) + row) * channels + columns, part_squares, mask=exists)


@triton.jit(do_not_specialize=_RUNTIME)
def finish_statistics(
    partials, mean_out, rstd_out, running_mean, running_var, num_batches,
    num_parts, tile_rows, num_rows, channel_units, momentum, eps,
    EARLY: tl.constexpr, UNIT: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the channels' mean and rstd = 1 / sqrt(var + eps), fp32 [C], and updates the running statistics.

    Deviations are taken from the first part's mean. As in `statistics`, rounding errors grow by less than a factor of
    the number of parts.
    """
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    local = tl.arange(0, BLOCK_PARTS)
    total = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], dtype=tl.float32)
    squares = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], dtype=tl.float32)
    origin = tl.load(partials + columns, mask=exists, other=0.0)
    tiles = tl.cdiv(num_rows, tile_rows)
    for start in range(0, num_parts, BLOCK_PARTS):
        rows = start + local
        mask = (rows < num_parts)[:, None] & exists[None, :]
        at = partials + rows[:, None] * channels + columns[None, :]
        mean = tl.load(at, mask=mask, other=0.0)
        square = tl.load(at + num_parts * channels, mask=mask, other=0.0)
        missing = tl.where(rows == (tiles - 1) % num_parts, tiles * tile_rows - num_rows, 0)
        weight = (tl.cdiv(tiles - rows, num_parts) * tile_rows - missing).to(tl.float32)[:, None]
        deviation = tl.where(mask, mean - origin[None, :], 0.0)
        total += weight * deviation
        squares += square + weight * deviation * deviation
    share = 1.0 / num_rows.to(tl.float64)
    offset = tl.sum(total, axis=0).to(tl.float64) * share
    var = tl.sum(squares, axis=0).to(tl.float64) * share - offset * offset
    var = tl.where(var < 0.0, 0.0, var).to(tl.float32)
    mean = (origin.to(tl.float64) + offset).to(tl.float32)
    tl.store(mean_out + columns, mean, mask=exists)
    tl.store(rstd_out + columns, 1.0 / tl.sqrt(var + eps), mask=exists)
    unbiased = var * (num_rows / (num_rows - 1.0))
    old_mean = tl.load(running_mean + columns, mask=exists, other=0.0).to(tl.float32)
    old_var = tl.load(running_var + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(running_mean + columns, old_mean + momentum * (mean - old_mean), mask=exists)
    tl.store(running_var + columns, old_var + momentum * (unbiased - old_var), mask=exists)
    if num_batches is not None and tl.program_id(0) == 0:
        tl.store(num_batches, tl.load(num_batches) + 1)


@triton.jit(do_not_specialize=_RUNTIME)
def normalize(
    x, residual, y, mean, rstd, weight, bias, num_rows, channel_units,
    ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes y = activation((x - mean) rstd weight + bias + residual)."""
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    shift, _, scale, offset = _affine(mean, rstd, weight, bias, columns, exists)
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        mask = (start + local < num_rows)[:, None] & exists[None, :]
        at = start * stride + offsets
        z = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - shift) * scale + offset
        if residual is not None:
            z += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + at, _activated(z, ACTIVATION), mask=mask)


@triton.jit(do_not_specialize=_RUNTIME)
def gradient_sums(
    dy, dy_fork, x, kept, dz_out, partials, mean, rstd, weight, bias, num_rows, channel_units,
    ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the sums of dz and of dz (x - mean) rstd over each part to `partials`, fp32 [2, parts, C].

    dz is the gradient before the activation, of dy plus `dy_fork`; `dz_out` receives it unless None. `kept` is the
    output for ReLU with a residual, the residual for other activations.
    """
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    shift, inverse, scale, offset = _affine(mean, rstd, weight, bias, columns, exists)
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    moment = tl.zeros([BLOCK_ROWS, BLOCK_CHANNELS], dtype=tl.float32)
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        mask = (start + local < num_rows)[:, None] & exists[None, :]
        at = start * stride + offsets
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - shift
        dz = _gradient(dy, dy_fork, kept, at, mask, centered * scale + offset, ACTIVATION)
        if dz_out is not None:
            rounded = dz.to(dz_out.dtype.element_ty)
            tl.store(dz_out + at, rounded, mask=mask)
            dz = rounded.to(tl.float32)  # the value that `gradient` reads
        total += dz
        moment += dz * centered
    row = tl.program_id(1)
    tl.store(partials + row * channels + columns, tl.sum(total, axis=0), mask=exists)
    moment_sum = tl.sum(moment, axis=0) * inverse
    tl.store(partials + (tl.num_programs(1) + row) * channels + columns, moment_sum, mask=exists)


@triton.jit(do_not_specialize=_RUNTIME)
def finish_sums(
    partials, dweight, dbias, num_parts, channel_units,
    EARLY: tl.constexpr, UNIT: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes dbias = sum dz and dweight = sum dz (x - mean) rstd over all rows, fp32 [C]."""
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    local = tl.arange(0, BLOCK_PARTS)
    total = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], dtype=tl.float32)
    moment = tl.zeros([BLOCK_PARTS, BLOCK_CHANNELS], dtype=tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        rows = start + local
        mask = (rows < num_parts)[:, None] & exists[None, :]
        at = partials + rows[:, None] * channels + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0)
        moment += tl.load(at + num_parts * channels, mask=mask, other=0.0)
    tl.store(dbias + columns, tl.sum(total, axis=0), mask=exists)
    tl.store(dweight + columns, tl.sum(moment, axis=0), mask=exists)


@triton.jit(do_not_specialize=_RUNTIME)
def gradient(
    dy, dy_fork, x, kept, dx, dresidual, mean, rstd, weight, bias, dweight, dbias, num_rows, channel_units,
    ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes dx = weight rstd (dz - dbias / R - (x - mean) rstd dweight / R), and dz to `dresidual`, if given."""
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(0), channel_units, UNIT, BLOCK_CHANNELS)
    shift, inverse, scale, offset = _affine(mean, rstd, weight, bias, columns, exists)
    average = (tl.load(dbias + columns, mask=exists, other=0.0) / num_rows)[None, :]
    slope = (tl.load(dweight + columns, mask=exists, other=0.0) * inverse / num_rows)[None, :]
    local, offsets, stride, first, step = row_tiles(channels, columns, BLOCK_ROWS)
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        mask = (start + local < num_rows)[:, None] & exists[None, :]
        at = start * stride + offsets
        centered = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - shift
        dz = _gradient(dy, dy_fork, kept, at, mask, centered * scale + offset, ACTIVATION)
        if dresidual is not None:
            tl.store(dresidual + at, dz, mask=mask)
        tl.store(dx + at, scale * (dz - average - centered * slope), mask=mask)


@triton.jit
def _gradient(dy, dy_fork, kept, at, mask, z, ACTIVATION: tl.constexpr):
    """Returns the gradient before the activation, fp32, of one tile."""
    dz = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    if dy_fork is not None:
        dz += tl.load(dy_fork + at, mask=mask, other=0.0).to(tl.float32)
    if kept is not None:
        saved = tl.load(kept + at, mask=mask, other=0.0).to(tl.float32)
        z = saved if ACTIVATION == "relu" else z + saved
    return _through_activation(dz, z, ACTIVATION)
