"""The generalised Gauss-Newton matrix: one column per sample and output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.gram import Grams, layer_grams
from triaccel_ray.measure.curvature.objective import Objective


def ggn_grams(objective: Objective, layers: Sequence[Layer]) -> Grams:
    """Returns each layer's Gram matrix [b C, b C] of the columns J_i^T S_i e_c.

    The block is G_l = (1/b) sum_i J_i^T H_i J_i: J_i [C, n] the Jacobian of sample i's C outputs with respect to the
    layer's weights, H_i = S_i S_i^T [C, C] the Hessian of its loss with respect to its outputs (Martens 2020, section
    8), here exact, whatever the loss, with its negative part cut off. In a network of linear maps, ReLU, pooling and
    eval-mode normalisation the outputs are piecewise linear in one layer's weights: where H_i has no negative part,
    as with every convex loss, the layer's Hessian block *is* G_l. C backward passes.

    Raises:
        ValueError: the outputs are not of shape [b, C].
    """
    return layer_grams(objective, layers, _head)


def output_hessians(objective: Objective, outputs: Tensor) -> Tensor:
    """Returns H_i, the Hessian of each sample's loss with respect to its outputs: [b, C, C]."""
    at = outputs.detach().requires_grad_()
    b, num_outputs = at.shape
    zeros = at.new_zeros(b, num_outputs)
    value = objective.value(at) * b
    if not value.requires_grad:
        return zeros.unsqueeze(2).expand(b, num_outputs, num_outputs)
    (slope,) = torch.autograd.grad(value, at, create_graph=True, allow_unused=True)
    if slope is None or not slope.requires_grad:
        return zeros.unsqueeze(2).expand(b, num_outputs, num_outputs)
    # Samples are independent, so that the sum over them gives each one's own row of second derivatives.
    rows = [
        torch.autograd.grad(slope[:, c].sum(), at, retain_graph=True, allow_unused=True)[0] for c in range(num_outputs)
    ]
    return torch.stack([zeros if row is None else row for row in rows], dim=1)


def symmetric_roots(matrices: Tensor) -> Tensor:
    """Returns S with S S^T = the positive part of each symmetric matrix [b, C, C]; NaN where that is not finite.

    The symmetric root, because it is the only one that does not depend on the choice of eigenvectors: the columns of
    a sample may be formed more than once and must come out the same.
    """
    is_finite = matrices.isfinite().flatten(1).all(dim=1)[:, None, None]
    symmetric = torch.where(is_finite, (matrices + matrices.transpose(1, 2)) / 2, 0.0)
    values, vectors = torch.linalg.eigh(symmetric)
    roots = vectors * values.clamp(min=0.0).sqrt().unsqueeze(1) @ vectors.transpose(1, 2)
    return torch.where(is_finite, roots, math.nan)


def _head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    b = objective.num_samples
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != b:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"outputs have shape {found}: ggn needs [{b}, C], one vector of outputs per sample; use method fisher"
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    roots = symmetric_roots(output_hessians(objective, outputs).to(dtype)).to(outputs.dtype)
    return outputs, list(roots.unbind(dim=2))
