"""Gradient statistics in plain PyTorch, fp64: the specification of the kernels, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """What one update writes, on the device. Everything but `average` is of the gradients as given: scaled."""

    average: Tensor
    """v <- beta v + (1-beta) Var of the unscaled gradient, fp64 [num_groups]."""
    count: Tensor
    """Updates that entered `average`, fp64 [num_groups]."""
    found_nonfinite: Tensor
    """Whether any tensor, in a group or not, held a NaN or an infinity: fp32 scalar, 0 or 1."""
    num_elements: Tensor
    """Elements of the gradients present, int64 [num_groups]."""
    sum: Tensor
    """Sum of the elements, fp64 [num_groups]; not finite where an element is not."""
    sum_squares_about_mean: Tensor
    """Sum of the squared deviations from the group's mean (M2), fp64 [num_groups]; not finite as above."""

    @classmethod
    def zeros(cls, num_groups: int, device: torch.device) -> GroupStatistics:
        """Returns the statistics before the first update."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            average=zeros(torch.float64, num_groups),
            count=zeros(torch.float64, num_groups),
            found_nonfinite=zeros(torch.float32),
            num_elements=zeros(torch.int64, num_groups),
            sum=zeros(torch.float64, num_groups),
            sum_squares_about_mean=zeros(torch.float64, num_groups),
        )


def update(
    gradients: Sequence[Tensor | None],
    groups: Sequence[int | None],
    statistics: GroupStatistics,
    *,
    beta: float,
    loss_scale: Tensor,
) -> None:
    """Takes in the gradients of one step; `groups[i]` is the group of tensor i, None for one watched alone."""
    members: list[list[Tensor]] = [[] for _ in range(len(statistics.average) + 1)]
    for gradient, group in zip(gradients, groups, strict=True):
        if gradient is not None and gradient.numel():
            members[-1 if group is None else group].append(gradient.flatten())  # the last of no group
    sums, squares, numbers = [], [], []
    for of in members:
        elements = torch.cat(of or [torch.zeros(0)]).double()  # a copy, in fp64, of one group at a time
        number, total = elements.numel(), elements.sum()
        centred = elements.sub_(total / max(number, 1))
        numbers.append(number)
        sums.append(total)
        squares.append(centred.dot(centred))
    is_finite = torch.stack(sums).sum().isfinite()
    statistics.found_nonfinite.copy_(~is_finite)
    statistics.num_elements.copy_(torch.tensor(numbers[:-1]))
    torch.stack(sums[:-1], out=statistics.sum)
    torch.stack(squares[:-1], out=statistics.sum_squares_about_mean)
    variance = statistics.sum_squares_about_mean / statistics.num_elements / loss_scale.double().square()
    usable = variance.isfinite()  # no element: 0 / 0
    statistics.average.lerp_(torch.where(usable, variance, statistics.average), 1.0 - beta)
    statistics.count.add_(usable)
