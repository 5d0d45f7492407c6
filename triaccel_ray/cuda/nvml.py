"""NVML, the library of NVIDIA's driver that measures GPUs."""

from __future__ import annotations

from typing import Any

import pynvml
import torch


def nvml_handle(device: torch.device) -> Any:
    """Returns NVML's handle of the GPU, found by its UUID, so that CUDA_VISIBLE_DEVICES does not matter."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
