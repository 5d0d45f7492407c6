"""Smoothed gradient variance per layer, and detection of non-finite gradients, in one pass over a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from triaccel_ray.kernels.grad_stats import reference
from triaccel_ray.kernels.grad_stats.reference import GroupStatistics
from triaccel_ray.kernels.multi_tensor import TensorTable


class GradStats:
    """Moving averages v <- beta v + (1-beta) Var[g] of the unscaled gradient of each group (layer), on the device.

    Var is the population variance over all elements of a group's tensors. Every tensor is read once. Squares are summed
    about the mean, chunk by chunk in fp32, and combined in fp64. So no digits are lost if the mean is far from 0 (Chan,
    Golub and LeVeque, "Algorithms for computing the sample variance", 1983). No method waits for the device. Updates
    can be captured in a CUDA graph, whose replays read the current `TensorTable`s and scalars. Update once before a
    capture, with an empty table if necessary, to compile the kernels.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[int],
        *,
        num_groups: int,
        beta: float,
        device: torch.device,
        buckets: Sequence[Sequence[int]] | None = None,
        kernel: bool | None = None,
    ) -> None:
        """Prepares for tensors of `sizes` elements, tensor i in group `groups[i]`, below `num_groups`.

        `buckets` lists the indices of tensors that arrive together; each is in one bucket, by default all in the same.
        `kernel` selects the Triton kernels: by default on a GPU; on a CPU they need Triton's interpreter.
        """
        device = torch.device(device)
        self._groups, self._beta = tuple(groups), beta
        self._buckets = [list(range(len(sizes)))] if buckets is None else [list(bucket) for bucket in buckets]
        self._statistics = statistics = GroupStatistics.zeros(num_groups, device)
        self.average = statistics.average
        """v, fp64 [num_groups], biased toward its initial 0; restore in place."""
        self.count = statistics.count
        """Number of updates of each average, fp64 [num_groups]; restore in place."""
        self.found_nonfinite = statistics.found_nonfinite
        """Whether any tensor of the last update held a NaN or an infinity, fp32 scalar, 0 or 1."""
        # Statistics of the last update alone, of gradients still scaled; see `GroupStatistics`.
        self.num_elements = statistics.num_elements
        self.sum = statistics.sum
        self.sum_squares_about_mean = statistics.sum_squares_about_mean
        self._reduction = None
        if device.type == "cuda" if kernel is None else kernel:
            from triaccel_ray.kernels.grad_stats.triton import GroupReduction  # imports triton

            self._reduction = GroupReduction(sizes, groups, num_groups, self._buckets, device)
            self._beta_on_device = torch.tensor(beta, dtype=torch.float64).to(device)  # a float argument would be fp32
        else:
            self._partials = torch.zeros(len(sizes), 3, dtype=torch.float64)

    @torch.no_grad()
    def update(self, gradients: TensorTable, loss_scale: Tensor) -> Tensor:
        """Updates the averages with one step's gradients, all in one bucket; returns `found_nonfinite`.

        Gradients carry the factor `loss_scale` (fp32 scalar on the device); their variance is divided by its square.
        A group whose tensors are all absent, or that holds a non-finite element, keeps its average and count.

        Raises:
            ValueError: the number of tensors is wrong.
        """
        self.reduce(gradients)
        return self.combine(loss_scale)

    def begin(self) -> None:
        """Begins a step whose gradients arrive bucket by bucket."""
        self._statistics.found_so_far.zero_()

    @torch.no_grad()
    def reduce(self, gradients: TensorTable, bucket: int = 0) -> Tensor:
        """Reduces a bucket's gradients, which may be freed afterwards; call it once per bucket, in any order.

        Returns whether any gradient since `begin` was not finite, fp32 scalar, 0 or 1.

        Raises:
            ValueError: the number of tensors is wrong.
        """
        if gradients.num_tensors != len(self._buckets[bucket]):
            raise ValueError(f"a table of {gradients.num_tensors} gradients: must be of {len(self._buckets[bucket])}")
        if self._reduction is not None:
            self._reduction.reduce(gradients, bucket, self._statistics)
        else:
            reference.reduce(gradients.tensors, self._buckets[bucket], self._partials, self._statistics)
        return self._statistics.found_so_far

    @torch.no_grad()
    def combine(self, loss_scale: Tensor) -> Tensor:
        """Updates the averages once all buckets are reduced; returns `found_nonfinite`. See `update`."""
        if self._reduction is not None:
            self._reduction.combine(self._statistics, beta=self._beta_on_device, loss_scale=loss_scale)
        else:
            reference.combine(self._partials, self._groups, self._statistics, beta=self._beta, loss_scale=loss_scale)
        return self.found_nonfinite
