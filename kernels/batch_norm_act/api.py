"""Entry points of fused batch normalization: the operation, and its recomputation in a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.kernels.batch_norm_act.reference import Activation, RunningStatistics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that the kernels read and write."""


def batch_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: RunningStatistics,
    *,
    eps: float,
    activation: Activation = "none",
    residual: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    forked: bool = False,
) -> Any:
    """Returns activation((x - mean) / sqrt(var + eps) weight + bias + residual), with batch mean and var.

    Ioffe and Szegedy 2015, in training mode: mean and biased variance per channel over batch and pixels. Arithmetic is
    float32 for all dtypes. Gradients flow to x, weight, bias and residual, each in its tensor's dtype; there is no
    double backward.

    Forward and backward are three launches each, without synchronization or floating-point atomics: equal inputs give
    equal bits, and a CUDA graph can capture them. The backward pass needs x, two numbers per channel and, with residual
    and activation, the output (ReLU) or the residual (other activations). None of them may change in place before it.

    Args:
        x: [n, c, h, w] with more than one value per channel, of `DTYPES`, in channels_last memory.
        weight: [c], floating point, as is `bias`.
        bias: [c].
        running: moving averages, updated in place.
        eps: added to the variance.
        activation: "none", "relu", "relu6", "silu" or "hardswish".
        residual: added before the activation; in x's shape and memory layout, of any of `DTYPES`.
        output_dtype: dtype of the result, one of `DTYPES`; None means x's.
        forked: whether to return the result twice, over the same memory, for two readers. The backward kernels add
            their gradients, as for a fork into a block and its residual connection. That costs a third read. Autograd
            would write the sum to memory and read it again. Neither result may be changed in place.

    Returns:
        [n, c, h, w], in the memory layout of x; a pair of them if forked.
    """
    from triaccel_ray.kernels.batch_norm_act.launch import Call, launch  # here: triton may be missing without a GPU

    dtype = output_dtype or x.dtype
    call = Call(running=running, eps=eps, activation=activation, output_dtype=dtype, forked=forked)
    return launch(call, x, weight, bias, residual)


def recomputer(y: Tensor) -> Callable[[], Tensor] | None:
    """Returns a function that recomputes `y`, an output of `batch_norm_act`, bit for bit and in one launch.

    Code that saves y for its backward pass can save this function instead. It holds only tensors that the backward pass
    of y needs anyway (compare In-Place Activated BatchNorm, Rota Bulò et al. 2018). Call it before that backward pass.

    Returns:
        A function without arguments; None if y was not computed by the kernels, includes a residual or is forked.
    """
    recompute = getattr(y.grad_fn, "recompute", None)
    return None if recompute is None else functools.partial(recompute, y.grad_fn)
