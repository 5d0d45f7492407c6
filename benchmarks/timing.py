"""Times of GPU work from replays of a CUDA graph, beside what memory allows, and the machine that they hold for."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

ROUNDS = 5
REPLAYS = 100


@dataclass(frozen=True)
class Timing:
    """Times of one call, in microseconds, one per replay."""

    name: str
    microseconds: Sequence[float]
    floor: float
    """Time in which the fewest possible bytes pass; see `floor_us`."""

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.microseconds)

    def __str__(self) -> str:
        cuts = statistics.quantiles(self.microseconds, n=20)
        return (
            f"{self.name:58s} {self.median:8.1f} us  p5-p95 {cuts[0]:7.1f} -{cuts[-1]:7.1f}  n {len(self.microseconds)}"
            f"  {self.median / self.floor:5.2f} x the floor of {self.floor:.1f} us"
        )


def time_calls(name: str, calls: Sequence[Callable[[], object]], floor: float) -> Timing:
    """Returns the time of one call, over replays of a graph that goes round `calls` several times."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(ROUNDS):
            for call in calls:
                call()
    for _ in range(5):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) / (ROUNDS * len(calls)) for begin, end in events]
    return Timing(name, times, floor)


@functools.cache
def copy_bytes_per_second() -> float:
    """Returns what a copy of 1 GiB on this GPU moves, bytes read and written; measured once a process."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times_ms = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return float(2 * 2**30 / (statistics.median(times_ms) / 1e3))


def floor_us(num_bytes: float) -> float:
    """Returns the microseconds in which this GPU moves as many bytes, read or written, in a large copy."""
    return 1e6 * num_bytes / copy_bytes_per_second()


def describe_machine() -> str:
    """Returns the GPU, what a large copy moves on it, and the versions that the figures hold for."""
    rate = f"a copy of 1 GiB moves {copy_bytes_per_second() / 1e9:.0f} GB/s"
    return f"{torch.cuda.get_device_name()}, {rate}, PyTorch {torch.__version__}, Triton {triton.__version__}"
