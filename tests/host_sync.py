"""Checks on a GPU that the host does not wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raises at whatever makes the host wait for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says once that it does not find every such call
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
