"""Depthwise convolution as a differentiable function that launches the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triaccel_ray.kernels.channels_last import block_channels, ceil_div, common_arguments, num_multiprocessors
from triaccel_ray.kernels.depthwise_conv import triton as kernels

# Measured on an H200 over the shapes of EfficientNet-B0. Outputs of a strip share loads, but each takes registers; the
# weight's gradient also keeps a sum per tap in registers.
_WIDTH, _WEIGHT_WIDTH = 8, 4
"""Outputs per strip, in `convolve` and in `weight_gradient`."""
_TILE = 1024
"""Strips times channels that a program processes at a time: one vector of channels per thread."""
_PROGRAMS_PER_MULTIPROCESSOR = 4
"""Of `weight_gradient`, each of whose programs takes several tiles."""


def depthwise_conv(x: Tensor, weight: Tensor, *, stride: int, padding: int) -> Tensor:
    """Returns each channel of x convolved with its own filter: [n, c, h', w'], channels_last, x's dtype.

    The first call for a new shape does no autotuning.

    Args:
        x: [n, c, h, w], float32, float16 or bfloat16; copied unless its memory is channels_last.
        weight: [c, 1, k, k] in x's dtype, k at most 7.
        stride: same in both directions.
        padding: zeros on each side of both directions; at least one filter must fit.
    """
    y: Tensor = _DepthwiseConv.apply(x.contiguous(memory_format=torch.channels_last), weight, stride, padding)
    return y


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        taps = weight.flatten(1).t().contiguous()
        ctx.save_for_backward(x, weight, taps)
        ctx.stride, ctx.padding = stride, padding
        sizes = [(size + 2 * padding - weight.shape[-1]) // stride + 1 for size in x.shape[2:]]
        y = torch.empty(*x.shape[:2], *sizes, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        _convolve(x, taps, y, weight, stride, padding, transposed=False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, taps = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: only PyTorch's gradients are differentiable
            both = [[size] * 2 for size in (ctx.stride, ctx.padding, 1, 0)]
            stride, padding, dilation, output_padding = both
            dx, dweight, _ = torch.ops.aten.convolution_backward(
                dy, x, weight, None, stride, padding, dilation, False, output_padding, len(weight),
                [*ctx.needs_input_grad[:2], False],
            )  # fmt: skip
            return dx, dweight, None, None
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            _convolve(dy, taps, dx, weight, ctx.stride, ctx.padding, transposed=True)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(x, dy, weight, ctx.stride, ctx.padding)
        return dx, dweight, None, None


def _convolve(
    x: Tensor, taps: Tensor, y: Tensor, weight: Tensor, stride: int, padding: int, *, transposed: bool
) -> None:
    """Writes the convolution of x to y or, if `transposed`, the input's gradient for the output's gradient x."""
    block, size = block_channels(y), weight.shape[-1]
    width = ceil_div(_WIDTH, stride) * stride if transposed else _WIDTH
    if transposed:  # for output o, tap j reads column m = (o + padding - j) / stride, relative to the strip's
        first, last = -((size - 1 - padding) // stride), (width - 1 + padding) // stride
    else:  # m = o stride + j - padding
        first, last = -padding, (width - 1) * stride + size - 1 - padding
    num_strips = _num_strips(y, width)
    grid = ceil_div(num_strips, _TILE // block), ceil_div(y.shape[1], block)
    if num_strips:
        _start(
            kernels.convolve, grid, (x, taps, y), x, y, num_strips, TRANSPOSED=transposed, SIZE=size, STRIDE=stride,
            PADDING=padding, FIRST=first, LAST=last + 1, WIDTH=width, BLOCK_STRIPS=_TILE // block, BLOCK_CHANNELS=block,
        )  # fmt: skip


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Returns the weight's gradient, [c, 1, k, k] in its dtype."""
    num_channels, size = len(weight), weight.shape[-1]
    block, num_strips = block_channels(dy), _num_strips(dy, _WEIGHT_WIDTH)
    num_blocks = ceil_div(num_channels, block)
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(x.device) // (num_blocks * size)
    num_parts = min(max(wanted, 1), ceil_div(num_strips, _TILE // block))
    partials = torch.empty(num_parts, size * size, num_channels, dtype=torch.float32, device=x.device)
    if num_parts:
        _start(
            kernels.weight_gradient, (num_parts * size, num_blocks), (x, dy, partials), x, dy, num_strips, SIZE=size,
            STRIDE=stride, PADDING=padding, FIRST=-padding, LAST=(_WEIGHT_WIDTH - 1) * stride + size - padding,
            WIDTH=_WEIGHT_WIDTH, BLOCK_STRIPS=_TILE // block, BLOCK_CHANNELS=block,
        )  # fmt: skip
    return torch.empty_like(weight).copy_(partials.sum(0).t().view(weight.shape))


def _num_strips(y: Tensor, width: int) -> int:
    return len(y) * y.shape[2] * ceil_div(y.shape[3], width)


def _start(
    kernel: Any, grid: tuple[int, int], tensors: tuple[Tensor, ...], source: Tensor, target: Tensor, num_strips: int,
    **constants: Any,
) -> None:  # fmt: skip
    """Launches a kernel over strips of `target` that reads pixels of `source`."""
    with torch.cuda.device_of(source):  # triton launches on the current device, not on that of the tensors
        kernel[grid](
            *tensors,
            num_strips=num_strips,
            in_height=source.shape[2],
            in_width=source.shape[3],
            out_height=target.shape[2],
            out_width=target.shape[3],
            num_warps=4,
            **common_arguments(source),
            **constants,
        )
