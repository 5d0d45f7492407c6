"""What a precision is to PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from triaccel_ray.records.plan import Precision

DTYPES: Mapping[Precision, torch.dtype] = MappingProxyType(
    {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}
)
"""Precision -> the dtype that a layer computes in."""
