"""Depthwise convolutions of EfficientNet-B0 in BF16 against cuDNN: `python -m benchmarks.depthwise_conv`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import floor_us, report, time_calls
from triaccel_ray.kernels.depthwise_conv import reference
from triaccel_ray.kernels.depthwise_conv.api import depthwise_conv

SHAPES = (
    (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2), (240, 28, 5, 1), (240, 28, 3, 2),
    (480, 14, 3, 1), (480, 14, 5, 1), (672, 14, 5, 1), (672, 14, 5, 2), (1152, 7, 5, 1), (1152, 7, 3, 1),
)  # fmt: skip
"""Channels, image edge in pixels, filter edge, stride."""
METHODS = {"kernel": depthwise_conv, "cuDNN": reference.depthwise_conv}


class Setup:
    """One convolution of 96 images."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        channels, side, self.size, self.stride = shape
        x = torch.randn(96, channels, side, side, device="cuda", dtype=torch.bfloat16)
        self.x = x.to(memory_format=torch.channels_last).requires_grad_()
        self.weight = torch.randn(channels, 1, self.size, self.size, device="cuda", dtype=torch.bfloat16)
        self.weight.requires_grad_()

    def run(self, method: str) -> tuple[Tensor, ...]:
        """Returns the output and both gradients."""
        y = METHODS[method](self.x, self.weight, stride=self.stride, padding=self.size // 2)
        return (y.detach(), *torch.autograd.grad(y, (self.x, self.weight), torch.ones_like(y)))


def figures() -> Iterator[object]:
    """Yields how long each method's first calls take, then the time of both passes for each shape and method."""
    for method in METHODS:
        began = time.perf_counter()
        for shape in SHAPES:
            Setup(shape).run(method)
        torch.cuda.synchronize()
        yield f"{method}: first calls of {len(SHAPES)} shapes in {time.perf_counter() - began:.2f} s"
    for shape in SHAPES:
        setup = Setup(shape)
        outputs = setup.x.numel() // setup.stride**2
        floor = floor_us(3 * 2 * (setup.x.numel() + outputs))
        for method in METHODS:
            yield time_calls(f"{shape} {method}", [partial(setup.run, method)], floor)


if __name__ == "__main__":
    sys.exit(report("tests/kernels/test_depthwise_conv.py", figures))
