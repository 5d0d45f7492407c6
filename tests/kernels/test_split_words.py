"""Weights in two words: exact, and stepped bit for bit as their FP32 numbers would be."""

import pytest
import torch
from torch import Tensor

from tests.kernels.build import both, interpreted
from tests.kernels.test_optimizer_step import COPY_DTYPES, Model, draw, each_optimizer
from triaccel_ray.kernels.split_words import join, split

pytestmark = interpreted
EDGES = [0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x3F800000, 0x3F808000, 0x3F807FFF, 0x3F818000,
         0x7F7F7FFF, 0x7F7FFFFF, 0x7F800000]  # fmt: skip
NANS = [0x7F800001, 0x7FC00000, 0x7FFF7FFF, 0x7FFFFFFF]


def numbers(bits: list[int]) -> Tensor:
    """FP32 numbers of these bits, of both signs."""
    positive = torch.tensor(bits, dtype=torch.int64)
    return torch.cat([positive, positive - 2**31]).to(torch.int32).view(torch.float32)


def test_every_number_comes_back_bit_for_bit_and_its_high_word_is_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    values = torch.cat([drawn[~drawn.isnan()], numbers(EDGES)])
    high, low = split(values)
    assert torch.equal(join(high, low).view(torch.int32), values.view(torch.int32))
    is_tie = values.view(torch.int32) & 0xFFFF == 0x8000  # where PyTorch rounds to the even one
    assert torch.equal(high[~is_tie].view(torch.int16), values.bfloat16()[~is_tie].view(torch.int16))
    away = values[is_tie].view(torch.int32) + 0x8000
    assert torch.equal(high[is_tie].float().view(torch.int32), away)


def test_nan_stays_nan_and_nothing_that_computes_becomes_a_number() -> None:
    high, low = split(numbers(NANS))
    assert join(high, low).isnan().all()
    assert not high.isfinite().any()


def test_zeros_that_were_written_to_high_words_alone_are_no_nan() -> None:
    _, low = split(numbers(EDGES))
    zeros = torch.zeros(len(low), dtype=torch.bfloat16)
    assert join(zeros, low).abs().max() < 1e-40
    assert join(-zeros, low).abs().max() < 1e-40


def into_words(model: Model) -> int:
    """Has the model step words in place of some parameters; returns of how many."""
    num_words = 0
    for index, (parameter, dtype) in enumerate(zip(model.parameters, COPY_DTYPES, strict=True)):
        if dtype not in (None, torch.bfloat16):
            continue
        aligned = parameter.data_ptr() % 16 == 0
        model.parameters[index], model.copies[index] = (Model._place(word, aligned) for word in split(parameter))
        num_words += 1
    return num_words


@both
@each_optimizer
@pytest.mark.parametrize("aligned", [True, False])
def test_words_are_stepped_as_the_numbers_would_be(optimizer: str, kernel: bool, aligned: bool) -> None:
    plain, words = (Model(optimizer, kernel=kernel, aligned=aligned) for _ in range(2))
    assert into_words(words) == 4
    for step in range(4):
        gradients = draw(plain, step)
        if step == 2:
            gradients[3] = None
        for model in (plain, words):
            model.found.fill_(float(step == 3))
            model.step(gradients)
        for mine, low, theirs in zip(words.parameters, words.copies, plain.parameters, strict=True):
            joined = mine if low is None or low.dtype is not torch.int16 else join(mine, low)
            assert torch.equal(joined, theirs)
    assert all(map(torch.equal, words.first, plain.first))
