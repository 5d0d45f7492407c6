"""Triton kernels of depthwise convolution, on channels_last images.

Sums are float32, in a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triaccel_ray.kernels.channels_last_triton import channel_block, wait

_RUNTIME = ["num_strips", "channel_units", "in_height", "in_width", "out_height", "out_width"]
"""Arguments that Triton must not specialize on: a new batch or image size must not cost a compilation."""


@triton.jit
def _strips_of(tile, per_line, height, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a tile's first image and, for each strip, its image relative to that one, its line and left column."""
    first, per_image = tile * BLOCK, height * per_line
    strip = first + tl.arange(0, BLOCK)
    within = strip % per_image
    return first // per_image, strip // per_image - first // per_image, within // per_line, within % per_line * WIDTH


@triton.jit
def _line_of(top, tap, height, TRANSPOSED: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    """Returns the line that row `tap` of the filter reads for output line `top`, and whether that line exists."""
    if TRANSPOSED:
        distance = top + PADDING - tap
        at = distance // STRIDE
        return at, (distance >= 0) & (at < height) & (at * STRIDE == distance)
    at = top * STRIDE + tap - PADDING
    return at, (at >= 0) & (at < height)


@triton.jit
def _appended(values, value):
    """Returns the tuple with the value appended."""
    return values + (value,)  # noqa: RUF005  # Triton does not unpack tuples


@triton.jit
def _plus_product(total, value, factors, INDEX: tl.constexpr, LENGTH: tl.constexpr):
    """Returns the total plus value times the factor at INDEX; the total alone if there is no such factor."""
    if INDEX >= 0 and INDEX < LENGTH:
        return total + value * factors[INDEX]
    return total


@triton.jit(do_not_specialize=_RUNTIME)
def convolve(
    x, taps, y, num_strips, channel_units, in_height, in_width, out_height, out_width,
    TRANSPOSED: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_STRIPS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes the convolution of x to y or, if `TRANSPOSED`, the input's gradient for the output's gradient x.

    Program (i, j) takes tile i of strips for block j of the channels. A strip is WIDTH outputs of a line. It reads
    columns FIRST to LAST - 1, relative to its own, once for each row of taps; taps are [SIZE * SIZE, C].
    """
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(1), channel_units, UNIT, BLOCK_CHANNELS)
    per_line = (out_width + WIDTH - 1) // WIDTH
    origin, image, top, left = _strips_of(tl.program_id(0), per_line, out_height, WIDTH, BLOCK_STRIPS)
    is_strip = tl.program_id(0) * BLOCK_STRIPS + tl.arange(0, BLOCK_STRIPS) < num_strips
    source = left // STRIDE if TRANSPOSED else left * STRIDE
    x += origin.to(tl.int64) * in_height * in_width * channels
    y += origin.to(tl.int64) * out_height * out_width * channels
    sums = ()
    for _ in tl.static_range(WIDTH):
        sums = _appended(sums, tl.zeros([BLOCK_STRIPS, BLOCK_CHANNELS], dtype=tl.float32))
    for i in range(SIZE):
        line, is_line = _line_of(top, i, in_height, TRANSPOSED, STRIDE, PADDING)
        at = ((image * in_height + line) * in_width + source) * channels
        factors = ()
        for j in tl.static_range(SIZE):
            factor = tl.load(taps + (i * SIZE + j) * channels + columns, mask=exists, other=0.0)
            factors = _appended(factors, factor.to(tl.float32)[None, :])
        for m in tl.static_range(FIRST, LAST):
            is_pixel = is_strip & is_line & (source + m >= 0) & (source + m < in_width)
            mask = is_pixel[:, None] & exists[None, :]
            value = tl.load(x + ((at + m * channels)[:, None] + columns[None, :]), mask=mask, other=0.0).to(tl.float32)
            added = ()
            for o in tl.static_range(WIDTH):
                if TRANSPOSED:
                    added = _appended(added, _plus_product(sums[o], value, factors, o + PADDING - m * STRIDE, SIZE))
                else:
                    added = _appended(added, _plus_product(sums[o], value, factors, m + PADDING - o * STRIDE, SIZE))
            sums = added
    at = ((image * out_height + top) * out_width + left) * channels
    for o in tl.static_range(WIDTH):
        mask = (is_strip & (left + o < out_width))[:, None] & exists[None, :]
        tl.store(y + ((at + o * channels)[:, None] + columns[None, :]), sums[o], mask=mask)


@triton.jit(do_not_specialize=_RUNTIME)
def weight_gradient(
    x, dy, partials, num_strips, channel_units, in_height, in_width, out_height, out_width,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
    UNIT: tl.constexpr, BLOCK_STRIPS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Writes each part's share of the weight's gradient to `partials`, fp32 [parts, SIZE * SIZE, C].

    Program (p, j) takes the taps of row p % SIZE and tiles p // SIZE, p // SIZE + parts, ... of strips as in `convolve`
    for block j of the channels. Programs for other rows read the same memory at the same time.
    """
    wait(EARLY)
    channels, columns, exists = channel_block(tl.program_id(1), channel_units, UNIT, BLOCK_CHANNELS)
    i, part, num_parts = tl.program_id(0) % SIZE, tl.program_id(0) // SIZE, tl.num_programs(0) // SIZE
    per_line = (out_width + WIDTH - 1) // WIDTH
    # Columns that no output reads are masked: an Inf there times the zeros beyond the last output would give NaN.
    read_width = tl.minimum(in_width, (out_width - 1) * STRIDE + SIZE - PADDING)
    sums = ()
    for _ in tl.static_range(SIZE):
        sums = _appended(sums, tl.zeros([BLOCK_STRIPS, BLOCK_CHANNELS], dtype=tl.float32))
    for tile in range(part, (num_strips + BLOCK_STRIPS - 1) // BLOCK_STRIPS, num_parts):
        origin, image, top, left = _strips_of(tile, per_line, out_height, WIDTH, BLOCK_STRIPS)
        is_strip = tile * BLOCK_STRIPS + tl.arange(0, BLOCK_STRIPS) < num_strips
        stride = channels.to(tl.int64)
        line, is_line = _line_of(top, i, in_height, False, STRIDE, PADDING)
        start = dy + origin * stride * out_height * out_width
        at = ((image * out_height + top) * out_width + left) * channels
        gradients = ()
        for o in tl.static_range(WIDTH):
            mask = (is_strip & (left + o < out_width))[:, None] & exists[None, :]
            gradient = tl.load(start + ((at + o * channels)[:, None] + columns[None, :]), mask=mask, other=0.0)
            gradients = _appended(gradients, gradient.to(tl.float32))
        start = x + origin * stride * in_height * in_width
        at = ((image * in_height + line) * in_width + left * STRIDE) * channels
        for m in tl.static_range(FIRST, LAST):
            is_pixel = is_strip & is_line & (left * STRIDE + m >= 0) & (left * STRIDE + m < read_width)
            mask = is_pixel[:, None] & exists[None, :]
            value = tl.load(start + ((at + m * channels)[:, None] + columns[None, :]), mask=mask, other=0.0)
            added = ()
            for j in tl.static_range(SIZE):
                if (m + PADDING - j) % STRIDE == 0:
                    total = _plus_product(sums[j], value.to(tl.float32), gradients, (m + PADDING - j) // STRIDE, WIDTH)
                    added = _appended(added, total)
                else:
                    added = _appended(added, sums[j])
            sums = added
    out = partials + (part * SIZE + i).to(tl.int64) * SIZE * channels + columns
    for j in tl.static_range(SIZE):
        tl.store(out + j * channels, tl.sum(sums[j], axis=0), mask=exists)
