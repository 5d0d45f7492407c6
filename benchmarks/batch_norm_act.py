"""Batch normalization, residual sum and activation: the kernels against cuDNN and torch.compile, forward and backward.

    python -m benchmarks.batch_norm_act [--without-compile]

FP16. Inputs rotate among sets of tensors that together exceed the L2 cache several times over, so every time includes
reading from memory. The floor counts the bytes that must move: each direction reads its tensors twice, because
statistics come first, and writes its results once. `--without-compile` skips torch.compile, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import floor_us, report, time_calls
from triaccel_ray.kernels.batch_norm_act import RunningStatistics, batch_norm_act
from triaccel_ray.kernels.batch_norm_act.reference import ACTIVATIONS, Activation
from triaccel_ray.kernels.batch_norm_act.reference import batch_norm_act as reference

ROTATION_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Shape:
    """Shape and options of one norm of a network."""

    batch: int
    channels: int
    size: int
    activation: Activation
    has_residual: bool

    def __str__(self) -> str:
        what = "+".join(["norm", *["sum"] * self.has_residual, *[self.activation] * (self.activation != "none")])
        return f"{self.batch}x{self.channels}x{self.size}x{self.size} {what}"

    @property
    def num_bytes(self) -> int:
        """Bytes that must move: x twice, residual, y; then x and dy twice, dx, and with a sum y (ReLU's mask) and dz.

        The first pass over dy writes dz, so that the second need not read dy and y.
        """
        keeps_output = self.has_residual and self.activation != "none"
        passes = 3 + self.has_residual + 5 + 2 * keeps_output
        return passes * 2 * self.batch * self.channels * self.size**2


RESNET = [(64, 32), (128, 16), (256, 8), (512, 4)]
EFFICIENTNET = [(32, 112), (96, 112), (144, 56), (240, 28), (480, 14), (1152, 7)]
SHAPES = [
    *(Shape(batch, c, s, "relu", residual) for batch in (96, 512) for c, s in RESNET for residual in (False, True)),
    *(Shape(96, c, s, "silu", False) for c, s in EFFICIENTNET),
    Shape(96, 24, 56, "none", False),
]


class Inputs:
    """Random tensors for one call."""

    def __init__(self, shape: Shape) -> None:
        """Draws the tensors on the GPU."""

        def draw() -> Tensor:
            size = (shape.batch, shape.channels, shape.size, shape.size)
            return torch.randn(size, device="cuda").half().to(memory_format=torch.channels_last)

        self.x, self.dy = draw().requires_grad_(), draw()
        self.residual = draw().requires_grad_() if shape.has_residual else None
        self.weight = (torch.rand(shape.channels, device="cuda") + 0.5).requires_grad_()
        self.bias = torch.randn(shape.channels, device="cuda").requires_grad_()
        self.running = RunningStatistics(
            mean=torch.zeros(shape.channels, device="cuda"),
            var=torch.ones(shape.channels, device="cuda"),
            num_batches=torch.zeros((), dtype=torch.int64, device="cuda"),
        )

    def differentiate(self, y: Tensor) -> tuple[Tensor, ...]:
        """Returns y and the gradients of all inputs."""
        wanted = [self.x, self.weight, self.bias, *([] if self.residual is None else [self.residual])]
        return (y.detach(), *torch.autograd.grad([y], wanted, [self.dy]))


def fused(function: Callable[..., Tensor], inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """Returns the results of `function`: the kernels, their reference, or the compiled reference."""
    given = (inputs.x, inputs.weight, inputs.bias, inputs.running)
    how: dict[str, Any] = {"eps": 1e-5, "activation": shape.activation, "residual": inputs.residual}
    return inputs.differentiate(function(*given, **how))


def cudnn(inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """Returns the results of PyTorch's own operations, in place where networks usually are."""
    running = inputs.running
    assert running.num_batches is not None
    running.num_batches.add_(1)
    y = F.batch_norm(inputs.x, running.mean, running.var, inputs.weight, inputs.bias, True, 0.1, 1e-5)
    if inputs.residual is not None:
        y += inputs.residual
    in_place: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu_, "silu": partial(F.silu, inplace=True)}
    return inputs.differentiate(in_place.get(shape.activation, ACTIVATIONS[shape.activation])(y))


def figures(*, with_compile: bool) -> Iterator[object]:
    """Yields the times of each shape, and their sums."""
    sums: dict[str, float] = defaultdict(float)
    for shape in SHAPES:
        copies = max(2, min(16, ROTATION_BYTES // (8 * shape.batch * shape.channels * shape.size**2)))
        sets = [Inputs(shape) for _ in range(copies)]
        variants: dict[str, Any] = {"kernels": partial(fused, batch_norm_act), "cuDNN": cudnn}
        if with_compile:
            torch._dynamo.reset()
            variants["torch.compile"] = partial(fused, torch.compile(reference))
        for name, variant in variants.items():
            calls = [partial(variant, inputs, shape) for inputs in sets]
            timing = time_calls(f"{shape} {name}", calls, floor_us(shape.num_bytes))
            sums[name] += timing.median
            yield timing
    yield from (f"sum, {name}: {microseconds:.1f} us" for name, microseconds in sums.items())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    with_compile = not parser.parse_args().without_compile
    sys.exit(report("tests/kernels/test_batch_norm_act.py", partial(figures, with_compile=with_compile)))
