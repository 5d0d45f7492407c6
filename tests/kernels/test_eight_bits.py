"""Optimizer state in 8 bits: what a code keeps, and steps that read and write codes."""

import pytest
import torch
from torch import Tensor

from tests.kernels.build import DEVICE, interpreted
from tests.kernels.test_optimizer_step import Model, draw, each_optimizer
from triaccel_ray.kernels.eight_bits import BLOCK, BLOCK_BYTES, GROUP, decode, encode, num_bytes

pytestmark = interpreted
SIZES = [1, GROUP, BLOCK - 1, BLOCK, 3 * BLOCK + 70]


def numbers(size: int, decades: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator) * 10.0 ** (-decades * torch.rand(size, generator=generator))


@pytest.mark.parametrize("size", SIZES)
def test_codes_keep_a_bounded_part_of_every_number(size: int) -> None:
    values = numbers(size)
    codes = encode(values)
    assert codes.shape == (num_bytes(size),)
    error = (decode(codes, size, signed=True) - values).abs()
    largest = torch.nn.functional.pad(values, (0, -size % GROUP)).view(-1, GROUP).abs().amax(1)
    largest = largest.repeat_interleave(GROUP)[:size]
    # Half a code of 1/127 in y = sqrt(|x| / s): |dx| <= 2 sqrt(s |x|) dy + s dy^2.
    half = 0.5 / 127
    assert (error <= 2 * (largest * values.abs()).sqrt() * half + largest * half**2 + 1e-6 * largest).all()
    squares = values.square()
    found = decode(encode(squares, torch.tensor(3.0)), size, signed=False)
    # A code of 1/255 in y = (x / s)^(1/4), and never 0 for what is not.
    root, code = (squares / largest.square()) ** 0.25, 1.0 / 255
    assert ((found / largest.square()) ** 0.25 - root).abs().max() <= code * (1 + 1e-4)
    assert (found > 0).all()


def test_zero_bytes_are_zeros() -> None:
    nothing = torch.zeros(num_bytes(1500), dtype=torch.uint8)
    for signed in (True, False):
        assert torch.equal(decode(nothing, 1500, signed=signed), torch.zeros(1500))
    assert torch.equal(encode(torch.zeros(1500)), nothing)
    assert len(nothing) == 2 * BLOCK_BYTES


def test_a_second_moment_follows_what_moves_it_by_less_than_a_code() -> None:
    size, beta = 4 * GROUP, 0.999
    target = torch.logspace(-2, 0, size)
    codes = encode(torch.full((size,), 0.1), torch.tensor(0.0))
    for step in range(6000):
        value = decode(codes, size, signed=False)
        codes = encode(value * beta + (1 - beta) * target, torch.tensor(float(step)))
    value = decode(codes, size, signed=False)
    assert (value / target).log().mean().abs() < 0.05  # rounded to the nearest, most would not have moved
    assert (value / target).log().abs().max() < 0.5


def into_codes(model: Model) -> int:
    """Has the model keep the state of every other tensor in codes; returns of how many."""
    chosen = range(0, len(model.sizes), 2)
    for index in chosen:
        for state in (model.first, model.second):
            state[index] = torch.zeros(num_bytes(model.sizes[index]), dtype=torch.uint8, device=DEVICE)
    return len(chosen)


@each_optimizer
@pytest.mark.parametrize("aligned", [True, False])
def test_the_kernel_computes_what_its_reference_does(optimizer: str, aligned: bool) -> None:
    kernel, plain = Model(optimizer, aligned=aligned), Model(optimizer, aligned=aligned)
    assert into_codes(kernel) == 4
    references = [Model(optimizer, kernel=False)] if DEVICE.type == "cpu" else []
    for reference in references:
        into_codes(reference)
    for step in range(3):
        gradients = draw(kernel, step)
        for model in (kernel, plain, *references):
            model.step(gradients)
        for index, (mine, exact) in enumerate(zip(kernel.parameters, plain.parameters, strict=True)):
            for reference in references:
                torch.testing.assert_close(mine, reference.parameters[index], rtol=1e-5, atol=1e-5)
            assert (mine - exact).abs().max() < 0.1 * (1 + step)  # the state was near enough
            if index % 2:  # in FP32 beside them
                torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-7)
    for model in (kernel, *references):
        before = model.state()
        model.found.fill_(1.0)  # the step is skipped
        model.step(draw(model, 3))
        assert all(map(torch.equal, before, model.state()))
