"""Optimizer steps over all tensors of a model, one launch each (AdamW: a second, tiny one that counts)."""

# ruff: noqa: N803  constants of a compilation are written in capitals, as everywhere in Triton
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# (Triton ships no types, and compiles no annotation but its own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from triaccel_ray.kernels.multi_tensor import Chunks, TensorTable, on_device
from triaccel_ray.kernels.multi_tensor_triton import BF16, FP16, FP32, INT16, load_fp32
from triaccel_ray.kernels.optimizer_step.reference import Scalars

# Fastest of 512 to 8192 elements and 2 to 16 warps on an H200.
CHUNK_SIZE = 1024
NUM_WARPS = 4
PIECE = 512
"""Elements at once where a chunk ends early or begins at an odd address: few, to need no more registers."""
_SCALARS = ["lr_factor_at", "loss_scale_at", "found_at"]


def launch_sgd(
    chunks: Chunks,
    parameters: TensorTable,
    gradients: TensorTable,
    momenta: TensorTable,
    companions: TensorTable,
    *,
    rows: Tensor,
    by: Scalars,
) -> None:
    """Launches `reference.sgd` on the tensors that the tables name."""
    with on_device(rows.device):
        _sgd_kernel[(chunks.num_chunks,)](
            chunks.tensor, chunks.start, chunks.length, parameters.addresses, gradients.addresses, gradients.codes,
            momenta.addresses, companions.addresses, companions.codes,
            rows, by.lr_factor, by.loss_scale, by.found_nonfinite, parameters.num_tensors,
            CHUNK=chunks.chunk_size, PIECE=PIECE, SPLIT=torch.int16 in companions.dtypes,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def launch_adamw(
    chunks: Chunks,
    parameters: TensorTable,
    gradients: TensorTable,
    means: TensorTable,
    squares: TensorTable,
    steps: TensorTable,
    companions: TensorTable,
    *,
    rows: Tensor,
    corrections: Tensor,
    by: Scalars,
) -> None:
    """Launches `reference.adamw` on the tensors that the tables name; `corrections` [2, num_tensors] is scratch."""
    with on_device(rows.device):
        # Counted in a launch of its own: programs of one tensor all read the count, in any order.
        _count_kernel[(triton.cdiv(parameters.num_tensors, 128),)](
            parameters.addresses, gradients.addresses, steps.addresses, rows, corrections,
            by.found_nonfinite, parameters.num_tensors, BLOCK=128, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        _adamw_kernel[(chunks.num_chunks,)](
            chunks.tensor, chunks.start, chunks.length, parameters.addresses, gradients.addresses, gradients.codes,
            means.addresses, squares.addresses, steps.addresses, companions.addresses, companions.codes,
            rows, corrections, by.lr_factor, by.loss_scale, by.found_nonfinite, parameters.num_tensors,
            CHUNK=chunks.chunk_size, PIECE=PIECE, SPLIT=torch.int16 in companions.dtypes,
            num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_SCALARS)
def _sgd_kernel(
    chunk_tensor, chunk_start, chunk_length, parameters, gradients, gradient_codes,
    momenta, companions, companion_codes,
    rows, lr_factor_at, loss_scale_at, found_at, num_tensors,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = tl.load(chunk_start + chunk)
    length = tl.load(chunk_length + chunk)
    parameter = tl.load(parameters + tensor)
    gradient = tl.load(gradients + tensor)
    momentum_buffer = tl.load(momenta + tensor)
    companion = tl.load(companions + tensor)
    gradient_code = tl.load(gradient_codes + tensor)
    companion_code = tl.load(companion_codes + tensor)
    rows += tensor
    lr = tl.load(rows) * tl.load(lr_factor_at)
    weight_decay = tl.load(rows + num_tensors)
    momentum = tl.load(rows + num_tensors * 2)
    nesterov = tl.load(rows + num_tensors * 3)
    unscale = 1.0 / tl.load(loss_scale_at)
    if (tl.load(found_at) == 0.0) & (parameter != 0) & (gradient != 0):
        aligned = (parameter | gradient | momentum_buffer | companion) % 16 == 0
        parameter += start * tl.where(companion_code == INT16, 2, 4)
        gradient += start * _itemsize(gradient_code)
        companion = tl.where(companion == 0, companion, companion + start * _itemsize(companion_code))
        momentum = tl.where(momentum_buffer == 0, 0.0, momentum)
        momentum_buffer = tl.where(momentum_buffer == 0, momentum_buffer, momentum_buffer + start * 4)
        if aligned & (length == CHUNK):
            _sgd(
                parameter, gradient, gradient_code, momentum_buffer, companion, companion_code, 0, length,
                lr, weight_decay, momentum, nesterov, unscale, CHUNK, SPLIT, True,
            )  # fmt: skip
        else:
            for first in range(0, length, PIECE):
                _sgd(
                    parameter, gradient, gradient_code, momentum_buffer, companion, companion_code, first, length,
                    lr, weight_decay, momentum, nesterov, unscale, PIECE, SPLIT, False,
                )  # fmt: skip


@triton.jit
def _sgd(
    parameter_at, gradient_at, gradient_code, momentum_at, companion_at, companion_code, first, length,
    lr, weight_decay, momentum, nesterov, unscale, SIZE: tl.constexpr, SPLIT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps SIZE elements from `first` on, SPLIT promising that none are words if not; FULL as in `load_fp32`."""
    offsets = first + tl.arange(0, SIZE)
    parameter = _load_parameter(parameter_at, companion_at, companion_code, offsets, length, SPLIT, FULL)
    # Gradients last: 16-bit ones are widened in a branch, which waits for them.
    buffer = tl.zeros((SIZE,), tl.float32)
    if momentum_at != 0:
        buffer = load_fp32(momentum_at, tl.float32, offsets, length, FULL, 16)
    gradient = _load_any(gradient_at, gradient_code, offsets, length, FULL)
    gradient = gradient * unscale + weight_decay * parameter
    buffer = momentum * buffer + gradient
    if momentum_at != 0:
        _store(momentum_at, tl.float32, buffer, offsets, length, FULL, 16)
    parameter -= lr * tl.where(nesterov != 0.0, gradient + momentum * buffer, buffer)
    _store_parameter(parameter_at, companion_at, companion_code, parameter, offsets, length, SPLIT, FULL)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["found_at"])
def _count_kernel(parameters, gradients, steps, rows, corrections, found_at, num_tensors, BLOCK: tl.constexpr):
    """Adds 1 to the step count of each tensor that has a gradient, unless the step is skipped.

    `corrections` [2, num_tensors] receives 1 / (1 - beta1^count) and the root of 1 / (1 - beta2^count), fp32.
    """
    if tl.load(found_at) == 0.0:
        lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = lanes < num_tensors
        parameter = tl.load(parameters + lanes, mask=inside, other=0)
        gradient = tl.load(gradients + lanes, mask=inside, other=0)
        step = tl.load(steps + lanes, mask=inside, other=0)
        counts = (parameter != 0) & (gradient != 0) & (step != 0)
        pointers = step.to(tl.pointer_type(tl.float32))
        count = tl.load(pointers, mask=counts, other=0.0) + 1.0
        tl.store(pointers, count, mask=counts)
        # fp64: at the first steps little is left of 1.
        log_beta1 = tl.load(rows + num_tensors * 4 + lanes, mask=inside, other=0.0)
        log_beta2 = tl.load(rows + num_tensors * 7 + lanes, mask=inside, other=0.0)
        rest1 = 1.0 - tl.exp(count.to(tl.float64) * log_beta1)
        rest2 = 1.0 - tl.exp(count.to(tl.float64) * log_beta2)
        tl.store(corrections + lanes, (1.0 / rest1).to(tl.float32), mask=counts)
        tl.store(corrections + num_tensors + lanes, tl.sqrt(1.0 / rest2).to(tl.float32), mask=counts)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_SCALARS)
def _adamw_kernel(
    chunk_tensor, chunk_start, chunk_length, parameters, gradients, gradient_codes, means, squares, steps,
    companions, companion_codes, rows, corrections, lr_factor_at, loss_scale_at, found_at, num_tensors,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tensor = tl.load(chunk_tensor + chunk)
    start = tl.load(chunk_start + chunk)
    length = tl.load(chunk_length + chunk)
    parameter = tl.load(parameters + tensor)
    gradient = tl.load(gradients + tensor)
    mean = tl.load(means + tensor)
    square = tl.load(squares + tensor)
    companion = tl.load(companions + tensor)
    gradient_code = tl.load(gradient_codes + tensor)
    companion_code = tl.load(companion_codes + tensor)
    unscale = 1.0 / tl.load(loss_scale_at)
    present = (parameter != 0) & (gradient != 0) & (mean != 0) & (square != 0) & (tl.load(steps + tensor) != 0)
    if (tl.load(found_at) == 0.0) & present:
        aligned = (parameter | gradient | mean | square | companion) % 16 == 0
        parameter += start * tl.where(companion_code == INT16, 2, 4)
        gradient += start * _itemsize(gradient_code)
        mean += start * 4
        square += start * 4
        companion = tl.where(companion == 0, companion, companion + start * _itemsize(companion_code))
        rows += tensor
        corrections += tensor
        lr = tl.load(rows) * tl.load(lr_factor_at)
        if aligned & (length == CHUNK):
            _adamw(
                parameter, gradient, gradient_code, mean, square, companion, companion_code, 0, length,
                lr, unscale, rows, corrections, num_tensors, CHUNK, SPLIT, True,
            )  # fmt: skip
        else:
            for first in range(0, length, PIECE):
                _adamw(
                    parameter, gradient, gradient_code, mean, square, companion, companion_code, first, length,
                    lr, unscale, rows, corrections, num_tensors, PIECE, SPLIT, False,
                )  # fmt: skip


@triton.jit
def _adamw(
    parameter_at, gradient_at, gradient_code, mean_at, square_at, companion_at, companion_code, first, length,
    lr, unscale, rows, corrections, num_tensors, SIZE: tl.constexpr, SPLIT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps SIZE elements from `first` on, SPLIT promising that none are words if not; FULL as in `load_fp32`."""
    offsets = first + tl.arange(0, SIZE)
    parameter = _load_parameter(parameter_at, companion_at, companion_code, offsets, length, SPLIT, FULL)
    mean = load_fp32(mean_at, tl.float32, offsets, length, FULL, 16)
    square = load_fp32(square_at, tl.float32, offsets, length, FULL, 16)
    gradient = _load_any(gradient_at, gradient_code, offsets, length, FULL)
    weight_decay = tl.load(rows + num_tensors)
    rate1 = tl.load(rows + num_tensors * 3)
    beta2 = tl.load(rows + num_tensors * 5)
    rate2 = tl.load(rows + num_tensors * 6)
    eps = tl.load(rows + num_tensors * 8)
    decoupled = tl.load(rows + num_tensors * 9) != 0.0
    step_size = lr * tl.load(corrections)
    root_correction = tl.load(corrections + num_tensors)
    gradient = gradient * unscale + tl.where(decoupled, 0.0, weight_decay) * parameter
    parameter *= 1.0 - tl.where(decoupled, lr * weight_decay, 0.0)
    mean += (gradient - mean) * rate1
    square = square * beta2 + rate2 * (gradient * gradient)
    denominator = tl.sqrt_rn(square) * root_correction + eps
    parameter -= tl.div_rn(step_size * mean, denominator)
    _store(mean_at, tl.float32, mean, offsets, length, FULL, 16)
    _store(square_at, tl.float32, square, offsets, length, FULL, 16)
    _store_parameter(parameter_at, companion_at, companion_code, parameter, offsets, length, SPLIT, FULL)


@triton.jit
def _itemsize(code):
    """Returns the bytes of an element."""
    return tl.where(code == FP32, 4, 2)


@triton.jit
def _load_any(address, code, offsets, length, FULL: tl.constexpr):
    """Returns the elements as fp32; 16-bit ones are read 8 bytes at once, so that a thread holds the same four."""
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
def _load_parameter(
    address, companion_at, companion_code, offsets, length, SPLIT: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Returns the parameter as fp32, of its words if it has low ones; without SPLIT none has: no branch waits."""
    if SPLIT:
        if companion_code == INT16:
            high = _load_word(address, offsets, length, FULL)
            low = _load_word(companion_at, offsets, length, FULL)
            values = ((high << 16) + low).to(tl.float32, bitcast=True)
        else:
            values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    else:
        values = load_fp32(address, tl.float32, offsets, length, FULL, 16)
    return values


@triton.jit
def _store_parameter(
    address, companion_at, companion_code, values, offsets, length, SPLIT: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Writes the parameter, and its copy if it has one; as words where it has low ones (`split_words.split`)."""
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
def _load_word(address, offsets, length, FULL: tl.constexpr):
    """Returns words of 16 bits as int32, their sign extended; FULL as in `load_fp32`."""
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
