import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.build import BF16, DEVICE, FP16, FP32, ROUNDING, assert_close, assert_replays
from tests.kernels.build import poison as poison
from triaccel_ray.kernels.channel_gate.api import multiply, pool
from triaccel_ray.kernels.channel_gate.reference import channel_gate

pytestmark = pytest.mark.usefixtures("poison")


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int] = (2, 8, 3, 5)
    x: torch.dtype = FP32
    gate: torch.dtype = FP32

    def coarseness(self) -> float:
        """Relative error of a gradient that went through a rounded mean, gate and gradient of each."""
        return 2.0**-18 + sum(2 * ROUNDING[dtype] for dtype in (self.x, self.gate) if dtype is not FP32)


def _drawn(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, the gate's weight and the output's gradient."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(case.shape, generator=generator) + 0.5).to(case.x)
    weight = torch.randn(case.shape[1], 1, 1, generator=generator)
    dy = torch.randn(case.shape, generator=generator).to(torch.promote_types(case.x, case.gate))
    return x.to(DEVICE, memory_format=torch.channels_last), weight.to(DEVICE), dy.to(DEVICE)


SMALL = [
    Case(),
    Case(shape=(3, 13, 5, 7)),
    Case(shape=(1, 40, 31, 17)),  # a sample's rows are divided among programs
    Case(shape=(5, 1, 1, 1)),
    Case(shape=(3, 65, 1, 9), x=FP16, gate=FP16),
    Case(shape=(2, 24, 7, 7), x=BF16, gate=BF16),
    Case(shape=(1, 16, 29, 11), x=BF16),
    Case(shape=(4, 16, 6, 6), gate=FP16),
]
LARGE = [
    Case(shape=(96, 32, 112, 112), x=BF16, gate=BF16),
    Case(shape=(96, 144, 56, 56), x=FP16, gate=FP16),
    Case(shape=(96, 1152, 7, 7), x=BF16, gate=BF16),
    Case(shape=(1, 24, 299, 301), x=BF16),
    Case(shape=(513, 13, 9, 7)),
]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.gpu) for case in LARGE)], ids=str)
def test_the_kernels_compute_what_fp64_does(case: Case) -> None:
    (x, weight, dy), gates = _drawn(case), []
    x, exact_x = x.requires_grad_(), x.detach().double().requires_grad_()
    weight, exact_weight = weight.requires_grad_(), weight.detach().double().requires_grad_()
    mean, pooled = pool(x)
    gate = torch.sigmoid(weight * mean.float()).to(case.gate)
    y = multiply(pooled, gate)
    y.backward(dy)

    def exact_gate(exact_mean: Tensor) -> Tensor:
        gates.append(exact_mean)
        return torch.sigmoid(exact_weight * exact_mean)

    channel_gate(exact_x, exact_gate).backward(dy.double())
    assert (mean.dtype, y.dtype) == (case.x, dy.dtype)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(mean.detach(), gates[0].detach(), ROUNDING[case.x], 2.0**-20)
    assert_close(y.detach(), (exact_x * gate.double()).detach(), ROUNDING[dy.dtype], 2.0**-22)
    assert (x.grad.dtype, x.grad.stride()) == (x.dtype, x.stride())
    assert_close(x.grad, exact_x.grad, ROUNDING[case.x], case.coarseness())
    assert_close(weight.grad, exact_weight.grad, ROUNDING[FP32], case.coarseness())


READERS: dict[str, Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "the mean alone": lambda mean, x, product: mean.square(),
    "a gate without a gradient": lambda mean, x, product: product(mean.detach()),
    "a gate of something else": lambda mean, x, product: product(torch.ones_like(mean)),
    "both": lambda mean, x, product: product(mean) + mean,
    "another product": lambda mean, x, product: x * mean[:, :, :1],
    "no product": lambda mean, x, product: x + mean,
    "a mean of the product": lambda mean, x, product: product(mean).mean((2, 3)),  # its gradient is expanded
}


@pytest.mark.parametrize("name", READERS)
def test_any_reader_of_the_mean_and_of_x_gets_its_gradient(name: str) -> None:
    x = _drawn(Case())[0].requires_grad_()
    mean, pooled = pool(x)
    y = READERS[name](mean, pooled.x, functools.partial(multiply, pooled))
    exact_mean = x.mean((2, 3), keepdim=True)
    exact = READERS[name](exact_mean, x, lambda gate: x * gate)
    torch.testing.assert_close(y, exact)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (y, exact)))


def test_gradients_that_are_not_wanted_are_not_computed() -> None:
    x, weight, dy = _drawn(Case())
    weight.requires_grad_()
    mean, pooled = pool(x)
    assert not mean.requires_grad
    multiply(pooled, mean * weight).backward(dy)
    torch.testing.assert_close(weight.grad, (dy * x * mean).sum((0, 2, 3))[:, None, None])


def test_what_changes_before_the_backward_pass_is_noticed() -> None:
    x, weight, dy = _drawn(Case())
    mean, pooled = pool(x.requires_grad_())
    gate = mean * weight
    y = multiply(pooled, gate)
    gate.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.mark.gpu
def test_a_graph_replays_what_eager_computes_bit_for_bit() -> None:
    x, weight, dy = _drawn(Case(shape=(8, 96, 56, 56), x=BF16, gate=BF16))
    x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        mean, pooled = pool(x)
        y = multiply(pooled, torch.sigmoid(mean * weight.to(BF16)))
        return (y.detach(), *torch.autograd.grad(y, x, dy))

    assert_replays(step)
