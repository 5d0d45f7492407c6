"""The end of a step as one Triton program."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triaccel_ray.kernels.multi_tensor import on_device
from triaccel_ray.kernels.step_end.reference import LossScaleState


def launch(
    loss_sum: Tensor,
    num_samples: int,
    totals: Tensor,
    found_nonfinite: Tensor,
    state: LossScaleState,
    *,
    moves_scale: bool,
) -> None:
    """Launches the kernel of `reference.end_step`."""
    with on_device(totals.device):
        _end_step_kernel[(1,)](
            loss_sum, num_samples, totals, len(totals), found_nonfinite,
            state.scale, state.num_finite, state.num_skipped, state.num_skipped_in_row,
            state.growth_interval, state.minimum, state.maximum,
            MOVES_SCALE=moves_scale, ROWS=triton.next_power_of_2(len(totals)), num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_samples", "num_rows", "growth_interval"])
def _end_step_kernel(
    loss_sum, num_samples, totals, num_rows, found_nonfinite,
    scale, num_finite, num_skipped, num_skipped_in_row, growth_interval, minimum, maximum,
    MOVES_SCALE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    skipped = tl.load(found_nonfinite)
    one = tl.where(skipped > 0.0, 1.0, 0.0)
    tl.store(num_skipped, tl.load(num_skipped) + one)
    tl.store(num_skipped_in_row, (tl.load(num_skipped_in_row) + 1.0) * one)
    if MOVES_SCALE:
        finite = tl.where(skipped > 0.0, 0.0, tl.load(num_finite) + 1.0)
        grow = finite >= growth_interval
        factor = tl.where(skipped > 0.0, 0.5, tl.where(grow, 2.0, 1.0))
        moved = tl.minimum(tl.maximum(tl.load(scale) * factor, minimum), maximum)
        tl.store(num_finite, tl.where(grow, 0.0, finite))
        tl.store(scale, moved)
    row = tl.arange(0, ROWS)
    mask = row < num_rows
    loss = tl.where(skipped > 0.0, 0.0, tl.load(loss_sum))
    count = tl.where(skipped > 0.0, 0, num_samples)
    losses = tl.load(totals + 2 * row, mask=mask, other=0.0)
    counts = tl.load(totals + 2 * row + 1, mask=mask, other=0.0)
    tl.store(totals + 2 * row, losses + loss, mask=mask)
    tl.store(totals + 2 * row + 1, counts + count, mask=mask)
