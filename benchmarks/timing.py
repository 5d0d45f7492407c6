"""Timing of GPU work by replays of a CUDA graph, compared with the time that memory bandwidth allows.

A benchmark runs the tests of what it times first: figures of wrong results are worth nothing.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import triton

ROUNDS = 5
REPLAYS = 100


@dataclass(frozen=True)
class Timing:
    """Times of one call, in microseconds, one value per replay."""

    name: str
    microseconds: Sequence[float]
    floor: float | None
    """Time to move the fewest possible bytes; see `floor_us`. None if only launches can be saved."""

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.microseconds)

    def __str__(self) -> str:
        cuts = statistics.quantiles(self.microseconds, n=20)
        spread = f"p5-p95 {cuts[0]:7.1f} -{cuts[-1]:7.1f}  n {len(self.microseconds)}"
        beside = "" if self.floor is None else f"  {self.median / self.floor:5.2f} x the floor of {self.floor:.1f} us"
        return f"{self.name:58s} {self.median:8.1f} us  {spread}{beside}"


def time_calls(name: str, calls: Sequence[Callable[[], object]], floor: float | None = None) -> Timing:
    """Returns the time of one call, from replays of a CUDA graph that repeats `calls` several times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
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
    times = [1e3 * ms / (ROUNDS * len(calls)) for ms in _event_ms(graph.replay, REPLAYS)]
    return Timing(name, times, floor)


def _event_ms(work: Callable[[], object], count: int) -> list[float]:
    """Returns the milliseconds that each of `count` calls takes on the device."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


@functools.cache
def copy_bytes_per_second() -> float:
    """Returns the bandwidth of a 1 GiB copy on this GPU, bytes read plus written; measured once per process."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / (statistics.median(_event_ms(lambda: target.copy_(source), 10)) / 1e3)


def floor_us(num_bytes: float) -> float:
    """Returns the microseconds that this GPU takes to move `num_bytes`, read or written, in a large copy."""
    return 1e6 * num_bytes / copy_bytes_per_second()


def report(tests: str, figures: Callable[[], Iterable[object]]) -> int:
    """Prints the machine and the figures and returns 0; if one of `tests` fails, prints only that and returns 1.

    `tests` are arguments of pytest.
    """
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests.split()], capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:])
        return 1
    torch.manual_seed(0)
    rate = f"a copy of 1 GiB moves {copy_bytes_per_second() / 1e9:.0f} GB/s"
    print(f"{torch.cuda.get_device_name()}, {rate}, PyTorch {torch.__version__}, Triton {triton.__version__}")
    for line in figures():
        print(line, flush=True)
    return 0
