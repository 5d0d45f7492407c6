"""Launches of kernels on images in channels_last memory: how work is divided among programs, and common arguments."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Launch parameters of one kind of kernel."""

    tile: int
    """Elements that a program processes at a time."""
    num_warps: int
    per_multiprocessor: int
    """Programs to launch per multiprocessor."""
    num_stages: int
    """Pipeline stages: tiles in flight from memory. 1 means no prefetching."""


# Measured on an H200 over the norms of ResNet-18 and EfficientNet-B0. Reductions and exponentials leave few registers,
# so they prefetch through shared memory; the others keep more loads in flight with more warps.
REDUCING = Shape(tile=2048, num_warps=4, per_multiprocessor=4, num_stages=3)
APPLYING = Shape(tile=2048, num_warps=8, per_multiprocessor=4, num_stages=1)
APPLYING_EXPONENTIALS = Shape(tile=2048, num_warps=4, per_multiprocessor=8, num_stages=3)
_INTERPRETED_MULTIPROCESSORS = 2
"""Number assumed when Triton interprets kernels on a CPU, which takes a millisecond per program."""


class Matrix:
    """Launches kernels on x as a matrix of pixels (rows) and channels, divided among programs."""

    def __init__(self, x: Tensor, num_matrices: int = 1) -> None:
        """Divides x [n, c, h, w] in channels_last memory into `num_matrices` matrices of rows, each among programs."""
        self.x = x
        self.num_channels = x.shape[1]
        self.num_rows = x.numel() // self.num_channels // num_matrices
        self._num_matrices = num_matrices
        self.block_channels = block_channels(x)
        _, self.num_parts = self._grid(REDUCING)
        """Programs that share a matrix's rows in a reduction, and so the number of partial results."""
        self.arguments = common_arguments(x)

    def start(self, kernel: Any, shape: Shape, *tensors: Tensor | float | None, **constants: Any) -> None:
        """Launches a kernel with the matrices along the grid's third axis."""
        with torch.cuda.device_of(self.x):  # triton launches on the current device, not on that of the tensors
            kernel[(*self._grid(shape), self._num_matrices)](
                *tensors,
                num_rows=self.num_rows,
                BLOCK_ROWS=shape.tile // self.block_channels,
                BLOCK_CHANNELS=self.block_channels,
                STAGES=shape.num_stages,
                num_warps=shape.num_warps,
                **self.arguments,
                **constants,
            )

    def _grid(self, shape: Shape) -> tuple[int, int]:
        """Returns the number of programs along channels, the fastest axis, and along rows; each has at least one tile.

        In a block of channels, program i of n takes tiles i, i + n, i + 2 n, ... of the rows. There is no autotuning.
        """
        num_blocks = ceil_div(self.num_channels, self.block_channels)
        num_tiles = ceil_div(self.num_rows, shape.tile // self.block_channels)
        multiprocessors = ceil_div(num_multiprocessors(self.x.device), self._num_matrices)
        return num_blocks, min(num_tiles, max(1, shape.per_multiprocessor * multiprocessors // num_blocks))


def common_arguments(x: Tensor) -> dict[str, Any]:
    """Returns arguments and options of every kernel on images with the channels, and on the device, of x."""
    unit, early = math.gcd(x.shape[1], 8), _can_start_early(x.device)
    # Fusion of multiply-adds is set explicitly: Triton warns about its default, which 3.10 turns off.
    found = {"channel_units": x.shape[1] // unit, "UNIT": unit, "EARLY": early, "enable_fp_fusion": True}
    return {**found, "launch_pdl": True} if early else found


def block_channels(x: Tensor) -> int:
    """Returns how many channels of x [n, c, h, w] a program takes.

    32 channels are 64 bytes of a pixel in half precision, the least that memory transfers. More leave lanes idle for 96
    or 144 channels and lengthen a table of partial results, for 2% more speed on large maps of 64.
    """
    return 16 if x.shape[1] <= 16 else 32


def ceil_div(value: int, divisor: int) -> int:
    """Returns the quotient, rounded up."""
    return -(-value // divisor)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors that work is divided among."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _can_start_early(device: torch.device) -> bool:
    """Returns whether a kernel can start while its predecessor ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
