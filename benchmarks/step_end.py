"""The end of a training step (loss, sample count, loss scale) beside PyTorch: `python -m benchmarks.step_end`.

Microseconds a call, from replays of a CUDA graph: a handful of scalars, so that launches are all there is to save.
Times nothing and exits with 1 when a result is wrong.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks.timing import describe_machine, time_calls
from triaccel_ray.kernels.step_end import LossScaleState, end_step
from triaccel_ray.kernels.step_end.reference import end_step as reference

NUM_SAMPLES = 96


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
        how(self.loss_sum, NUM_SAMPLES, self.totals, self.found, self.state, moves_scale=True)

    def results(self, how: Callable[..., None], overflows: Iterable[bool]) -> list[Tensor]:
        """Returns everything that has changed after steps of which some overflowed."""
        for overflow in overflows:
            self.found.fill_(float(overflow))
            self.run(how)
        state = self.state
        return [self.totals, state.scale, state.num_finite, state.num_skipped, state.num_skipped_in_row]


def main() -> int:
    """Prints the figures; returns 1 when a result is wrong."""
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    overflows = [False, False, False, True, False, True, True, False, False, False]
    ours, exact = (Setup().results(how, overflows) for how in (end_step, reference))
    if not all(map(torch.equal, ours, exact)):
        print("WRONG: the kernel's totals or loss scale are not the reference's")
        return 1
    print(describe_machine())
    ways = {"triaccel_ray.kernels.step_end": end_step, "PyTorch": reference, "torch.compile": torch.compile(reference)}
    for name, how in ways.items():
        times = time_calls(name, [partial(Setup().run, how)], floor=1.0).microseconds
        cuts = statistics.quantiles(times, n=20)
        print(f"{name:20} {statistics.median(times):6.2f} us  p5-p95 {cuts[0]:.2f} - {cuts[-1]:.2f}  n {len(times)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
