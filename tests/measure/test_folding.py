import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from triaccel_ray.measure.curvature.objective import FoldedNorms
from triaccel_ray.measure.saved_bytes import counting_saved_bytes


def _norm(make: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    norm = make(6, **options).double()
    with torch.no_grad():
        for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    return norm.eval()


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (nn.BatchNorm1d, (4, 6), {}),
        (nn.BatchNorm1d, (4, 6, 5), {"affine": False}),
        (nn.BatchNorm2d, (4, 6, 3, 2), {"eps": 0.3}),
        (nn.BatchNorm3d, (2, 6, 3, 2, 2), {}),
    ],
)
def test_a_folded_norm_computes_what_the_norm_does(make: Any, shape: tuple[int, ...], options: Any) -> None:
    norm = _norm(make, **options)
    x, dy = torch.randn(2, *shape, dtype=torch.float64)
    results = []
    for context in (contextlib.nullcontext(), FoldedNorms()):
        leaf = x.clone().requires_grad_()
        with context:
            y = norm(leaf)
            (slope,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
            results.append((y.detach(), slope.detach(), torch.autograd.grad(slope, leaf, dy)[0]))
    torch.testing.assert_close(results[1], results[0])


def test_a_norm_that_uses_the_batchs_statistics_is_left_alone() -> None:
    x = torch.randn(4, 6, 3, 3)
    for norm in (nn.BatchNorm2d(6), nn.BatchNorm2d(6, track_running_stats=False).eval()):
        expected = F.batch_norm(x, None, None, training=True)
        with FoldedNorms():
            torch.testing.assert_close(norm(x), expected)


def test_a_folded_norm_keeps_nothing_of_its_input() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)
    ).eval()
    inputs, counts = torch.randn(2, 3, 24, 24), []
    for context in (contextlib.nullcontext(), FoldedNorms()):
        with context, counting_saved_bytes(model) as kept:
            model(inputs)
        counts.append(sum(size // 4 for size in kept.values() if size > 4000))
    first, second = 2 * 6 * 22 * 22, 2 * 6 * 20 * 20
    assert counts == [inputs.numel() + 2 * first + second, inputs.numel() + first]
