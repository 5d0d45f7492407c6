"""Batch normalisation, residual sum and activation: the kernels beside cuDNN and torch.compile, forward and backward.

    python -m benchmarks.batch_norm_act [--without-compile]

Times are medians of graph replays with the spread from the 10th to the 90th percentile, in microseconds. Inputs of a
replay rotate among sets of tensors that together exceed the L2 cache several times over, so every figure includes
reading from memory. GB/s counts what must be moved: each direction reads its tensors twice, because statistics come
first, and writes its results once. `--without-compile` leaves out torch.compile, which takes minutes. Times nothing and
exits with 1 when any result of the kernels is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import copy_bytes_per_second, describe_machine
from triaccel_ray.kernels.batch_norm_act import RunningStatistics, batch_norm_act
from triaccel_ray.kernels.batch_norm_act.reference import ACTIVATIONS, Activation
from triaccel_ray.kernels.batch_norm_act.reference import batch_norm_act as reference

ROTATION_BYTES = 256 * 2**20
TOLERANCE = 2.0**-10
"""Largest relative error of FP16 results, in the Euclidean norm."""
REPLAYS = 30

Step = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """One norm of a network, in FP16."""

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
        """Must be moved: x twice, residual, y; then x and dy twice, dx, and with a sum y (its ReLU's mask) and dz.

        dz is written by the first pass over dy, which spares the second one dy and y.
        """
        keeps_output = self.has_residual and self.activation != "none"
        passes = 3 + self.has_residual + 5 + 2 * keeps_output
        return passes * 2 * self.batch * self.channels * self.size**2


RESNET = [(64, 32), (128, 16), (256, 8), (512, 4)]
SHAPES = [
    *(Shape(batch, c, s, "relu", residual) for batch in (96, 512) for c, s in RESNET for residual in (False, True)),
    Shape(96, 32, 112, "silu", False),
    Shape(96, 96, 112, "silu", False),
    Shape(96, 24, 56, "none", False),
    Shape(96, 144, 56, "silu", False),
    Shape(96, 240, 28, "silu", False),
    Shape(96, 480, 14, "silu", False),
    Shape(96, 1152, 7, "silu", False),
]


class Inputs:
    """Tensors of one call."""

    def __init__(self, shape: Shape) -> None:
        """Draws them."""

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
        return (y, *torch.autograd.grad([y], wanted, [self.dy]))


def ours(inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """The kernels."""
    return inputs.differentiate(
        batch_norm_act(
            inputs.x, inputs.weight, inputs.bias, inputs.running, eps=1e-5, activation=shape.activation,
            residual=inputs.residual,
        )
    )  # fmt: skip


def cudnn(inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
    """PyTorch's own operations, in place where a network would."""
    running = inputs.running
    assert running.num_batches is not None
    running.num_batches.add_(1)
    y = F.batch_norm(inputs.x, running.mean, running.var, inputs.weight, inputs.bias, True, 0.1, 1e-5)
    if inputs.residual is not None:
        y += inputs.residual
    in_place: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": F.relu_,
        "silu": lambda z: F.silu(z, inplace=True),
    }
    return inputs.differentiate(in_place.get(shape.activation, ACTIVATIONS[shape.activation])(y))


def compiled(shape: Shape) -> Callable[[Inputs, Shape], tuple[Tensor, ...]]:
    """`torch.compile` of the reference."""
    function = torch.compile(reference)

    def run(inputs: Inputs, shape: Shape) -> tuple[Tensor, ...]:
        return inputs.differentiate(
            function(
                inputs.x, inputs.weight, inputs.bias, inputs.running, eps=1e-5, activation=shape.activation,
                residual=inputs.residual,
            )
        )  # fmt: skip

    return run


def error(inputs: Inputs, shape: Shape) -> float:
    """Returns the largest relative error, in the Euclidean norm, of the kernels' results against FP64."""
    results = ours(inputs, shape)
    doubles = [
        None if t is None else t.detach().double().requires_grad_()
        for t in (inputs.x, inputs.weight, inputs.bias, inputs.residual)
    ]
    x, weight, bias, residual = doubles
    assert x is not None
    assert weight is not None
    assert bias is not None
    running = RunningStatistics(mean=inputs.running.mean.double(), var=inputs.running.var.double())
    y = reference(x, weight, bias, running, eps=1e-5, activation=shape.activation, residual=residual)
    wanted = [t for t in doubles if t is not None]
    exact = (y, *torch.autograd.grad(y, wanted, inputs.dy.double()))
    return max(float((a.double() - e).norm() / e.norm()) for a, e in zip(results, exact, strict=True))


def captured(run: Step, warmups: int = 3) -> torch.cuda.CUDAGraph:
    """Returns a graph of one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_times(run: Step) -> list[float]:
    """Returns the times of replays of `run`, in microseconds."""
    graph = captured(run)
    times = []
    for _ in range(REPLAYS + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return sorted(times[3:])


def described(times: list[float]) -> str:
    """Returns median and spread."""
    return f"{statistics.median(times):9.1f} ({times[len(times) // 10]:.1f}-{times[-len(times) // 10 - 1]:.1f})"


def compare_kernels(errors: Mapping[Shape, float], *, with_compile: bool) -> None:
    """Prints the table; `errors` are those of the kernels' results."""
    print(f"{'':38}{'kernels':>24}{'cuDNN':>26}{'torch.compile':>26}   kernels  GB/s (share)  error")
    totals = [0.0, 0.0, 0.0]
    for shape, wrong_by in errors.items():
        copies = max(2, min(16, ROTATION_BYTES // (8 * shape.batch * shape.channels * shape.size**2)))
        sets = [Inputs(shape) for _ in range(copies)]
        torch._dynamo.reset()
        cells, medians = [], []
        for variant in (ours, cudnn, *([compiled(shape)] if with_compile else [])):

            def all_sets(variant: Any = variant, sets: Any = sets, shape: Shape = shape) -> None:
                for inputs in sets:
                    variant(inputs, shape)

            times = [time / len(sets) for time in replay_times(all_sets)]
            medians.append(statistics.median(times))
            cells.append(described(times))
        cells += [""] * (3 - len(cells))
        totals = [total + median for total, median in zip(totals, [*medians, 0.0], strict=False)]
        speed = shape.num_bytes / medians[0] / 1e3
        share = 1e9 * speed / copy_bytes_per_second()
        print(
            f"{shape!s:38}{cells[0]:>24}{cells[1]:>26}{cells[2]:>26}   {speed:8.0f} ({share:.0%})  {wrong_by:.1e}",
            flush=True,
        )
        del sets
    print(f"{'sum':38}{totals[0]:>24.1f}{totals[1]:>26.1f}{totals[2]:>26.1f}\n")


def main() -> int:
    """Returns 1 when a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-compile", action="store_true", help="leave out torch.compile")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    errors = {shape: error(Inputs(shape), shape) for shape in SHAPES}
    wrong = {shape: wrong_by for shape, wrong_by in errors.items() if not wrong_by < TOLERANCE}
    if wrong:
        print(*(f"WRONG: {shape}: off by {wrong_by:.1e}" for shape, wrong_by in wrong.items()), sep="\n")
        return 1
    print(f"{describe_machine()}; us, median (10%-90%) of {REPLAYS} replays, FP16")
    compare_kernels(errors, with_compile=not arguments.without_compile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
