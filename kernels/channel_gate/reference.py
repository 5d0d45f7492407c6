"""Pooling and gating in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def channel_gate(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns x gate(mean of x over its pixels), as in squeeze-and-excitation (Hu et al. 2018, section 3).

    Args:
        x: [n, c, h, w].
        gate: function from [n, c, 1, 1] to the same shape.
    """
    return x * gate(x.mean((2, 3), keepdim=True))
