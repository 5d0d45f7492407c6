"""Fused batch normalization in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "relu", "relu6", "silu", "hardswish"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


@dataclass(frozen=True, kw_only=True)
class RunningStatistics:
    """Moving averages, updated in place by every call, as in `torch.nn.BatchNorm2d` in training mode."""

    mean: Tensor
    """Of each channel's mean, [C]."""
    var: Tensor
    """Of each channel's unbiased variance, [C]."""
    num_batches: Tensor | None = None
    """Integer scalar, increased by one per call; None disables the count."""
    momentum: float = 0.1
    """Weight of the new batch, in [0, 1]."""


def batch_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: RunningStatistics,
    *,
    eps: float,
    activation: Activation = "none",
    residual: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the result of `api.batch_norm_act` for tensors on any device; fp64 is computed in fp64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    if running.num_batches is not None:
        running.num_batches.add_(1)
    z = F.batch_norm(
        x.to(compute), running.mean, running.var, weight.to(compute), bias.to(compute), True, running.momentum, eps
    )
    if residual is not None:
        z = z + residual.to(compute)
    return ACTIVATIONS[activation](z).to(output_dtype or x.dtype)
