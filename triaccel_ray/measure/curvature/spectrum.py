"""Eigenvalues of matrices on a device without synchronization: the device reduces them, and the host solves the rest.

PyTorch's eigenvalue solvers read a status back, so that the host waits for all earlier work. Here the device reduces
each m x m matrix to one of order p <= max(32, 2 top_k). The next copy to the host includes it. LAPACK solves 21 of them
of order 32 in about a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MAX_HOST_ORDER = 32
"""Matrices up to this order go to the host without being reduced."""
_NUM_ITERATIONS = 12
_SHIFT = 1e-13
"""Added to the diagonal of the correlations before Cholesky. It exceeds their rounding in FP64 at order 32. So linearly
dependent columns (a layer with fewer directions than columns) come out as almost zero."""
_SMALLEST_NORM = 1e-150
"""Lower bound for a column's norm; its square, a divisor, does not underflow to zero."""
_SIGN_STEPS = [(3.4445, -4.7750, 2.0315)] * 16 + [(1.875, -1.25, 0.375)] * 6
"""Odd polynomials of degree 5 that drive eigenvalues in [-1, 1] to -1 and 1. The first 16 are steep at 0, to enlarge
small eigenvalues. In the last 6, the first and second derivatives are zero at 1."""
_ROOT_SHIFT = 1e-10


@dataclass(frozen=True, kw_only=True, eq=False)
class CurvatureEstimate:
    """One measurement, still on the device."""

    matrices: Tensor
    """fp64 [num_layers, p, p], symmetric; their eigenvalues include the largest ones of each layer's block."""
    counts: tuple[int, ...]
    """Number of eigenvalues to take for each layer; any others of its matrix are padding."""
    noise: Tensor | None = None
    """fp64 [2]: |E g|^2 and tr Cov[g_i] over all layers' weights (fisher only)."""
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    """Layer name -> why fisher or ggn pass its samples through the whole model one by one."""

    @property
    def eigenvalues(self) -> Tensor:
        """The largest eigenvalues, fp32 [num_layers, k], descending, on the matrices' device; waits for the device.

        NaN in positions that the layer's weights or the samples (fisher: b, ggn: b C) cannot fill. The whole row is NaN
        if the layer's gradients are not finite.
        """
        return largest_eigenvalues(self.matrices.cpu(), self.counts).float().to(self.matrices.device)


def largest_eigenvalues(matrices: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns the largest eigenvalues, by magnitude, of matrices [num_layers, p, p]: [num_layers, k], descending.

    For matrices on the CPU. NaN beyond a layer's count, and in the whole row of a matrix that is not finite.
    """
    is_finite = matrices.isfinite().flatten(1).all(dim=1)[:, None]
    # The solver raises on NaN and infinity, which a diverging training produces and a policy should see.
    values = torch.linalg.eigvalsh(torch.where(is_finite[:, None], matrices, 0.0))
    by_size = values.gather(1, values.abs().argsort(dim=1, descending=True))
    rows = matrices.new_full((len(counts), max(counts)), math.nan)
    for row, found, count in zip(rows, by_size, counts, strict=True):
        row[:count] = found[:count].sort(descending=True).values
    return torch.where(is_finite, rows, math.nan)


def reduce_matrices(matrices: Sequence[Tensor], num_samples: int, top_k: int) -> Tensor:
    """Returns matrices [num_layers, p, p], p <= max(32, 2 top_k), with the top_k largest eigenvalues of `matrices` / b.

    FP64; all NaN for a matrix that is not finite. Matrices of order p or less are only divided by b = `num_samples`.
    Larger ones are reduced to eigenvalues on a CPU, whose solver does not synchronize, elsewhere by `ritz_matrices`.
    """
    first = matrices[0]
    stacked = torch.stack([matrix.to(first.device, torch.float64) for matrix in matrices]) / num_samples
    order = max(_MAX_HOST_ORDER, 2 * top_k)
    if stacked.shape[1] <= order:
        return stacked
    is_finite = stacked.isfinite().flatten(1).all(dim=1)[:, None, None]
    finite = torch.where(is_finite, stacked, 0.0)
    if first.device.type == "cpu":
        reduced = torch.diag_embed(torch.linalg.eigvalsh(finite)[:, -top_k:])
    else:
        reduced = ritz_matrices(finite, order)
    return torch.where(is_finite, reduced, math.nan)


def ritz_matrices(matrices: Tensor, order: int) -> Tensor:
    """Returns Q^T K Q [num_layers, p, p] for semidefinite K [num_layers, m, m], Q from subspace iteration.

        Q <- orth(K Q),  12 times, from a fixed start of p columns

    Reads back no status: uses only batched products, Cholesky factors and triangular solves. An eigenvalue theta_i of
    the result lies below lambda_i by at most tan^2(angle of the starts) (lambda_(p+1) / lambda_i)^24 lambda_i
    (Saad 2011, "Numerical methods for large eigenvalue problems", theorem 5.2). With p = 32 the five largest are exact
    to 1e-3 if lambda_33 < 0.7 lambda_5, however close the five are to each other. In a flatter spectrum they come out
    lower: by 1% if 320 eigenvalues are spread evenly between 0 and 1.
    """
    q = orthonormal(matrices @ pseudo_random(matrices.shape[1], order, like=matrices))
    for _ in range(_NUM_ITERATIONS - 1):
        q = orthonormal(matrices @ q)
    q = orthonormal(q)  # once more: the first factor of a badly conditioned block is orthonormal only roughly
    projected: Tensor = q.mT @ (matrices @ q)
    return (projected + projected.mT) / 2


def orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis [s, m, p] of FP64 columns; those that depend on earlier ones come out as zero."""
    basis: Tensor = columns @ orthonormalizing(columns.mT @ columns)
    return basis


def orthonormalizing(products: Tensor) -> Tensor:
    """Returns W [..., p, p] such that V W is orthonormal, from the products V^T V of p columns in FP64."""
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=_SMALLEST_NORM)
    correlations = products / (norms.unsqueeze(-1) * norms.unsqueeze(-2))
    correlations.diagonal(dim1=-2, dim2=-1).add_(_SHIFT)
    upper = torch.linalg.cholesky_ex(correlations, upper=True).L
    identity = torch.eye(upper.shape[-1], dtype=upper.dtype, device=upper.device).expand_as(upper)
    inverse: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return inverse / norms.unsqueeze(-1)


def pseudo_random(num_rows: int, num_columns: int, *, like: Tensor) -> Tensor:
    """Returns a deterministic, random-looking matrix on the device of `like`: a generator would be further state."""
    rows = torch.arange(num_rows, device=like.device, dtype=torch.float64)
    columns = torch.arange(num_columns, device=like.device, dtype=torch.float64)
    values: Tensor = torch.frac(torch.sin(rows[:, None] * 12.9898 + columns * 78.233 + 1.0) * 43758.5453)
    return values.to(like.dtype)


def positive_roots(matrices: Tensor) -> Tensor:
    """Returns S with S S^T = the positive part of each symmetric matrix [b, C, C], in FP64; NaN where not finite.

    Uses only products and a Cholesky factor, since an eigenvalue solver would make the host wait:

        P = (H + H sign(H)) / 2,   sign(H) by iterating the polynomials `_SIGN_STEPS` from H / |H|_F

    Eigenvalues below 1e-9 |H|_F may keep a wrong sign: `_ROOT_SHIFT`, added before factorization, covers them.
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


def gradient_noise(total: Tensor) -> Tensor:
    """Returns unbiased |E g|^2 and tr Cov[g_i] of the per-sample gradient over all layers, fp64 [2].

        |E g|^2    = sum_{i != j} S_ij / (b (b - 1))
        tr Cov[g]  = (tr S - sum_ij S_ij / b) / (b - 1)

    with S = `total` [b, b] the sum of the layers' Gram matrices (McCandlish et al. 2018, appendix A, from two batch
    sizes; here from all pairs of samples). If noise dominates the gradient, the first can be negative. Averages over
    measurements need that, and code that divides by it has to clamp it.
    """
    b, trace = len(total), total.diagonal().sum()
    # Not sum - trace: if the noise is large, that is a small difference of large numbers.
    across = (total - torch.diag(total.diagonal())).sum()
    return torch.stack([across / (b * (b - 1)), (trace - (trace + across) / b) / (b - 1)]).double()
