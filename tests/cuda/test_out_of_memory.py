from __future__ import annotations

import pytest
import torch

from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. 270.30 MiB allowed; Of the allocated memory 223.25 MiB is "
    "allocated by PyTorch, and 30.75 MiB is reserved by PyTorch but unallocated."
)
ADVICE = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(CUDA + ADVICE), CUDA),
        (RuntimeError("\n[enforce fail] can't allocate memory\nsecond line"), "[enforce fail] can't allocate memory"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_message_is_one_line_without_advice(error: BaseException, line: str) -> None:
    assert is_out_of_memory(error)
    assert first_line(error) == line


def test_other_errors_are_not_about_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))
