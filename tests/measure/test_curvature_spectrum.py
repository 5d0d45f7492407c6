from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from triaccel_ray.measure.curvature.spectrum import (
    SpectrumShape,
    largest_eigenvalues,
    orthonormal,
    reduce_matrices,
    ritz_matrices,
)

ORDER = 32


def with_spectrum(values: Tensor) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (basis * values @ basis.T).unsqueeze(0)


def top(matrices: Tensor, count: int = 5) -> Tensor:
    return torch.linalg.eigvalsh(matrices).flip(1)[:, :count]


@pytest.mark.parametrize("size", [48, 160])
@pytest.mark.parametrize("ratio", [0.3, 0.8, 0.95])
def test_ritz_values_are_the_largest_eigenvalues_of_a_falling_spectrum(size: int, ratio: float) -> None:
    values = ratio ** torch.arange(size, dtype=torch.float64)
    found = top(ritz_matrices(with_spectrum(values), ORDER))[0]
    torch.testing.assert_close(found, values[:5], rtol=1e-10, atol=0.0)


@pytest.mark.parametrize("gap", [1.0, 0.999, 0.9])
def test_close_leading_eigenvalues_are_told_apart(gap: float) -> None:
    values = torch.full((160,), 0.4, dtype=torch.float64)
    values[:5] = torch.tensor([1.0, gap, gap**2, gap**3, gap**4])
    torch.testing.assert_close(top(ritz_matrices(with_spectrum(values), ORDER))[0], values[:5], rtol=1e-3, atol=0.0)


def test_ritz_values_never_exceed_the_eigenvalues_and_lose_little_on_a_flat_spectrum() -> None:
    values = torch.linspace(1.0, 0.0, 320, dtype=torch.float64)
    found = top(ritz_matrices(with_spectrum(values), ORDER))[0]
    assert (found <= values[:5] + 1e-12).all()
    assert (found >= 0.97 * values[:5]).all()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_fewer_directions_than_columns_leave_zeros(rank: int) -> None:
    columns = torch.randn(100, rank, dtype=torch.float64)
    matrix = (columns @ columns.T).unsqueeze(0)
    expected = top(matrix).clamp(min=0.0)
    torch.testing.assert_close(top(ritz_matrices(matrix, ORDER)), expected, rtol=1e-10, atol=1e-9)


def test_bases_are_orthonormal_and_what_depends_on_others_vanishes() -> None:
    columns = torch.randn(2, 50, 4, dtype=torch.float64) * torch.tensor([1e-8, 1.0, 1e8, 1.0])
    columns[1, :, 3] = columns[1, :, 0] * 2
    basis = orthonormal(columns)
    torch.testing.assert_close(basis[0].T @ basis[0], torch.eye(4, dtype=torch.float64), rtol=0.0, atol=1e-10)
    assert basis[1, :, 3].norm() < 1e-2
    assert orthonormal(torch.zeros(1, 5, 2, dtype=torch.float64)).count_nonzero() == 0


@pytest.mark.parametrize("size", [6, 40])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_a_row_of_nan(size: int, poison: float) -> None:
    good = torch.randn(size, size)
    good = good @ good.T
    bad = good.clone()
    bad[0, 1] = poison
    reduced = reduce_matrices([bad, good], 2, 3)
    assert reduced.dtype == torch.float64
    shape = SpectrumShape(orders=(reduced.shape[1],) * 2, counts=(3, 2), top_k=3)
    rows = largest_eigenvalues(reduced, shape)
    assert rows[0].isnan().all()
    torch.testing.assert_close(rows[1, :2], top(good[None].double() / 2, 2)[0], rtol=1e-6, atol=0.0)
    assert rows[1, 2].isnan()


def test_padding_is_no_eigenvalue() -> None:
    matrices = torch.diag_embed(torch.tensor([[-3.0, 0.0], [1.0, -2.0]], dtype=torch.float64))
    shape = SpectrumShape(orders=(1, 2), counts=(1, 2), top_k=2, is_semidefinite=False)
    rows = largest_eigenvalues(matrices, shape)
    assert rows[0, 0] == -3.0
    assert rows[0, 1].isnan()
    assert rows[1].tolist() == [1.0, -2.0]


def test_rounding_below_zero_is_cut_off_where_nothing_is_negative() -> None:
    matrices = torch.tensor([[[-1e-20]]], dtype=torch.float64)
    assert largest_eigenvalues(matrices, SpectrumShape(orders=(1,), counts=(1,), top_k=1)).tolist() == [[0.0]]
