"""A batch of CIFAR-10-sized images from a data set on the GPU, the kernel beside PyTorch.

Run `python -m benchmarks.image_batch`. Every variant draws its own random numbers from a generator on the device.
Prints microseconds a batch in a CUDA graph, the median of `--repeats` measurements with their least and largest, and
GB/s over the bytes that must move (a byte read and an element written for each pixel) beside what a plain copy
reaches. Times nothing and exits with 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.timing import describe_machine
from triaccel_ray.kernels.image_batch import image_batch
from triaccel_ray.kernels.image_batch.reference import image_batch as reference

NUM_IMAGES = 50_000
NUM_BATCHES = 40
"""Different batches in one measurement, so that the cache does not hold them all."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PADDING = 4
FULL: dict[str, Any] = {"reflect": True, "cutout": 8}
"""What else may be asked of a batch with a key."""

Make = Callable[[Tensor], Tensor]
"""Maps indices to a batch."""


class Setup:
    """The data, and the variants that are compared."""

    def __init__(self) -> None:
        drawing = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=drawing)
        self.images = images.cuda()
        mean, std = torch.tensor(MEAN, device="cuda"), torch.tensor(STD, device="cuda")
        self.scale, self.shift = 1 / (255 * std), -mean / std
        self.generator = torch.Generator(device="cuda").manual_seed(0)
        self.compiled = torch.compile(reference, dynamic=False)

    def key(self) -> Tensor:
        """Returns what a batch is augmented by."""
        return torch.randint(2**63 - 1, (), generator=self.generator, device="cuda")

    def variants(self, dtype: torch.dtype) -> dict[str, Make]:
        """Returns what is compared, by name."""
        constants = self.scale, self.shift
        how: dict[str, Any] = {"epoch": None, "padding": PADDING, "reflect": False, "cutout": 0, "dtype": dtype}
        return {
            "kernel": lambda i: image_batch(self.images, i, *constants, key=self.key(), **how),
            "PyTorch, gather in one": lambda i: self.gathered(i, dtype),
            "PyTorch, hashed, compiled": lambda i: self.compiled(self.images, i, *constants, key=self.key(), **how),
        }

    def gathered(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the batch as it is usually written: random offsets, one advanced-index gather, normalisation."""
        images, num = self.images[indices], len(indices)
        padded = F.pad(images, (PADDING,) * 4)
        offsets = torch.randint(0, 2 * PADDING + 1, (2, num, 1), generator=self.generator, device="cuda")
        mirrored = torch.randint(0, 2, (num, 1), generator=self.generator, device="cuda")
        edge = torch.arange(32, device="cuda")
        columns = torch.where(mirrored == 1, edge.flip(0), edge) + offsets[0]
        rows = edge + offsets[1]
        samples = torch.arange(num, device="cuda")
        batch = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        batch = batch.to(torch.float32, memory_format=torch.channels_last)
        return batch.mul_(self.scale.view(1, -1, 1, 1)).add_(self.shift.view(1, -1, 1, 1)).to(dtype)

    def wrong(self, dtype: torch.dtype) -> list[str]:
        """Returns what is wrong with the kernel: pixels must be the reference's, values within the type's rounding."""
        found = []
        indices = torch.randint(NUM_IMAGES, (777,), device="cuda")
        images, chosen, scale, shift = (t.cpu() for t in (self.images, indices, self.scale, self.shift))
        one, zero = torch.ones(3), torch.zeros(3)
        how: dict[str, Any] = {"epoch": None, "padding": PADDING, "reflect": False, "cutout": 0, "dtype": torch.float32}
        key = self.key()
        for change in ({}, FULL):
            same = {**how, **change}
            pixels = image_batch(self.images, indices, one.cuda(), zero.cuda(), key=key, **same)
            if not torch.equal(pixels.cpu(), reference(images, chosen, one, zero, key=key.cpu(), **same)):
                found.append(f"{dtype}: other pixels than the reference's, {change}")
        values = image_batch(self.images, indices, self.scale, self.shift, key=key, padding=PADDING, dtype=dtype)
        exact = reference(images, chosen, scale, shift, key=key.cpu(), **how)
        if (values.cpu().float() - exact).abs().max() > 8 * torch.finfo(dtype).eps:
            found.append(f"{dtype}: values off by more than rounding")
        return found


def captured(make: Make, batches: list[Tensor], generator: torch.Generator) -> Callable[[], None]:
    """Returns a replay of a CUDA graph that makes all batches."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        for indices in batches:
            make(indices)
    return graph.replay


def microseconds(run: Callable[[], None], repeats: int) -> list[float]:
    """Returns the wall-clock time of a batch, measured `repeats` times over all batches, three rounds each."""
    run()
    measured = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        measured.append((time.perf_counter() - start) / 3 / NUM_BATCHES * 1e6)
    return measured


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    setup = Setup()
    found = [fault for dtype in (torch.float32, torch.float16, torch.bfloat16) for fault in setup.wrong(dtype)]
    if found:
        print(*(f"WRONG: {fault}" for fault in found), sep="\n")
        return 1
    print(f"{describe_machine()}; n = {repeats}")
    print(f"{'batch':>5} {'type':8} {'variant':42} {'captured us':>26} {'GB/s':>6}")
    for size in (96, 512):
        batches = list(torch.randint(NUM_IMAGES, (NUM_BATCHES, size), device="cuda"))
        for dtype in (torch.float16, torch.float32):
            num_bytes = size * 3072 * (1 + dtype.itemsize)
            for name, make in setup.variants(dtype).items():
                make(batches[0])  # compiles
                graph = microseconds(captured(make, batches, setup.generator), repeats)
                rate = num_bytes / statistics.median(graph) / 1e3
                print(f"{size:5} {str(dtype)[6:]:8} {name:42} {spread(graph):>26} {rate:6.0f}")
    return 0


def spread(values: list[float]) -> str:
    """Returns median, least and largest."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main())
