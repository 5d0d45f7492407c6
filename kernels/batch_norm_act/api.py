"""The operation's entries: what it computes, and of what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.kernels.batch_norm_act.reference import Activation, RunningStatistics

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels read and write."""


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
    """Returns activation((x - mean) / sqrt(var + eps) weight + bias + residual), mean and var those of this batch.

    Ioffe and Szegedy 2015, in training mode: mean and biased variance per channel over batch and pixels. Arithmetic is
    float32 whatever the dtypes. Gradients flow to x, weight, bias and residual, each in its tensor's dtype, once
    (no double backward).

    Forward and backward are three launches each, without synchronisation or floating-point atomics: equal
    inputs give equal bits, and a CUDA graph may hold them. Kept for the backward pass are x, two numbers a channel and,
    with residual and activation, the output (ReLU) or the residual (other activations): none of them may change in
    place before it.

    Args:
        x: [n, c, h, w] with more than one value per channel, of `DTYPES`, in channels_last memory.
        weight: [c], floating point, as is `bias`.
        bias: [c].
        running: moving averages, updated in place.
        eps: added to the variance.
        activation: "none", "relu", "relu6", "silu" or "hardswish".
        residual: added before the activation; x's shape and memory layout, a dtype of its own among `DTYPES`.
        output_dtype: of the result, one of `DTYPES`; None for x's.
        forked: the result is returned twice, over the same memory, for two readers. Their gradients are added inside
            the backward kernels, where autograd would write their sum to memory and read it again: a fork into a block
            and its residual connection costs a third read instead. Neither may be changed in place.

    Returns:
        [n, c, h, w], in the memory layout of x; a pair of them where forked.
    """
    from triaccel_ray.kernels.batch_norm_act.launch import Call, launch  # here: without a GPU triton need not exist

    dtype = output_dtype or x.dtype
    call = Call(running=running, eps=eps, activation=activation, output_dtype=dtype, forked=forked)
    return launch(call, x, weight, bias, residual)


def recomputer(y: Tensor) -> Callable[[], Tensor] | None:
    """Returns what computes `y`, an output of `batch_norm_act`, once more, bit for bit and in one launch.

    Whoever keeps y for a backward pass may keep this in its place: it holds on to nothing that the backward pass of y
    does not need anyway (compare In-Place Activated BatchNorm, Rota Bulò et al. 2018). To be called before that.

    Returns:
        A function without arguments; None where y was not computed by the kernels, has a residual in it or is forked.
    """
    recompute = getattr(y.grad_fn, "recompute", None)
    return None if recompute is None else functools.partial(recompute, y.grad_fn)
