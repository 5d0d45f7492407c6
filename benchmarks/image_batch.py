"""A batch of CIFAR-10-sized images from a data set on the GPU: the kernel against PyTorch.

Run `python -m benchmarks.image_batch`. Every variant draws its own random numbers on the device. The floor counts the
bytes that must move: for each pixel, a byte read and an element written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import floor_us, report, time_calls
from triaccel_ray.kernels.image_batch import image_batch
from triaccel_ray.kernels.image_batch.reference import image_batch as reference

NUM_IMAGES = 50_000
NUM_BATCHES = 40
"""Distinct batches in one measurement, so that the cache does not hold them all."""
PADDING = 4
PLAIN: dict[str, Any] = {"epoch": None, "padding": PADDING, "reflect": False, "cutout": 0}


class Setup:
    """The data, and the variants that are compared."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, device="cuda")
        mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]], device="cuda")
        self.constants = 1 / (255 * std), -mean / std

    def variants(self, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Tensor]]:
        """Returns the variants by name: functions from indices to a batch."""

        def keyed(make: Callable[..., Tensor], indices: Tensor) -> Tensor:
            return make(self.images, indices, *self.constants, key=_key(), dtype=dtype, **PLAIN)

        return {
            "kernel": partial(keyed, image_batch),
            "PyTorch, gather in one": partial(self.gathered, dtype),
            "PyTorch, hashed, compiled": partial(keyed, torch.compile(reference, dynamic=False)),
        }

    def gathered(self, dtype: torch.dtype, indices: Tensor) -> Tensor:
        """Returns the batch as it is usually written: random offsets, one advanced-index gather, normalization."""
        num, (scale, shift) = len(indices), self.constants
        padded = F.pad(self.images[indices], (PADDING,) * 4)
        offsets = torch.randint(0, 2 * PADDING + 1, (2, num, 1), device="cuda")
        mirrored = torch.randint(0, 2, (num, 1), device="cuda")
        edge = torch.arange(32, device="cuda")
        columns = torch.where(mirrored == 1, edge.flip(0), edge) + offsets[0]
        rows = edge + offsets[1]
        samples = torch.arange(num, device="cuda")
        batch = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        batch = batch.to(torch.float32, memory_format=torch.channels_last)
        return batch.mul_(scale.view(1, -1, 1, 1)).add_(shift.view(1, -1, 1, 1)).to(dtype)


def _key() -> Tensor:
    return torch.randint(2**63 - 1, (), device="cuda")


def figures() -> Iterator[object]:
    """Yields the times of each variant."""
    setup = Setup()
    for size in (96, 512):
        batches = torch.randint(NUM_IMAGES, (NUM_BATCHES, size), device="cuda")
        for dtype in (torch.float16, torch.float32):
            floor = floor_us(size * 3072 * (1 + dtype.itemsize))
            for name, make in setup.variants(dtype).items():
                yield time_calls(f"{size} images, {dtype}, {name}", [partial(make, each) for each in batches], floor)


if __name__ == "__main__":
    sys.exit(report("tests/kernels/test_image_batch.py", figures))
