"""Linear layers that multiply in FP8, each tensor scaled by its largest value (Micikevicius et al. 2022)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from triaccel_ray.model.layers import Layer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Formats of inputs and weights, and of gradients, which need the wider range."""
MIN_WIDTH = 2048
"""Inputs and outputs of a layer from which on products in FP8 save more than the casts cost.

Step time of a compiled GPT over that in BF16, on an H200: width 1024 1.14, 2048 0.89, 4096 0.77.
"""
ALIGNMENT = 16
"""What inputs and outputs of a layer in FP8 must be multiples of."""


def has_fp8(device: torch.device) -> bool:
    """Returns whether the device multiplies matrices in FP8; a CPU does, slowly."""
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9))


def fits_fp8(layer: Layer, *, wide_only: bool) -> bool:
    """Returns whether a layer can compute in FP8: linear modules with PyTorch's own forward function."""
    return all(
        type(module).forward is nn.Linear.forward
        and "forward" not in module.__dict__
        and all(size % ALIGNMENT == 0 and (size >= MIN_WIDTH or not wide_only) for size in _shape(module))
        for module in layer.modules
    )


def _shape(module: nn.Module) -> torch.Size:
    """Returns the shape of the weight that the module multiplies with, which a weight norm computes from others."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape


def linear(module: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002  # as `nn.Linear` calls it
    """Returns x W^T + b [..., n] in BF16, for x [..., k] of any floating dtype and W [n, k].

    The product is in FP8, or in BF16 if x is empty or nested.
    """
    weight, bias = module.weight.bfloat16(), None if module.bias is None else module.bias.bfloat16()
    if input.is_nested or input.numel() == 0:
        return F.linear(input.bfloat16(), weight, bias)
    num_outputs, num_inputs = weight.shape
    outputs: Tensor = _Product.apply(input.reshape(-1, num_inputs).bfloat16(), weight)
    outputs = outputs.view(*input.shape[:-1], num_outputs)
    return outputs if bias is None else outputs + bias


class _Product(torch.autograd.Function):
    """y = x W^T for BF16 x [m, k] and W [n, k]: products in FP8, sums in FP32, results in BF16.

    The product for the weight's gradient is in BF16 if m is no multiple of `ALIGNMENT`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (low_x, scale_x), (low_weight, scale_weight) = _scaled(x, E4M3), _scaled(weight, E4M3)
        ctx.save_for_backward(low_x, scale_x, low_weight, scale_weight)
        return _multiply(low_x, low_weight.t(), scale_x, scale_weight, is_forward=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        low_x, scale_x, low_weight, scale_weight = ctx.saved_tensors
        low, scale = _scaled(gradient, E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _multiply(low, _by_columns(low_weight), scale, scale_weight)
        if ctx.needs_input_grad[1] and len(low) % ALIGNMENT == 0:
            of_weight = _multiply(low.t().contiguous(), _by_columns(low_x), scale, scale_x)
        elif ctx.needs_input_grad[1]:
            of_weight = gradient.t() @ (low_x.float() * scale_x).bfloat16()
        return of_x, of_weight


def _scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns x / s in `dtype` and s, fp32 [], so that the largest value becomes the largest of `dtype`.

    One NaN or infinite value makes the whole product NaN, and the step is skipped.
    """
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, is_forward: bool = False) -> Tensor:
    """Returns the product of a [m, k], by rows, and b [k, n], by columns.

    In the forward pass, tensor cores keep fewer digits of the sums, which is faster. Gradients need more.
    """
    # Private: in PyTorch 2.11, Inductor chooses kernels for it, and not for the public `scaled_mm`.
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=is_forward)


def _by_columns(x: Tensor) -> Tensor:
    """Returns x, stored by columns."""
    return x.t().contiguous().t()
