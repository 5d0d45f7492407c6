"""The end of a training step (loss, sample count, loss scale) against PyTorch: `python -m benchmarks.step_end`.

The work is a handful of scalars, so only launches can be saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.timing import Timing, report, time_calls
from triaccel_ray.kernels.step_end import LossScaleState, end_step
from triaccel_ray.kernels.step_end.reference import end_step as reference


class Setup:
    """The scalars of one step."""

    def __init__(self) -> None:
        self.loss_sum = torch.full((), 2.5, dtype=torch.float64, device="cuda")
        self.totals = torch.zeros(2, 2, dtype=torch.float64, device="cuda")
        self.found = torch.zeros((), device="cuda")
        self.state = LossScaleState(
            scale=torch.full((), 2.0**16, device="cuda"),
            num_finite=torch.zeros((), device="cuda"),
            num_skipped=torch.zeros((), dtype=torch.float64, device="cuda"),
            num_skipped_in_row=torch.zeros((), dtype=torch.float64, device="cuda"),
            growth_interval=3,
            minimum=1.0,
            maximum=2.0**24,
        )

    def run(self, how: Callable[..., None]) -> None:
        """Ends one step."""
        how(self.loss_sum, 96, self.totals, self.found, self.state, moves_scale=True)


def figures() -> Iterator[Timing]:
    """Yields the times of each variant."""
    for name, how in {"kernel": end_step, "PyTorch": reference, "torch.compile": torch.compile(reference)}.items():
        yield time_calls(name, [partial(Setup().run, how)])


if __name__ == "__main__":
    sys.exit(report("tests/kernels/test_step_end.py", figures))
