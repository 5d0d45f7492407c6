"""The operation in plain torch, the specification of the kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def channel_gate(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns x gate(mean of x over its pixels), as squeeze-and-excitation has it (Hu et al. 2018, section 3).

    Args:
        x: [n, c, h, w].
        gate: from [n, c, 1, 1] to the same shape.
    """
    return x * gate(x.mean((2, 3), keepdim=True))
