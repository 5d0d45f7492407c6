"""Runs depthwise convolutions with Triton kernels, which need no tuning for a new shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.fused_norm import is_kernel_input
from triaccel_ray.model.layers import is_depthwise

_LARGEST = 7
"""Largest filter size and stride that the kernels support; they unroll them."""
_MAX_NUMEL = 2**30
"""Largest number of elements of one image: kernels use 32-bit offsets from the first image of a tile."""


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward function of the module's type; for a depthwise convolution, one that may use the kernel."""
    is_customized = "_conv_forward" in module.__dict__
    if type(module) is nn.Conv2d and is_depthwise(module) and not is_customized:
        return _convolve
    return type(module).forward


def _convolve(module: Any, input: Any) -> Any:  # noqa: A002  # as PyTorch names it
    weight: Tensor = module.weight
    if torch.compiler.is_compiling() or not (_supports_settings(module) and _supports_input(module, input)):
        return nn.Conv2d.forward(module, input)
    from triaccel_ray.kernels.depthwise_conv.api import depthwise_conv  # Triton may be missing without a GPU

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return depthwise_conv(input.to(dtype), weight.to(dtype), stride=module.stride[0], padding=module.padding[0])


def _supports_settings(module: Any) -> bool:
    """Returns whether the kernel supports the settings of this convolution."""
    size, stride, padding = module.kernel_size, module.stride, module.padding
    is_square = all(isinstance(each, tuple) and len(set(each)) == 1 for each in (size, stride, padding))
    is_plain = module.bias is None and module.padding_mode == "zeros" and set(module.dilation) == {1}
    return is_plain and is_square and max(size[0], stride[0]) <= _LARGEST and padding[0] >= 0


def _supports_input(module: Any, x: Any) -> bool:
    """Returns whether the kernel can read x without a copy, and PyTorch would accept x."""
    weight = module.weight
    if not (is_kernel_input(x) and is_kernel_input(weight) and x.is_contiguous(memory_format=torch.channels_last)):
        return False  # PyTorch leaves other memory formats to kernels of its own
    filter_fits = 0 < min(x.shape[2:]) >= module.kernel_size[0] - 2 * module.padding[0]
    is_one_dtype = x.dtype == weight.dtype or torch.is_autocast_enabled("cuda")
    is_whole = x.shape[1] == module.in_channels and x.device == weight.device
    return bool(filter_fits and is_one_dtype and is_whole and x.shape[1:].numel() <= _MAX_NUMEL)
