from __future__ import annotations

import pytest
import torch

from triaccel_ray.cuda.out_of_memory import BudgetExceededError, first_line, is_out_of_memory

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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (BudgetExceededError("the process holds"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
