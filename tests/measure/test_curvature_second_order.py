from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triaccel_ray.measure.curvature.hessian import TwiceDifferentiable


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": (1, 0)}, {"groups": 2, "bias": False}, {"dilation": 2, "padding": 2}]
)
def test_twice_differentiable_convolutions_are_those_of_pytorch(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, **options), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Tanh()).double()
    x, direction = torch.randn(2, 2, 7, 8, dtype=torch.float64), torch.randn_like(model[0].weight)

    def products() -> list[Tensor]:
        weights = [model[0].weight, model[2].weight]
        first = torch.autograd.grad(model(x).square().sum(), weights, create_graph=True)
        return [*first, *torch.autograd.grad(first[0], weights, direction)]

    expected = products()
    with TwiceDifferentiable():
        found = products()
        assert model(x[0]).shape == model(x[:1])[0].shape
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_only_what_is_wanted_is_differentiated() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2)).double()
    operations, weights = TwiceDifferentiable(), [model[0].weight, model[2].weight]
    with operations:
        value = model(torch.randn(2, 2, 7, 8, dtype=torch.float64)).square().sum()
    with operations.only(weights[:1]):
        first, second = torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    assert second is None
    torch.testing.assert_close(first, torch.autograd.grad(value, weights)[0])


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (6, 3, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_affine_norms_are_batch_norms_in_eval_mode(shape: tuple[int, ...], affine: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, affine=affine).double()
    for value in (*norm.parameters(), norm.running_mean, norm.running_var):
        nn.init.uniform_(value, 0.5, 1.5)
    norm.eval()
    x, direction = torch.randn(2, *shape, dtype=torch.float64)
    x.requires_grad_()

    def derivatives() -> list[torch.Tensor]:
        y = norm(x)
        (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return [y, slope, *torch.autograd.grad(slope, x, direction)]

    expected = derivatives()
    with TwiceDifferentiable():
        found = derivatives()
    torch.testing.assert_close(found, expected)
    assert "BatchNorm" in type(expected[0].grad_fn).__name__
    assert "BatchNorm" not in type(found[0].grad_fn).__name__
