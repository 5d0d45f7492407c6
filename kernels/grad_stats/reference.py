"""Gradient statistics in plain PyTorch, fp64: the specification of the kernels, also used on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupStatistics:
    """Results of an update, on the device. All but `average` describe the gradients as given, with the loss scale."""

    average: Tensor
    """v <- beta v + (1-beta) Var of the unscaled gradient, fp64 [num_groups]."""
    count: Tensor
    """Number of updates of `average`, fp64 [num_groups]."""
    found_nonfinite: Tensor
    """Whether any tensor held a NaN or an infinity: fp32 scalar, 0 or 1."""
    num_elements: Tensor
    """Number of elements of the present gradients, int64 [num_groups]."""
    sum: Tensor
    """Sum of the elements, fp64 [num_groups]; not finite if an element is not."""
    sum_squares_about_mean: Tensor
    """Sum of the squared deviations from the group's mean (M2), fp64 [num_groups]; not finite as above."""
    found_so_far: Tensor
    """Whether any tensor reduced since this was last zeroed held a NaN or an infinity: fp32 scalar, 0 or 1."""

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
            found_so_far=zeros(torch.float32),
        )


def reduce(
    gradients: Sequence[Tensor | None], bucket: Sequence[int], partials: Tensor, statistics: GroupStatistics
) -> None:
    """Writes each tensor's number of elements, sum and M2 to its row of `partials`, fp64 [num_tensors, 3]."""
    for index, gradient in zip(bucket, gradients, strict=True):
        elements = torch.zeros(0) if gradient is None else gradient.flatten()
        centered = elements.double()  # an fp64 copy of one tensor at a time
        number, total = centered.numel(), centered.sum()
        centered.sub_(total / max(number, 1))
        partials[index] = torch.stack([torch.full_like(total, number), total, centered.dot(centered)])
        if not total.isfinite():
            statistics.found_so_far.fill_(1.0)


def combine(
    partials: Tensor, groups: Sequence[int], statistics: GroupStatistics, *, beta: float, loss_scale: Tensor
) -> None:
    """Updates the statistics from one step's partial results; `groups[i]` is tensor i's group."""
    num_groups = len(statistics.average)
    group_of = torch.tensor(groups, dtype=torch.int64)
    number, total, squares = partials.unbind(1)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group_of, values)

    numbers, sums = summed(number), summed(total)
    mean = sums / numbers.clamp(min=1)
    # M2 = sum of M2_i + n_i (mean_i - mean)^2 over the tensors i (Chan et al. 1983).
    about = summed(squares + number * (total / number.clamp(min=1) - mean[group_of]) ** 2)
    statistics.found_nonfinite.copy_(~total.sum().isfinite())
    statistics.num_elements.copy_(numbers)
    statistics.sum.copy_(sums)
    statistics.sum_squares_about_mean.copy_(about)
    variance = statistics.sum_squares_about_mean / statistics.num_elements / loss_scale.double().square()
    usable = variance.isfinite()  # 0 / 0 if there are no elements
    statistics.average.lerp_(torch.where(usable, variance, statistics.average), 1.0 - beta)
    statistics.count.add_(usable)
