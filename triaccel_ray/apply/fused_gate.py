"""Fuses squeeze-and-excitation: a tensor's mean over its pixels, and its product with a gate made from the mean."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from triaccel_ray.apply.fused_norm import is_kernel_input
from triaccel_ray.apply.trace import Trace, called, is_plain, trace
from triaccel_ray.kernels.batch_norm_act.api import DTYPES

_PRODUCTS = (operator.mul, torch.mul, "mul")
_MEANS: Mapping[Any, tuple[str, ...]] = {
    F.adaptive_avg_pool2d: ("output_size",), torch.mean: ("dim", "keepdim"), "mean": ("dim", "keepdim"),
}  # fmt: skip
"""Functions and methods that can average over pixels -> argument names; the first says what is averaged over."""
_OVER_PIXELS = {"output_size": (1, (1, 1)), "dim": ((2, 3), [2, 3], (-2, -1), [-2, -1], (-1, -2), [-1, -2])}
_LARGEST_BATCH = 2**16 - 1
"""Largest batch that the launch grid of the kernels can hold."""


class Pool(nn.Module):
    """Returns a tensor's mean over its pixels and the input of `Multiply`, by the fused kernel if it applies."""

    def __init__(self, original: Callable[[Tensor], Tensor], *, keepdim: bool) -> None:
        """Shares `original` if it is a module; called if no kernel applies, it returns [n, c, 1, 1] or [n, c]."""
        super().__init__()
        self.original, self._keepdim = original, keepdim

    def forward(self, x: Any) -> tuple[Tensor, Any]:
        """Returns the mean of x, [n, c, h, w], and x for `Multiply`."""
        fits = is_kernel_input(x) and x.numel() > 0 and len(x) <= _LARGEST_BATCH
        is_hooked = isinstance(self.original, nn.Module) and not is_plain(self.original)
        if is_hooked or not (fits and x.is_contiguous(memory_format=torch.channels_last)):
            return self.original(x), x
        from triaccel_ray.kernels.channel_gate.api import pool  # here: without a GPU triton need not exist

        mean, pooled = pool(x)
        return mean if self._keepdim else mean.flatten(1), pooled


class Multiply(nn.Module):
    """Returns the product of the tensor given to `Pool` and a gate, by the fused kernel if it applies."""

    def forward(self, pooled: Any, gate: Any) -> Any:
        """Returns the product; `pooled` is the second value that `Pool` returned."""
        if isinstance(pooled, Tensor):
            return pooled * gate
        x = pooled.x
        fits = isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.device == x.device
        if not (fits and gate.shape == (*x.shape[:2], 1, 1)):
            return x * gate
        from triaccel_ray.kernels.channel_gate.api import multiply

        return multiply(pooled, gate)


def gates_of(model: nn.Module, leaves: Collection[nn.Module]) -> list[nn.Module]:
    """Returns traceable modules without BatchNorm2d that gate their input; none if the model has no BatchNorm2d."""

    def is_gate(module: nn.Module) -> bool:
        traced = trace(module, leaves)
        nodes = traced.graph.nodes if isinstance(traced, Trace) else ()
        return any(node.op == "placeholder" and find_gate(node, functools.partial(called, module)) for node in nodes)

    if not _has_batch_norm(model):
        return []
    own = [module for module in model.modules() if not type(module).__module__.startswith("torch.")]
    return [module for module in own if not _has_batch_norm(module) and is_gate(module)]


def find_gate(
    x: fx.Node, module_of: Callable[[fx.Node], nn.Module | None]
) -> tuple[fx.Node, Pool, fx.Node, fx.Node] | None:
    """Returns the call that averages x over its pixels, the `Pool` to replace it, the product of x, and its factor.

    Returns None unless there is exactly one of each, or if x has other readers, which may write to it.
    """
    pools = {node: _pool(node, x, module_of(node)) for node in x.users}
    means = {node: pool for node, pool in pools.items() if pool is not None}
    calls = [node for node in x.users if node.op in ("call_function", "call_method")]
    products = [node for node in calls if node.target in _PRODUCTS and len(node.args) == 2 and not node.kwargs]
    expanded = [node for node in calls if node.target == "expand_as" and node.args[1:] == (x,)]
    sizes = [node for node in calls if node.target == "size" or node.args[1:] == ("shape",)]
    if len(means) != 1 or len(products) != 1 or x.users.keys() - {*means, *products, *expanded, *sizes}:
        return None
    factor = next((value for value in products[0].args if value is not x), None)
    if isinstance(factor, fx.Node) and factor in expanded:
        factor = factor.args[0]
    if not isinstance(factor, fx.Node):
        return None
    mean, pool = means.popitem()
    return mean, pool, products[0], factor


def _pool(node: fx.Node, x: fx.Node, module: nn.Module | None) -> Pool | None:
    """Returns the replacement for a call, if the call averages x over its pixels."""
    if node.args[:1] != (x,):
        return None
    if node.op == "call_module":
        is_mean = type(module) is nn.AdaptiveAvgPool2d and module.output_size in _OVER_PIXELS["output_size"]
        return Pool(module, keepdim=True) if module is not None and is_mean and is_plain(module) else None
    names = _MEANS.get(node.target)
    if names is None:
        return None
    given: dict[str, Any] = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    if given.get(names[0]) not in _OVER_PIXELS[names[0]] or not given.keys() <= set(names):
        return None
    is_pooling = "output_size" in given
    function = functools.partial(F.adaptive_avg_pool2d if is_pooling else torch.mean, **given)
    return Pool(function, keepdim=given.get("keepdim", is_pooling))


def _has_batch_norm(model: nn.Module) -> bool:
    return any(type(part) is nn.BatchNorm2d for part in model.modules())
