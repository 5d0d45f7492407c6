"""Detects out-of-memory errors, summarizes their messages, and says how a step makes room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


class BudgetExceededError(MemoryError):
    """The process grew beyond its memory budget: the CPU's counterpart of `torch.OutOfMemoryError`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` says that the device's memory, or the budget, is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "can't allocate memory",
        "out of memory",
        "_STATUS_ALLOC_FAILED",
        "unable to find an engine to execute this computation",  # cuDNN, when no workspace fits
    )
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, or its type's name if that is empty (Python's MemoryError).

    PyTorch's advice on expandable segments is left out: `use_lean_memory` sets them, by default in the commands.
    """
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition(" If reserved but unallocated memory is large")[0]


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """How a step finds out that memory is short, and makes room."""

    check: Callable[[], None]
    """Raises `BudgetExceededError` if the process exceeds its memory budget."""
    release: Callable[[], None]
    """Frees memory that can be allocated again, such as captured steps."""
    is_exceeded_at_rest: Callable[[], bool] = lambda: False
    """Returns whether the process exceeds the budget without a batch in flight."""
