import math

import pytest
import torch
from torch import Tensor

from triaccel_ray.measure.curvature.spectrum import largest_eigenvalues, reduce_matrices, ritz_matrices

ORDER = 32


def with_spectrum(values: Tensor) -> Tensor:
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (basis * values @ basis.T).unsqueeze(0)


def top(matrices: Tensor, count: int = 5) -> Tensor:
    return torch.linalg.eigvalsh(matrices).flip(1)[:, :count]


CLOSE = torch.full((160,), 0.4, dtype=torch.float64)
CLOSE[:5] = 0.999 ** torch.arange(5)


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        (0.3 ** torch.arange(48, dtype=torch.float64), 1e-10),
        (0.95 ** torch.arange(160, dtype=torch.float64), 1e-10),
        (CLOSE, 1e-3),
        (torch.linspace(1.0, 0.0, 320, dtype=torch.float64), 0.03),  # flat
    ],
)
def test_ritz_values_come_close_to_the_largest_eigenvalues_from_below(values: Tensor, loss: float) -> None:
    found = top(ritz_matrices(with_spectrum(values), ORDER))[0]
    assert (found <= values[:5] * (1 + 1e-10)).all()
    assert (found >= values[:5] * (1 - loss)).all()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_fewer_directions_than_columns_leave_zeros(rank: int) -> None:
    columns = torch.randn(100, rank, dtype=torch.float64)
    matrix = (columns @ columns.T).unsqueeze(0)
    expected = top(matrix).clamp(min=0.0)
    torch.testing.assert_close(top(ritz_matrices(matrix, ORDER)), expected, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("size", [6, 40])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_a_row_of_nan(size: int, poison: float) -> None:
    good = torch.randn(size, size)
    good = good @ good.T
    bad = good.clone()
    bad[0, 1] = poison
    reduced = reduce_matrices([bad, good], 2, 3)
    assert reduced.dtype == torch.float64
    rows = largest_eigenvalues(reduced, (3, 2))
    assert rows[0].isnan().all()
    torch.testing.assert_close(rows[1, :2], top(good[None].double() / 2, 2)[0], rtol=1e-6, atol=0.0)
    assert rows[1, 2].isnan()


def test_padding_is_no_eigenvalue() -> None:
    matrices = torch.diag_embed(torch.tensor([[-3.0, 0.0], [1.0, -2.0]], dtype=torch.float64))
    rows = largest_eigenvalues(matrices, (1, 2))
    assert rows[0, 0] == -3.0
    assert rows[0, 1].isnan()
    assert rows[1].tolist() == [1.0, -2.0]
