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
from triaccel_ray.measure.curvature.ways import Structure

_SIGN_STEPS = [(3.4445, -4.7750, 2.0315)] * 16 + [(1.875, -1.25, 0.375)] * 6
"""Odd polynomials of degree 5 that drive eigenvalues in [-1, 1] to -1 and 1: steep at 0 first, to bring the small ones
up to size, then with three derivatives zero at 1."""
_ROOT_SHIFT = 1e-10


def ggn_grams(objective: Objective, layers: Sequence[Layer], known: Structure | None = None) -> Grams:
    """Returns each layer's Gram matrix [b C, b C] of the columns J_i^T S_i e_c.

    The block is G_l = (1/b) sum_i J_i^T H_i J_i: J_i [C, n] the Jacobian of sample i's C outputs with respect to the
    layer's weights, H_i = S_i S_i^T [C, C] the Hessian of its loss with respect to its outputs (Martens 2020, section
    8), here exact, whatever the loss, with its negative part cut off. In a network of linear maps, ReLU, pooling and
    eval-mode normalisation the outputs are piecewise linear in one layer's weights: where H_i has no negative part,
    as with every convex loss, the layer's Hessian block *is* G_l. C backward passes.

    Raises:
        ValueError: the outputs are not of shape [b, C].
    """
    return layer_grams(objective, layers, _head, known)


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


def positive_roots(matrices: Tensor) -> Tensor:
    """Returns S with S S^T = the positive part of each symmetric matrix [b, C, C], in FP64; NaN where not finite.

    By products and a Cholesky factor alone, since an eigenvalue solver would have the host wait:

        P = (H + H sign(H)) / 2,   sign(H) by X <- (3 X - X^3) / 2 from H / |H|_F, faster at first

    Eigenvalues below 1e-9 |H|_F may keep a wrong sign: the shift of the factor covers them.
    """
    doubled = matrices.double()
    is_finite = doubled.isfinite().flatten(1).all(dim=1)[:, None, None]
    symmetric = torch.where(is_finite, (doubled + doubled.mT) / 2, 0.0)
    scale = symmetric.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)[:, None, None]
    unit = symmetric / scale
    sign = unit
    for first, third, fifth in _SIGN_STEPS:
        square = sign @ sign
        sign = first * sign + (third * square + fifth * (square @ square)) @ sign
    positive = (unit + unit @ sign) / 2
    positive = (positive + positive.mT) / 2
    positive.diagonal(dim1=1, dim2=2).add_(_ROOT_SHIFT)
    factor, failed = torch.linalg.cholesky_ex(positive)
    roots = factor * scale.sqrt()
    return torch.where(is_finite & (failed == 0)[:, None, None], roots, math.nan)


def _head(outputs: Any, objective: Objective) -> tuple[Tensor, Sequence[Tensor | None]]:
    b = objective.num_samples
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != b:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"outputs have shape {found}: ggn needs [{b}, C], one vector of outputs per sample; use method fisher"
        )
    roots = positive_roots(output_hessians(objective, outputs)).to(outputs.dtype)
    return outputs, list(roots.unbind(dim=2))
