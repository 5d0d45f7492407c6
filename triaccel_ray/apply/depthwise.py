"""Depthwise convolutions by a kernel of our own: cuDNN takes a second of preparation for each new shape of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.fused_norm import kernel_reads
from triaccel_ray.model.layers import is_depthwise

_LARGEST_SIZE = 7


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward function of a module's type, for a depthwise convolution one that uses the kernel."""
    return _convolve if is_depthwise(module) and _fits(module) else type(module).forward


def _fits(module: Any) -> bool:
    """Returns whether the kernel computes what this convolution does."""
    size, stride, padding = module.kernel_size, module.stride, module.padding
    is_square = all(isinstance(each, tuple) and len(set(each)) == 1 for each in (size, stride, padding))
    is_plain = type(module) is nn.Conv2d and module.bias is None and module.padding_mode == "zeros"
    return is_plain and is_square and size[0] <= _LARGEST_SIZE and set(module.dilation) == {1}


def _convolve(module: Any, x: Any) -> Any:
    weight: Tensor = module.weight
    if torch.compiler.is_compiling() or not _is_readable(module, x):
        return nn.Conv2d.forward(module, x)
    from triaccel_ray.kernels.depthwise_conv.launch import depthwise_conv  # without a GPU triton need not exist

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return depthwise_conv(x.to(dtype), weight.to(dtype), stride=module.stride[0], padding=module.padding[0])


def _is_readable(module: Any, x: Any) -> bool:
    """Returns whether the kernel reads x as it lies in memory, and PyTorch would not refuse it."""
    if not (kernel_reads(x) and x.is_contiguous(memory_format=torch.channels_last)):
        return False  # PyTorch leaves other memory formats to kernels of its own
    is_large = min(x.shape[2:]) + 2 * module.padding[0] >= module.kernel_size[0]
    return bool(is_large and x.shape[1] == module.in_channels and x.device == module.weight.device)
