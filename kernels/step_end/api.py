"""Entry point of the operation: selects the kernel or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from triaccel_ray.kernels.step_end import reference
from triaccel_ray.kernels.step_end.reference import LossScaleState

__all__ = ["LossScaleState", "end_step"]


@torch.no_grad()
def end_step(
    loss_sum: Tensor,
    num_samples: int,
    totals: Tensor,
    found_nonfinite: Tensor,
    state: LossScaleState,
    *,
    moves_scale: bool = True,
    kernel: bool | None = None,
) -> None:
    """Adds one step's loss to the totals and updates the loss scale, in one launch without host synchronization.

    A step with a non-finite gradient counts as skipped. Its loss, which may be non-finite too, is left out. With
    `moves_scale` the loss scale is adjusted (Micikevicius et al. 2018). Can be captured in a CUDA graph.

    Args:
        loss_sum: the loss summed over the step's samples, fp64 scalar.
        num_samples: number of samples in the step.
        totals: fp64 [rows, 2], contiguous: sums of losses, numbers of samples.
        found_nonfinite: whether any gradient was not finite, fp32 scalar, 0 or 1.
        state: the loss scale, and the counts of skipped steps.
        moves_scale: whether the step used this loss scale.
        kernel: whether to run the Triton kernel: by default on a GPU; on a CPU it needs Triton's interpreter.
    """
    if totals.is_cuda if kernel is None else kernel:
        from triaccel_ray.kernels.step_end.triton import launch  # here: triton may be missing without a GPU

        launch(loss_sum, num_samples, totals, found_nonfinite, state, moves_scale=moves_scale)
    else:
        reference.end_step(loss_sum, num_samples, totals, found_nonfinite, state, moves_scale=moves_scale)
