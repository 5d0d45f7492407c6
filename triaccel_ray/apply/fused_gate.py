"""Squeeze-and-excitation: a tensor's mean over its pixels and its product with a gate, found and fused."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from triaccel_ray.apply.fused_norm import kernel_reads
from triaccel_ray.apply.trace import Trace, is_plain, trace
from triaccel_ray.kernels.batch_norm_act.api import DTYPES

_MEANS = (torch.mean, "mean")
_PRODUCTS = (operator.mul, torch.mul, "mul")
_PIXELS = ((2, 3), (-2, -1), (-1, -2), [2, 3], [-2, -1], [-1, -2])
_ONE_PIXEL = (1, (1, 1), [1, 1])
_LARGEST_BATCH = 2**16 - 1
"""Of the kernels."""


class Pool(nn.Module):
    """Returns a tensor's mean over its pixels, and the tensor for `Multiply`, by the kernel where there is one for it.

    Everywhere else the original is called. With `keepdim` the mean is [n, c, 1, 1], without it [n, c].
    """

    def __init__(self, original: Callable[[Tensor], Tensor], *, keepdim: bool = True) -> None:
        """Shares `original` when it is a module."""
        super().__init__()
        self.original = original
        self._keepdim = keepdim

    def forward(self, x: Any) -> tuple[Tensor, Any]:
        """Returns the mean of x, [n, c, h, w], and what `Multiply` takes."""
        is_known = not isinstance(self.original, nn.Module) or is_plain(self.original)
        fits = is_known and kernel_reads(x) and x.numel() > 0 and len(x) <= _LARGEST_BATCH
        if not (fits and x.is_contiguous(memory_format=torch.channels_last)):
            return self.original(x), x
        from triaccel_ray.kernels.channel_gate.launch import pool  # here: without a GPU triton need not exist

        mean, pooled = pool(x)
        return mean if self._keepdim else mean.flatten(1), pooled


class Multiply(nn.Module):
    """Returns the product of a tensor that `Pool` has read and a gate, by the kernel where there is one for it."""

    def forward(self, pooled: Any, gate: Any) -> Any:
        """Returns the product; `pooled` is the second of what `Pool` returned."""
        if isinstance(pooled, Tensor):
            return pooled * gate
        x = pooled.x
        fits = isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.device == x.device
        if not (fits and gate.shape == (*x.shape[:2], 1, 1)):
            return x * gate
        from triaccel_ray.kernels.channel_gate.launch import multiply

        return multiply(pooled, gate)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The calls of x gate(mean of x)."""

    mean: fx.Node
    pool: Pool
    """Takes the place of `mean`."""
    product: fx.Node
    factor: fx.Node
    """What x is multiplied by."""


def gates_of(model: nn.Module, leaves: Collection[nn.Module]) -> list[nn.Module]:
    """Returns the modules without batch normalisation, in a model with it, that can be traced and gate their input."""

    def is_gate(module: nn.Module) -> bool:
        traced = trace(module, leaves)
        nodes = traced.graph.nodes if isinstance(traced, Trace) else ()
        return any(node.op == "placeholder" and find_gate(node, functools.partial(_called, module)) for node in nodes)

    if not _normalises(model):
        return []
    own = [module for module in model.modules() if not type(module).__module__.startswith("torch.")]
    return [module for module in own if not _normalises(module) and is_gate(module)]


def find_gate(x: fx.Node, module_of: Callable[[fx.Node], nn.Module | None]) -> Gate | None:
    """Returns the calls that make a gate of x; None where they are missing, or where others may write to x."""
    means = {node: pool for node in x.users if (pool := _pool(node, x, module_of(node)))}
    products = [node for node in x.users if node.target in _PRODUCTS and len(node.args) == 2 and not node.kwargs]
    expanded = [node for node in x.users if node.target == "expand_as" and node.args[1:] == (x,)]
    known = {*means, *products, *expanded}
    if len(means) != 1 or len(products) != 1 or not all(node in known or _asks_for_size(node) for node in x.users):
        return None
    (mean, pool), (product,) = *means.items(), products
    factor = product.args[1] if product.args[0] is x else product.args[0]
    if isinstance(factor, fx.Node) and factor in expanded:
        factor = factor.args[0]
    if not isinstance(factor, fx.Node) or factor is x:
        return None
    return Gate(mean=mean, pool=pool, product=product, factor=factor)


def _asks_for_size(node: fx.Node) -> bool:
    return node.target == "size" or (node.target is getattr and node.args[1:] == ("shape",))


def _pool(node: fx.Node, x: fx.Node, module: nn.Module | None) -> Pool | None:
    """Returns what takes the place of a call, if that means x over its pixels."""
    if node.args[:1] != (x,) or x in node.args[1:]:
        return None
    if type(module) is nn.AdaptiveAvgPool2d:
        return Pool(module) if module.output_size in _ONE_PIXEL and is_plain(module) else None
    if node.target is F.adaptive_avg_pool2d:
        given = _arguments(node, "output_size")
        return Pool(functools.partial(node.target, **given)) if given.get("output_size") in _ONE_PIXEL else None
    given = _arguments(node, "dim", "keepdim")
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    if node.target not in _MEANS or dim not in _PIXELS or type(keepdim) is not bool or len(given) > 2:
        return None
    return Pool(functools.partial(torch.mean, **given), keepdim=keepdim)


def _arguments(node: fx.Node, *names: str) -> dict[str, Any]:
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _called(model: nn.Module, node: fx.Node) -> nn.Module | None:
    return model.get_submodule(str(node.target)) if node.op == "call_module" else None


def _normalises(model: nn.Module) -> bool:
    return any(type(part) is nn.BatchNorm2d for part in model.modules())
