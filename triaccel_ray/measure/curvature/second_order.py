"""Convolution and batch normalisation written to be differentiated twice with no work that is then thrown away."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.measure.curvature.folding import FoldedNorms


class Wanted:
    """Which weights the derivative being taken is with respect to."""

    def __init__(self) -> None:
        """Starts with all."""
        self._ids: set[int] | None = None

    @contextlib.contextmanager
    def only(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Returns a context inside which derivatives with respect to other parameters need not be right."""
        self._ids = {id(weight) for weight in weights}
        try:
            yield
        finally:
            self._ids = None

    def includes(self, weight: Tensor) -> bool:
        """Whether the derivative with respect to `weight` may be needed: always, if it was computed from others."""
        return self._ids is None or not weight.is_leaf or id(weight) in self._ids


@contextlib.contextmanager
def twice_differentiable(model: nn.Module, wanted: Wanted) -> Iterator[None]:
    """Replaces, in a model in eval mode, operations whose second derivative in PyTorch does what nobody asked for.

    - PyTorch's second derivative of a convolution computes its weight's part whether asked for or not, as a
      convolution with a kernel as large as the image: 40% of the time of a Hessian-vector product of ResNet-18.
    - That of batch normalisation is written for training mode, as dozens of operations on whole activations, where
      eval mode is an affine map (`FoldedNorms`).
    """
    replaced: list[nn.Module] = []
    try:
        for module in model.modules():
            if _is_stock_convolution(module):
                replaced.append(module)
                module.__dict__["_conv_forward"] = _convolution(module, wanted)
        with FoldedNorms():
            yield
    finally:
        for module in replaced:
            del module.__dict__["_conv_forward"]


def _is_stock_convolution(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return False
    kind: Any = type(module)
    # Replaced below `forward`, which others may have wrapped.
    is_stock = kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
    is_plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return is_stock and is_plain and "_conv_forward" not in module.__dict__


@dataclass(frozen=True, eq=False)
class _Geometry:
    """The options of a convolution, and its three products: each is bilinear, and the derivative of the others."""

    stride: Any
    padding: Any
    dilation: Any
    groups: int
    wanted: Wanted

    def outputs(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the convolution itself."""
        return torch.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, gradient: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """Returns the derivative with respect to the inputs, of which only the shape matters."""
        return self._backward(gradient, gradient.new_empty(1).expand(shape), weight, 0)

    def weight_gradient(self, gradient: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """Returns the derivative with respect to the weight, laid out as `like`."""
        return self._backward(gradient, x, like, 1)

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, index: int) -> Tensor:
        mask = [index == 0, index == 1, False]
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, self.stride, self.padding, self.dilation, False, [0, 0], self.groups, mask
        )[index]
        return found


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.wants_weight = geometry, lambda: geometry.wanted.includes(weight)
        return geometry.outputs(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x = _InputGradient.apply(gradient, weight, x.shape, ctx.geometry) if ctx.needs_input_grad[0] else None
        needs_weight = ctx.needs_input_grad[1] and ctx.wants_weight()
        return for_x, _WeightGradient.apply(gradient, x, weight.detach(), ctx.geometry) if needs_weight else None, None


class _InputGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, shape: torch.Size, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(gradient, weight)
        ctx.geometry, ctx.wants_weight = geometry, lambda: geometry.wanted.includes(weight)
        return geometry.input_gradient(gradient, weight, shape)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> Any:
        gradient, weight = ctx.saved_tensors
        for_gradient = _Outputs.apply(direction, weight, ctx.geometry) if ctx.needs_input_grad[0] else None
        needs_weight = ctx.needs_input_grad[1] and ctx.wants_weight()
        for_weight = None
        if needs_weight:
            for_weight = _WeightGradient.apply(gradient, direction, weight.detach(), ctx.geometry)
        return for_gradient, for_weight, None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, x: Tensor, like: Tensor, geometry: _Geometry) -> Tensor:
        ctx.save_for_backward(gradient, x)
        ctx.geometry = geometry
        return geometry.weight_gradient(gradient, x, like)

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> Any:
        gradient, x = ctx.saved_tensors
        for_gradient = _Outputs.apply(x, direction, ctx.geometry) if ctx.needs_input_grad[0] else None
        for_x = _InputGradient.apply(gradient, direction, x.shape, ctx.geometry) if ctx.needs_input_grad[1] else None
        return for_gradient, for_x, None, None


def _convolution(module: Any, wanted: Wanted) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    geometry = _Geometry(module.stride, module.padding, module.dilation, module.groups, wanted)

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 3:
            return forward(x.unsqueeze(0), weight, bias).squeeze(0)
        outputs: Tensor = _Outputs.apply(x, weight, geometry)
        return outputs if bias is None else outputs + bias.view(1, -1, 1, 1)

    return forward
