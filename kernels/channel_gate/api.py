"""Pooling and gating as two differentiable functions that share one backward pass over memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from triaccel_ray.kernels.channel_gate import triton as kernels
from triaccel_ray.kernels.channels_last import APPLYING, REDUCING, Matrix


class Pooled(NamedTuple):
    """The pooled tensor, for `multiply`."""

    x: Tensor
    """Shares memory with the pooled tensor; must not be changed in place."""
    gates: list[Tensor]
    """Empty until `multiply` adds its gate, which the backward pass of `pool` needs."""


def pool(x: Tensor) -> tuple[Tensor, Pooled]:
    """Returns the mean of x over its pixels, [n, c, 1, 1] in x's dtype, and x for a later `multiply`.

    Sums are float32, in a fixed order: equal inputs give equal bits. The gradient of x is written once for both
    functions, where autograd would write one for each and then their sum. There is no double backward.

    Args:
        x: [n, c, h, w], float32, float16 or bfloat16, in channels_last memory; n at most 65535.
    """
    gates: list[Tensor] = []
    mean, alias = _Pool.apply(x, gates)
    return mean, Pooled(alias, gates)


def multiply(pooled: Pooled, gate: Tensor) -> Tensor:
    """Returns x gate, in the dtype that both promote to; call it at most once.

    Args:
        pooled: x, from `pool`; saved for the backward pass, as is the gate.
        gate: [n, c, 1, 1], float32, float16 or bfloat16; its gradient is summed in float32.
    """
    y: Tensor = _Multiply.apply(*pooled, gate)
    return y


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: list[Tensor]) -> tuple[Tensor, Tensor]:
        ctx.gates, ctx.shape, ctx.dtype, ctx.share = gates, x.shape, x.dtype, 1.0 / x.shape[2:].numel()
        ctx.set_materialize_grads(False)
        return _sums(x, None, x.dtype, ctx.share), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmean: Tensor | None, dy: Tensor | None) -> Any:
        if dy is None:
            return None if dmean is None else (dmean * ctx.share).expand(ctx.shape), None
        dy = dy.contiguous(memory_format=torch.channels_last)
        return _scaled(dy, ctx.gates[0] if ctx.gates else None, dmean, ctx.dtype, ctx.share), None


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: list[Tensor], gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        gates.append(gate.detach())  # with its autograd graph it would form a cycle
        return _scaled(x, gate, None, torch.promote_types(x.dtype, gate.dtype), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        return dy, None, _sums(dy, x, gate.dtype, 1.0) if ctx.needs_input_grad[2] else None  # `_Pool` applies the gate


def _sums(x: Tensor, factor: Tensor | None, dtype: torch.dtype, share: float) -> Tensor:
    """Returns `share` times the sums of x, or of x factor, over pixels: [n, c, 1, 1], channels_last."""
    n, c = x.shape[:2]
    matrix = Matrix(x, n)
    total = torch.empty(n, c, 1, 1, dtype=dtype, device=x.device, memory_format=torch.channels_last)
    if matrix.num_parts == 1:
        matrix.start(kernels.sums, REDUCING, x, factor, total, share)
        return total
    partials = torch.empty(matrix.num_parts, n, c, dtype=torch.float32, device=x.device)
    matrix.start(kernels.sums, REDUCING, x, factor, partials, share)
    return total.copy_(partials.sum(0)[:, :, None, None])


def _scaled(x: Tensor, gate: Tensor | None, offset: Tensor | None, dtype: torch.dtype, share: float) -> Tensor:
    """Returns x gate + share offset: [n, c, h, w], channels_last."""
    y = torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last)
    rows = [None if tensor is None else tensor.flatten(1).contiguous() for tensor in (gate, offset)]
    Matrix(x, len(x)).start(kernels.scale, APPLYING, x, *rows, y, share)
    return y
