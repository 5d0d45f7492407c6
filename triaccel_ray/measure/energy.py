"""Energy that a GPU consumes, by NVML's counter."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml
import torch

from triaccel_ray.cuda.nvml import nvml_handle


def energy_counter(device: torch.device) -> Callable[[], float]:
    """Returns a function that reads the joules that the GPU has consumed since its driver was loaded.

    The counter covers the whole board: memory, idle power and all processes on it. NaN on a CPU.
    """
    return partial(board_joules, nvml_handle(device)) if device.type == "cuda" else lambda: math.nan


def board_joules(handle: Any) -> float:
    """Returns the counter's joules; NaN where NVML has none: before Volta, and on most virtual GPUs."""
    try:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3  # mJ
    except pynvml.NVMLError:
        return math.nan
