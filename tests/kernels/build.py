"""Where the kernels' tests run, and beside what."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU the kernels run on the CPU, through Triton's interpreter."""
both = pytest.mark.parametrize(
    "kernel",
    [
        True,
        pytest.param(False, marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="the reference runs on a CPU")),
    ],
)
"""The kernel and its reference."""
