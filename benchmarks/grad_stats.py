"""Gradient statistics of ResNet-18 (CIFAR stem) against PyTorch's: `python -m benchmarks.grad_stats`.

Times are per update, from replays of a CUDA graph that goes round several sets of gradients, together far larger than
the L2 cache. Exits with 1 when a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import describe_machine, floor_us, time_calls
from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.kernels.multi_tensor import TensorTable
from triaccel_ray.trainables.models import resnet18


class Case:
    """Sets of gradients of one dtype, and our statistics of them."""

    def __init__(self, dtype: torch.dtype, num_sets: int, loss_scale: float) -> None:
        device = torch.device("cuda")
        parameters = [parameter.detach() for parameter in resnet18(10, "cifar").to(device).parameters()]
        # As the control loop does: a layer is a weight of two or more dimensions.
        layers = [index for index, parameter in enumerate(parameters) if parameter.dim() > 1]
        groups = [layers.index(index) if index in layers else None for index in range(len(parameters))]
        sizes = [parameter.numel() for parameter in parameters]
        self.layers, self.dtype = layers, dtype
        self.num_bytes = sum(sizes) * dtype.itemsize
        self.sets = [
            [(1e-3 * (0.1 + torch.randn_like(p)) * loss_scale).to(dtype) for p in parameters] for _ in range(num_sets)
        ]
        self.tables = [TensorTable(len(sizes), device, sizes=sizes) for _ in self.sets]
        for table, gradients in zip(self.tables, self.sets, strict=True):
            table.point_to(gradients)
        self.loss_scale = torch.tensor(loss_scale, device=device)
        self.stats = GradStats(sizes, groups, num_groups=len(layers), beta=0.0, device=device)

    def is_right(self) -> bool:
        """Returns whether variance and the search for non-finite values agree with fp64."""
        found = self.stats.update(self.tables[0], self.loss_scale).item()
        variance = torch.stack([self.sets[0][i].double().var(correction=0) for i in self.layers])
        expected = variance / self.loss_scale.double() ** 2
        right = bool(((self.stats.average / expected - 1.0).abs() < 2e-6).all()) and found == 0.0
        self.sets[0][-1][3] = float("inf")
        found = self.stats.update(self.tables[0], self.loss_scale).item()
        self.sets[0][-1][3] = 0.0
        return right and found == 1.0


def tensor_by_tensor(gradients: list[Tensor], layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns variances of the layers and the largest magnitude of each tensor, with PyTorch's own reductions."""
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, float("inf"))])
    return torch.stack([torch.var_mean(gradients[i].float(), correction=0)[0] for i in layers]), largest


def foreach_norms(gradients: list[Tensor], layers: Sequence[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Returns norms of order 2 and infinity: less than the variance needs, but all that foreach offers."""
    return torch._foreach_norm(gradients, 2), torch._foreach_norm(gradients, float("inf"))


def compare(case: Case) -> None:
    """Prints the times of one case."""
    calls: dict[str, list[Callable[[], object]]] = {
        "triaccel_ray.kernels.grad_stats": [partial(case.stats.update, table, case.loss_scale) for table in case.tables]
    }
    peers: dict[str, Callable[..., object]] = {
        "torch._foreach_norm, 2 and inf": foreach_norms,
        "torch.var_mean by layer + _foreach_norm": tensor_by_tensor,
    }
    for name, peer in peers.items():
        calls[name] = [partial(peer, gradients, case.layers) for gradients in case.sets]
    print(f"{case.dtype} gradients".removeprefix("torch."))
    for name, each in calls.items():
        print(time_calls(f"  {name}", each, floor_us(case.num_bytes)), flush=True)


def main() -> int:
    """Prints the figures; returns 1 when a result is wrong."""
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    torch.manual_seed(0)
    print(describe_machine())
    for dtype, num_sets, loss_scale in (
        (torch.float32, 6, 1.0),
        (torch.float16, 12, 2.0**14),
        (torch.bfloat16, 12, 1.0),
    ):
        case = Case(dtype, num_sets, loss_scale)
        if not case.is_right():
            print(f"WRONG: statistics of {dtype} gradients do not agree with fp64")
            return 1
        compare(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
