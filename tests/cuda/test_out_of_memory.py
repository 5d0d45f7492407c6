from __future__ import annotations

import pytest
import torch

from triaccel_ray.cuda.out_of_memory import BudgetExceededError, first_line, is_out_of_memory

CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. 270.30 MiB allowed; Of the allocated memory 223.25 MiB is "
    "allocated by PyTorch, and 30.75 MiB is reserved by PyTorch but unallocated."
)
ADVICE = " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
NO_CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


@pytest.mark.parametrize(
    ("error", "expected", "line"),
    [
        (torch.OutOfMemoryError(CUDA + ADVICE), True, CUDA),
        (RuntimeError("\n[enforce fail] can't allocate memory\nsecond"), True, "[enforce fail] can't allocate memory"),
        (MemoryError(), True, "MemoryError"),
        (BudgetExceededError("the process holds"), True, "the process holds"),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel"), True, "CUDA error: out of memory"),
        (RuntimeError(NO_CUBLAS), True, NO_CUBLAS),
        (RuntimeError("shapes do not match"), False, "shapes do not match"),
        (ValueError("can't allocate memory"), False, "can't allocate memory"),
    ],
)
def test_an_error_is_a_lack_of_memory_or_not_and_its_message_is_one_line(
    error: BaseException, expected: bool, line: str
) -> None:
    assert (is_out_of_memory(error), first_line(error)) == (expected, line)


def test_the_allocators_own_error_counts() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
