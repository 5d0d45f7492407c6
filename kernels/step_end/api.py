"""The operation's entry: chooses between the kernel and the reference."""

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
    """Adds one step's loss to the totals and moves the loss scale, in one launch and without a look from the host.

    A step with a gradient that is not finite was not made: it counts as skipped, and its loss, which may be as infinite
    as its gradients, is left out. With `moves_scale` the loss scale follows (Micikevicius et al. 2018). Can be captured
    in a CUDA graph.

    Args:
        loss_sum: the loss summed over the step's samples, fp64 scalar.
        num_samples: how many they are.
        totals: fp64 [rows, 2], contiguous: sums of losses, numbers of samples.
        found_nonfinite: whether any gradient was not finite, fp32 scalar, 0 or 1.
        state: the loss scale, and how many steps were skipped.
        moves_scale: whether the step was made with this scale.
        kernel: whether to run the Triton kernel: by default on a GPU; on a CPU it needs Triton's interpreter.
    """
    if totals.is_cuda if kernel is None else kernel:
        from triaccel_ray.kernels.step_end.triton import launch  # here: without a GPU triton need not exist

        launch(loss_sum, num_samples, totals, found_nonfinite, state, moves_scale=moves_scale)
    else:
        reference.end_step(loss_sum, num_samples, totals, found_nonfinite, state, moves_scale=moves_scale)
