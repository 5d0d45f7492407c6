import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.build import BF16, DEVICE, FP16, FP32, ROUNDING, assert_close, assert_replays
from tests.kernels.build import poison as poison
from triaccel_ray.kernels.depthwise_conv import reference
from triaccel_ray.kernels.depthwise_conv.api import depthwise_conv

pytestmark = pytest.mark.usefixtures("poison")


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int] = (2, 8, 6, 5)
    size: int = 3
    stride: int = 1
    padding: int = 1
    dtype: torch.dtype = FP32


def _drawn(case: Case) -> tuple[Tensor, Tensor]:
    """Returns x and the weight."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(case.shape, generator=generator).to(case.dtype)
    weight = torch.randn(case.shape[1], 1, case.size, case.size, generator=generator).to(case.dtype)
    return x.to(DEVICE, memory_format=torch.channels_last).requires_grad_(), weight.to(DEVICE).requires_grad_()


SMALL = [
    Case(),
    Case(shape=(3, 13, 7, 5), size=5, padding=2),
    Case(shape=(1, 40, 9, 8), stride=2),
    Case(shape=(2, 16, 8, 8), size=5, stride=2, padding=2, dtype=BF16),
    Case(shape=(1, 24, 6, 7), size=4, stride=3, padding=0),
    Case(shape=(2, 65, 3, 3), dtype=FP16),
    Case(shape=(1, 8, 7, 9), size=7, padding=3),
    Case(shape=(3, 1, 1, 1)),
    Case(shape=(1, 2, 2, 2), size=1, padding=2),  # outputs that read nothing
]
LARGE = [
    Case(shape=(96, 32, 112, 112), dtype=BF16),
    Case(shape=(96, 96, 112, 112), stride=2, dtype=BF16),
    Case(shape=(96, 144, 56, 56), size=5, stride=2, padding=2, dtype=FP16),
    Case(shape=(96, 1152, 7, 7), size=5, padding=2, dtype=BF16),
    Case(shape=(7, 96, 56, 55), size=7, padding=3),
]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.gpu) for case in LARGE)], ids=str)
def test_the_kernels_compute_what_fp64_does(case: Case) -> None:
    x, weight = _drawn(case)
    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    y = depthwise_conv(x, weight, stride=case.stride, padding=case.padding)
    exact = reference.depthwise_conv(exact_x, exact_weight, stride=case.stride, padding=case.padding)
    dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, case.dtype)
    y.backward(dy)
    exact.backward(dy.double())
    assert y.is_contiguous(memory_format=torch.channels_last)
    for actual, wanted in ((y, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert (actual.dtype, actual.shape) == (case.dtype, wanted.shape)
        assert_close(actual.detach(), wanted.detach(), ROUNDING[case.dtype], 2.0**-20)


def test_an_empty_batch_and_any_memory_format_pass() -> None:
    x, weight = _drawn(Case())
    empty = depthwise_conv(x[:0], weight, stride=1, padding=1)
    empty.sum().backward()
    assert empty.shape == (0, 8, 6, 5)
    assert not weight.grad.any()
    plain = depthwise_conv(x.detach().contiguous(), weight.detach(), stride=1, padding=1)
    assert torch.equal(plain, depthwise_conv(x, weight, stride=1, padding=1))


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    x, weight = _drawn(Case())
    depthwise_conv(x.detach(), weight, stride=1, padding=1).sum().backward()
    depthwise_conv(x, weight.detach(), stride=1, padding=1).sum().backward()
    both = [tensor.grad.clone() for tensor in (x, weight)]
    x.grad = weight.grad = None
    depthwise_conv(x, weight, stride=1, padding=1).sum().backward()
    assert all(map(torch.equal, both, (x.grad, weight.grad)))


def test_what_no_output_reads_is_in_no_gradient() -> None:
    x, weight = _drawn(Case(shape=(1, 8, 8, 8), stride=2, padding=0))  # three outputs a line, which read seven columns
    expected = depthwise_conv(x, weight, stride=2, padding=0)
    gradient = torch.autograd.grad(expected.sum(), weight)[0]
    poisoned = x.detach().clone()
    poisoned[..., 7] = poisoned[..., 7, :] = float("nan")
    y = depthwise_conv(poisoned, weight, stride=2, padding=0)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], gradient)


def test_gradients_can_be_differentiated() -> None:
    x, weight = (tensor.detach().requires_grad_() for tensor in _drawn(Case(stride=2)))

    def penalty(convolve: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(
            convolve(x, weight, stride=2, padding=1).square().sum(), (x, weight), create_graph=True
        )
        return torch.autograd.grad(sum(each.square().sum() for each in gradients), (x, weight))

    for actual, expected in zip(penalty(depthwise_conv), penalty(reference.depthwise_conv), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4)


@pytest.mark.gpu
def test_a_graph_replays_what_eager_computes_bit_for_bit() -> None:
    x, weight = _drawn(Case(shape=(8, 96, 56, 56), size=5, padding=2, dtype=BF16))

    def step() -> tuple[Tensor, ...]:
        y = depthwise_conv(x, weight, stride=1, padding=2)
        return (y.detach(), *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))

    assert_replays(step)
