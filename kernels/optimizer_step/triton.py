"""Optimizer steps over all tensors of a model, one launch each (AdamW: a second, tiny one that counts steps)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from triaccel_ray.kernels import eight_bits
from triaccel_ray.kernels.multi_tensor import Chunks, TensorTable, on_device
from triaccel_ray.kernels.multi_tensor_triton import INT16
from triaccel_ray.kernels.optimizer_step.reference import Scalars
from triaccel_ray.kernels.optimizer_step.storage_triton import (
    begin,
    itemsize,
    load_any,
    load_parameter,
    load_state,
    store_parameter,
    store_state,
)

# Fastest of 512 to 8192 elements and 2 to 16 warps on an H200.
CHUNK_SIZE = eight_bits.BLOCK
NUM_WARPS = 4
PIECE = 512
"""Elements at a time if a chunk is short or not 16-byte aligned: few, so that the mask needs no more registers."""
_SCALARS = ["lr_factor_at", "loss_scale_at", "found_at"]


def launch_sgd(chunks: Chunks, tables: Sequence[TensorTable], *, rows: Tensor, by: Scalars) -> None:
    """Launches the kernel of `reference.sgd`; `tables` are in the order of its arguments."""
    parameters, gradients, momenta, companions = tables
    with on_device(rows.device):
        _sgd_kernel[(chunks.num_chunks,)](
            chunks.tensor, chunks.start, chunks.length, parameters.addresses, gradients.addresses, gradients.codes,
            momenta.addresses, momenta.codes, companions.addresses, companions.codes,
            rows, by.lr_factor, by.loss_scale, by.found_nonfinite, parameters.num_tensors,
            CHUNK=chunks.chunk_size, PIECE=PIECE, SPLIT=torch.int16 in companions.dtypes,
            EIGHT=torch.uint8 in momenta.dtypes, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def launch_adamw(
    chunks: Chunks, tables: Sequence[TensorTable], *, rows: Tensor, corrections: Tensor, by: Scalars
) -> None:
    """Launches the kernels of `reference.adamw` likewise; `corrections` [2, num_tensors] is scratch memory."""
    parameters, gradients, means, squares, steps, companions = tables
    with on_device(rows.device):
        # Counting is a launch of its own, since all programs of a tensor read the count, in any order.
        _count_kernel[(triton.cdiv(parameters.num_tensors, 128),)](
            parameters.addresses, gradients.addresses, steps.addresses, rows, corrections,
            by.found_nonfinite, parameters.num_tensors, BLOCK=128, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
        _adamw_kernel[(chunks.num_chunks,)](
            chunks.tensor, chunks.start, chunks.length, parameters.addresses, gradients.addresses, gradients.codes,
            means.addresses, means.codes, squares.addresses, steps.addresses, companions.addresses, companions.codes,
            rows, corrections, by.lr_factor, by.loss_scale, by.found_nonfinite, parameters.num_tensors,
            CHUNK=chunks.chunk_size, PIECE=PIECE, SPLIT=torch.int16 in companions.dtypes,
            EIGHT=torch.uint8 in means.dtypes, num_warps=NUM_WARPS, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_SCALARS)
def _sgd_kernel(
    chunk_tensor, chunk_start, chunk_length, parameters, gradients, gradient_codes,
    momenta, momentum_codes, companions, companion_codes,
    rows, lr_factor_at, loss_scale_at, found_at, num_tensors,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr, EIGHT: tl.constexpr,
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
    momentum_code = 0
    if EIGHT:
        momentum_code = tl.load(momentum_codes + tensor)
    rows += tensor
    lr = tl.load(rows) * tl.load(lr_factor_at)
    weight_decay = tl.load(rows + num_tensors)
    momentum = tl.load(rows + num_tensors * 2)
    nesterov = tl.load(rows + num_tensors * 3)
    unscale = 1.0 / tl.load(loss_scale_at)
    if (tl.load(found_at) == 0.0) & (parameter != 0) & (gradient != 0):
        aligned = (parameter | gradient | momentum_buffer | companion) % 16 == 0
        parameter += start * tl.where(companion_code == INT16, 2, 4)
        gradient += start * itemsize(gradient_code)
        companion = tl.where(companion == 0, companion, companion + start * itemsize(companion_code))
        momentum = tl.where(momentum_buffer == 0, 0.0, momentum)
        momentum_buffer = tl.where(
            momentum_buffer == 0, momentum_buffer, momentum_buffer + begin(start, momentum_code, EIGHT)
        )
        if aligned & (length == CHUNK):
            _sgd(
                parameter, gradient, gradient_code, momentum_buffer, momentum_code, companion, companion_code, 0,
                length, lr, weight_decay, momentum, nesterov, unscale, CHUNK, SPLIT, EIGHT, True,
            )  # fmt: skip
        else:
            for first in range(0, length, PIECE):
                _sgd(
                    parameter, gradient, gradient_code, momentum_buffer, momentum_code, companion, companion_code,
                    first, length, lr, weight_decay, momentum, nesterov, unscale, PIECE, SPLIT, EIGHT, False,
                )  # fmt: skip


@triton.jit
def _sgd(
    parameter_at, gradient_at, gradient_code, momentum_at, momentum_code, companion_at, companion_code, first, length,
    lr, weight_decay, momentum, nesterov, unscale, SIZE: tl.constexpr, SPLIT: tl.constexpr, EIGHT: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Steps SIZE elements from `first` on; FULL as in `load_fp32`, SPLIT and EIGHT as in `storage_triton`."""
    offsets = first + tl.arange(0, SIZE)
    parameter = load_parameter(parameter_at, companion_at, companion_code, offsets, length, SPLIT, FULL)
    # Gradients are loaded last: 16-bit ones are widened in a branch, which waits for them.
    buffer = tl.zeros((SIZE,), tl.float32)
    if momentum_at != 0:
        buffer = load_state(momentum_at, momentum_code, offsets, length, True, EIGHT, FULL)
    gradient = load_any(gradient_at, gradient_code, offsets, length, FULL)
    gradient = gradient * unscale + weight_decay * parameter
    buffer = momentum * buffer + gradient
    if momentum_at != 0:
        store_state(momentum_at, momentum_code, buffer, first, offsets, length, 0, 0, True, EIGHT, FULL, SIZE)
    parameter -= lr * tl.where(nesterov != 0.0, gradient + momentum * buffer, buffer)
    store_parameter(parameter_at, companion_at, companion_code, parameter, offsets, length, SPLIT, FULL)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["found_at"])
def _count_kernel(parameters, gradients, steps, rows, corrections, found_at, num_tensors, BLOCK: tl.constexpr):
    """Adds 1 to the step count of each tensor that has a gradient, unless the step is skipped.

    `corrections` [2, num_tensors] receives 1 / (1 - beta1^count) and the square root of 1 / (1 - beta2^count), fp32.
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
        # fp64: in the first steps, 1 - beta^count cancels most digits.
        log_beta1 = tl.load(rows + num_tensors * 4 + lanes, mask=inside, other=0.0)
        log_beta2 = tl.load(rows + num_tensors * 7 + lanes, mask=inside, other=0.0)
        rest1 = 1.0 - tl.exp(count.to(tl.float64) * log_beta1)
        rest2 = 1.0 - tl.exp(count.to(tl.float64) * log_beta2)
        tl.store(corrections + lanes, (1.0 / rest1).to(tl.float32), mask=counts)
        tl.store(corrections + num_tensors + lanes, tl.sqrt(1.0 / rest2).to(tl.float32), mask=counts)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_SCALARS)
def _adamw_kernel(
    chunk_tensor, chunk_start, chunk_length, parameters, gradients, gradient_codes, means, mean_codes, squares, steps,
    companions, companion_codes, rows, corrections, lr_factor_at, loss_scale_at, found_at, num_tensors,
    CHUNK: tl.constexpr, PIECE: tl.constexpr, SPLIT: tl.constexpr, EIGHT: tl.constexpr,
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
        gradient += start * itemsize(gradient_code)
        state_code = 0
        count = 0
        if EIGHT:
            state_code = tl.load(mean_codes + tensor)
            count = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32))).to(tl.int32)
        mean += begin(start, state_code, EIGHT)
        square += begin(start, state_code, EIGHT)
        companion = tl.where(companion == 0, companion, companion + start * itemsize(companion_code))
        rows += tensor
        corrections += tensor
        lr = tl.load(rows) * tl.load(lr_factor_at)
        if aligned & (length == CHUNK):
            _adamw(
                parameter, gradient, gradient_code, mean, square, state_code, start, count, companion,
                companion_code, 0, length, lr, unscale, rows, corrections, num_tensors, CHUNK, SPLIT, EIGHT, True,
            )  # fmt: skip
        else:
            for first in range(0, length, PIECE):
                _adamw(
                    parameter, gradient, gradient_code, mean, square, state_code, start, count, companion,
                    companion_code, first, length, lr, unscale, rows, corrections, num_tensors,
                    PIECE, SPLIT, EIGHT, False,
                )  # fmt: skip


@triton.jit
def _adamw(
    parameter_at, gradient_at, gradient_code, mean_at, square_at, state_code, start, count, companion_at,
    companion_code, first, length, lr, unscale, rows, corrections, num_tensors,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, EIGHT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Steps SIZE elements from `first` on; FULL as in `load_fp32`, SPLIT and EIGHT as in `storage_triton`."""
    offsets = first + tl.arange(0, SIZE)
    parameter = load_parameter(parameter_at, companion_at, companion_code, offsets, length, SPLIT, FULL)
    mean = load_state(mean_at, state_code, offsets, length, True, EIGHT, FULL)
    square = load_state(square_at, state_code, offsets, length, False, EIGHT, FULL)
    gradient = load_any(gradient_at, gradient_code, offsets, length, FULL)
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
    store_state(mean_at, state_code, mean, first, offsets, length, start, count, True, EIGHT, FULL, SIZE)
    store_state(square_at, state_code, square, first, offsets, length, start, count, False, EIGHT, FULL, SIZE)
    store_parameter(parameter_at, companion_at, companion_code, parameter, offsets, length, SPLIT, FULL)
