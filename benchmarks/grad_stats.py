"""Gradient statistics of ResNet-18 (CIFAR stem) against PyTorch's: `python -m benchmarks.grad_stats`.

Replays rotate among several sets of gradients, together far larger than the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import floor_us, report, time_calls
from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.kernels.multi_tensor import TensorTable
from triaccel_ray.trainables.models import resnet18

CASES = ((torch.float32, 6, 1.0), (torch.float16, 12, 2.0**14), (torch.bfloat16, 12, 1.0))
"""Dtype of the gradients, number of sets, loss scale."""


class Case:
    """Sets of gradients of one dtype, and the kernels' statistics of them."""

    def __init__(self, dtype: torch.dtype, num_sets: int, loss_scale: float) -> None:
        parameters = [parameter.detach() for parameter in resnet18(10, "cifar").cuda().parameters()]
        self.layers, self.stats = layers_and_statistics(parameters, beta=0.0)
        self.num_bytes = sum(p.numel() for p in parameters) * dtype.itemsize
        self.sets = [
            [(1e-3 * (0.1 + torch.randn_like(p)) * loss_scale).to(dtype) for p in parameters] for _ in range(num_sets)
        ]
        self.tables = [TensorTable(len(parameters), torch.device("cuda")) for _ in self.sets]
        for table, gradients in zip(self.tables, self.sets, strict=True):
            table.point_to(gradients)
        self.loss_scale = torch.tensor(loss_scale, device="cuda")


def layers_and_statistics(parameters: Sequence[Tensor], *, beta: float) -> tuple[list[int], GradStats]:
    """Returns the indices of layers (weights of two or more dimensions), and statistics with a group for each.

    All other parameters are one more group, as in training.
    """
    layers = [index for index, parameter in enumerate(parameters) if parameter.dim() > 1]
    groups = [layers.index(index) if index in layers else len(layers) for index in range(len(parameters))]
    sizes = [parameter.numel() for parameter in parameters]
    return layers, GradStats(sizes, groups, num_groups=len(layers) + 1, beta=beta, device=torch.device("cuda"))


def tensor_by_tensor(gradients: list[Tensor], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns layers' variances and all tensors' largest magnitudes, computed with PyTorch's own reductions."""
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, float("inf"))])
    return torch.stack([torch.var_mean(gradients[i].float(), correction=0)[0] for i in layers]), largest


def foreach_norms(gradients: list[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns norms of order 2 and infinity: not enough for the variance, but all that foreach offers."""
    return torch._foreach_norm(gradients, 2), torch._foreach_norm(gradients, float("inf"))


def figures() -> Iterator[object]:
    """Yields the times of each case and method."""
    for options in CASES:
        case = Case(*options)
        calls: dict[str, list[Callable[[], object]]] = {
            "kernels": [partial(case.stats.update, table, case.loss_scale) for table in case.tables],
            "torch._foreach_norm, 2 and inf": [partial(foreach_norms, each) for each in case.sets],
            "torch.var_mean by layer + _foreach_norm": [
                partial(tensor_by_tensor, each, case.layers) for each in case.sets
            ],
        }
        for name, each in calls.items():
            yield time_calls(f"{options[0]} gradients, {name}", each, floor_us(case.num_bytes))


if __name__ == "__main__":
    sys.exit(report("tests/kernels/test_grad_stats.py", figures))
