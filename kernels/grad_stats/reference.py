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
    largest_magnitude: Tensor
    """Largest absolute value, fp32 [num_groups]: infinity or NaN where an element is; 0 without elements."""
    num_nonfinite: Tensor
    """Elements that are NaN or infinite, int64 [num_groups]."""

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
            largest_magnitude=zeros(torch.float32, num_groups),
            num_nonfinite=zeros(torch.int64, num_groups),
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
    members: list[list[Tensor]] = [[] for _ in range(len(statistics.average))]
    alone: list[Tensor] = []
    for gradient, group in zip(gradients, groups, strict=True):
        if gradient is not None and gradient.numel():
            (alone if group is None else members[group]).append(gradient.flatten())
    empty = torch.zeros(0, dtype=torch.float64)
    for group, of in enumerate(members):
        elements = torch.cat([empty, *of])  # a copy, in fp64
        total, number = elements.sum(), elements.numel()
        statistics.num_elements[group], statistics.sum[group] = number, total
        statistics.largest_magnitude[group] = elements.abs().amax() if number else 0.0
        statistics.num_nonfinite[group] = 0 if total.isfinite() else (~elements.isfinite()).sum()
        centred = elements.sub_(total / max(number, 1))
        statistics.sum_squares_about_mean[group] = centred.dot(centred)
    others = torch.cat([empty, *alone])
    found = bool(statistics.num_nonfinite.any()) or not bool(others.isfinite().all())
    statistics.found_nonfinite.fill_(float(found))
    variance = statistics.sum_squares_about_mean / statistics.num_elements / loss_scale.double().square()
    usable = variance.isfinite()  # no element: 0 / 0
    smoothed = beta * statistics.average + (1.0 - beta) * variance
    statistics.average.copy_(torch.where(usable, smoothed, statistics.average))
    statistics.count.add_(usable)
