"""Loads and stores of parameters, optimizer state and copies in all their storage formats.

Without SPLIT no parameter is split into words, without EIGHT no state is in 8 bits, so no branch waits for the format.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triaccel_ray.kernels import eight_bits
from triaccel_ray.kernels.multi_tensor_triton import BF16, FP16, FP32, INT16, UINT8, load_fp32

BLOCK = tl.constexpr(eight_bits.BLOCK)
BLOCK_BYTES = tl.constexpr(eight_bits.BLOCK_BYTES)
GROUP = tl.constexpr(eight_bits.GROUP)


@triton.jit
def itemsize(code):
    """Returns the bytes per element, fp32 or 16-bit."""
    return tl.where(code == FP32, 4, 2)


@triton.jit
def load_any(address, code, offsets, length, FULL: tl.constexpr):
    """Returns the elements as fp32; 16-bit ones are read 8 bytes at once, so that a thread gets the same four."""
    if code == FP32:
        values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    elif code == FP16:
        values = load_fp32(address, tl.float16, offsets, length, FULL, 8)
    else:
        values = load_fp32(address, tl.bfloat16, offsets, length, FULL, 8)
    return values


@triton.jit
def _store(address, dtype: tl.constexpr, values, offsets, length, FULL: tl.constexpr, ALIGN: tl.constexpr):
    """Writes the values as `dtype`; FULL and ALIGN as in `load_fp32`."""
    pointer = address.to(tl.pointer_type(dtype))
    if FULL:
        tl.store(tl.multiple_of(pointer, ALIGN) + offsets, values.to(dtype))
    else:
        tl.store(pointer + offsets, values.to(dtype), mask=offsets < length)


@triton.jit
def load_parameter(
    address, companion_at, companion_code, offsets, length, SPLIT: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Returns the parameter as fp32, joined from its words if it has low ones."""
    if SPLIT:
        if companion_code == INT16:
            high = _load_word(address, offsets, length, FULL)
            low = _load_word(companion_at, offsets, length, FULL)
            low = tl.where((high & 0x7FFF) == 0, tl.maximum(low, 0), low)
            values = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    else:
        values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    return values


@triton.jit
def store_parameter(
    address, companion_at, companion_code, values, offsets, length, SPLIT: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Writes the parameter and its copy, if it has one; as words if it has low ones (`split_words.split`)."""
    if SPLIT:
        if companion_code == INT16:
            bits = values.to(tl.int32, bitcast=True)
            high = tl.where(values == values, bits + 0x8000, bits) >> 16
            _store(address, tl.int16, high, offsets, length, FULL, 8)
            _store(companion_at, tl.int16, bits - (high << 16), offsets, length, FULL, 8)
        else:
            _store(address, tl.float32, values, offsets, length, FULL, 16)
            _store_copy(companion_at, companion_code, values, offsets, length, FULL)
    else:
        _store(address, tl.float32, values, offsets, length, FULL, 16)
        _store_copy(companion_at, companion_code, values, offsets, length, FULL)


@triton.jit
def begin(start, code, EIGHT: tl.constexpr):
    """Returns the byte offset of a chunk's state; the chunk begins at element `start`, a multiple of a block."""
    distance = start * 4
    if EIGHT:
        distance = tl.where(code == UINT8, start // BLOCK * BLOCK_BYTES, distance)
    return distance


@triton.jit
def load_state(address, code, offsets, length, SIGNED: tl.constexpr, EIGHT: tl.constexpr, FULL: tl.constexpr):
    """Returns the state as fp32, decoded if it is kept in 8 bits (`eight_bits.decode`)."""
    if EIGHT:
        if code == UINT8:
            inside = offsets < length
            codes = tl.load(address.to(tl.pointer_type(tl.uint8)) + offsets, mask=inside, other=0)
            scales = (address + BLOCK).to(tl.pointer_type(tl.float32)) + offsets // GROUP
            scale = tl.load(scales, mask=inside, other=0.0)
            if SIGNED:
                roots = codes.to(tl.int8, bitcast=True).to(tl.float32) / 127.0
                values = scale * (roots * tl.abs(roots))
            else:
                roots = codes.to(tl.float32) / 255.0
                values = scale * (roots * roots * (roots * roots))
        else:
            values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    else:
        values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    return values


@triton.jit
def store_state(
    address, code, values, first, offsets, length, start, count,
    SIGNED: tl.constexpr, EIGHT: tl.constexpr, FULL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the state, encoded if it is kept in 8 bits (`eight_bits.encode`)."""
    if EIGHT:
        if code == UINT8:
            inside = offsets < length
            groups = tl.reshape(tl.where(inside, values, 0.0), (SIZE // GROUP, GROUP))
            scale = tl.max(tl.abs(groups), axis=1)
            number = first // GROUP + tl.arange(0, SIZE // GROUP)
            scales = (address + BLOCK).to(tl.pointer_type(tl.float32))
            tl.store(scales + number, scale, mask=number * GROUP < length)
            divisor = tl.where(scale > 0.0, scale, 1.0)
            ratio = tl.reshape(tl.div_rn(groups, tl.broadcast_to(divisor[:, None], (SIZE // GROUP, GROUP))), (SIZE,))
            if SIGNED:
                root = 127.0 * tl.sqrt_rn(tl.abs(ratio))
                whole = tl.floor(root + 0.5)
                codes = tl.where(ratio < 0.0, -whole, whole).to(tl.int8).to(tl.uint8, bitcast=True)
            else:
                root = 255.0 * tl.sqrt_rn(tl.sqrt_rn(ratio)) + _dither(start.to(tl.int32) + offsets, count)
                whole = tl.minimum(tl.maximum(tl.floor(root), 1.0), 255.0)
                codes = tl.where(ratio > 0.0, whole, 0.0).to(tl.uint8)
            tl.store(address.to(tl.pointer_type(tl.uint8)) + offsets, codes, mask=inside)
        else:
            _store(address, tl.float32, values, offsets, length, FULL, 16)
    else:
        _store(address, tl.float32, values, offsets, length, FULL, 16)


@triton.jit
def _dither(places, count):
    """Returns numbers in [0, 1), hashed from each position and the step, as `eight_bits._dither` does."""
    mixed = places * -1640531535 + count * -2048144789
    mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) * 739982445
    mixed = (mixed ^ ((mixed >> 12) & 0xFFFFF)) * 695872825
    return ((mixed >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _load_word(address, offsets, length, FULL: tl.constexpr):
    """Returns 16-bit words as int32, sign-extended; FULL as in `load_fp32`."""
    pointer = address.to(tl.pointer_type(tl.int16))
    if FULL:
        words = tl.load(tl.multiple_of(pointer, 8) + offsets)
    else:
        words = tl.load(pointer + offsets, mask=offsets < length, other=0)
    return words.to(tl.int32)


@triton.jit
def _store_copy(address, code, values, offsets, length, FULL: tl.constexpr):
    """Writes the values in the copy's precision, if there is a copy."""
    if address != 0:
        if code == FP16:
            _store(address, tl.float16, values, offsets, length, FULL, 8)
        elif code == BF16:
            _store(address, tl.bfloat16, values, offsets, length, FULL, 8)
        else:
            _store(address, tl.float32, values, offsets, length, FULL, 16)
