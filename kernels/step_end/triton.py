"""The end of a step as one program."""

# ruff: noqa: N803  constants of a compilation are written in capitals, as everywhere in Triton
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
# (Triton ships no types, and compiles no annotation but its own)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.multi_tensor import on_device
from kernels.step_end.reference import LossScaleState


def launch(
    loss_sum: Tensor, num_samples: int, totals: Tensor, found_nonfinite: Tensor, state: LossScaleState | None
) -> None:
    """Does what the reference does."""
    # Without a scale the pointers are read by nobody; any of the right dtype will do.
    scale = found_nonfinite if state is None else state.scale
    num_finite = found_nonfinite if state is None else state.num_finite
    num_skipped = loss_sum if state is None else state.num_skipped
    with on_device(totals.device):
        _end_step_kernel[(1,)](
            loss_sum,
            num_samples,
            totals,
            len(totals),
            found_nonfinite,
            scale,
            num_finite,
            num_skipped,
            0 if state is None else state.growth_interval,
            1.0 if state is None else state.minimum,
            1.0 if state is None else state.maximum,
            HAS_SCALE=state is not None,
            ROWS=triton.next_power_of_2(len(totals)),
            num_warps=1,
            enable_fp_fusion=True,
        )


@triton.jit(do_not_specialize=["num_samples", "num_rows", "growth_interval"])
def _end_step_kernel(
    loss_sum,
    num_samples,
    totals,
    num_rows,
    found_nonfinite,
    scale,
    num_finite,
    num_skipped,
    growth_interval,
    minimum,
    maximum,
    HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
):
    skipped = 0.0 * tl.load(found_nonfinite)
    if HAS_SCALE:
        skipped = tl.load(found_nonfinite)
        finite = tl.where(skipped > 0.0, 0.0, tl.load(num_finite) + 1.0)
        grow = finite >= growth_interval
        factor = tl.where(skipped > 0.0, 0.5, tl.where(grow, 2.0, 1.0))
        moved = tl.minimum(tl.maximum(tl.load(scale) * factor, minimum), maximum)
        tl.store(num_finite, tl.where(grow, 0.0, finite))
        tl.store(scale, moved)
        tl.store(num_skipped, tl.load(num_skipped) + tl.where(skipped > 0.0, 1.0, 0.0))
    row = tl.arange(0, ROWS)
    mask = row < num_rows
    loss = tl.where(skipped > 0.0, 0.0, tl.load(loss_sum))
    count = tl.where(skipped > 0.0, 0, num_samples)
    losses = tl.load(totals + 2 * row, mask=mask, other=0.0)
    counts = tl.load(totals + 2 * row + 1, mask=mask, other=0.0)
    tl.store(totals + 2 * row, losses + loss, mask=mask)
    tl.store(totals + 2 * row + 1, counts + count, mask=mask)
