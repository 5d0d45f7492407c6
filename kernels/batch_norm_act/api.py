"""The operation's entries: they check the arguments and choose between the kernels and the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.kernels.batch_norm_act.reference import ACTIVATIONS, Activation, RunningStatistics
from triaccel_ray.kernels.batch_norm_act.reference import batch_norm_act as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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

    On a GPU, forward and backward are three launches each, without synchronisation or floating-point atomics: equal
    inputs give equal bits, and a CUDA graph may hold them. Kept for the backward pass are x, two numbers a channel and,
    with residual and activation, the output (ReLU) or the residual (other activations): none of them may change in
    place before it.

    Args:
        x: [n, c, h, w], float32, float16 or bfloat16; channels_last memory on a GPU.
        weight: [c], floating point, as is `bias`.
        bias: [c].
        running: moving averages, updated in place.
        eps: added to the variance.
        activation: "none", "relu", "relu6", "silu" or "hardswish".
        residual: added before the activation; x's shape and memory layout, a dtype of its own.
        output_dtype: of the result: float32, float16 or bfloat16; None for x's.
        forked: the result is returned twice, over the same memory, for two readers. Their gradients are added inside
            the backward kernels, where autograd would write their sum to memory and read it again: a fork into a block
            and its residual connection costs a third read instead. Neither may be changed in place.

    Returns:
        [n, c, h, w], in the memory layout of x; a pair of them where forked.

    Raises:
        TypeError: a dtype is none of the above.
        ValueError: a shape, device or memory layout is not as above, there is one value per channel or none, or the
            activation is unknown.
    """
    dtype = _checked(x, weight, bias, residual, output_dtype, activation)
    if not x.is_cuda:
        y = reference(x, weight, bias, running, eps=eps, activation=activation, residual=residual, output_dtype=dtype)
        return (y, y) if forked else y
    from triaccel_ray.kernels.batch_norm_act.launch import Call, launch  # here: without a GPU triton need not exist

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


def _checked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    output_dtype: torch.dtype | None,
    activation: Activation,
) -> torch.dtype:
    """Returns the dtype of the result."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: must be one of {', '.join(ACTIVATIONS)}")
    if x.dim() != 4 or x.numel() <= x.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)}: must be [n, c, h, w] with more than one value per channel")
    dtype = output_dtype or x.dtype
    supported = DTYPES if x.is_cuda else (*DTYPES, torch.float64)
    for name, found in (
        ("x", x.dtype),
        ("output_dtype", dtype),
        ("residual", (x if residual is None else residual).dtype),
    ):
        if found not in supported:
            raise TypeError(f"{name} is {found}: must be one of {', '.join(map(str, supported))}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter.shape != x.shape[1:2] or parameter.device != x.device:
            shape = list(parameter.shape)
            raise ValueError(f"{name} is {shape} on {parameter.device}: must be [{x.shape[1]}] on {x.device}")
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        shape = list(residual.shape)
        raise ValueError(f"residual is {shape} on {residual.device}: must be {list(x.shape)} on {x.device}")
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor is not None and x.is_cuda and not tensor.is_contiguous(memory_format=torch.channels_last):
            raise ValueError(f"{name} has strides {tensor.stride()}: must be contiguous in channels_last memory")
    return dtype
