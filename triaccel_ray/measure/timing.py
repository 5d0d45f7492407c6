"""Time of single steps, and of work beside the training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

_NUM_FIRST_STEPS = 2
_MIN_STEPS = 4
"""Of fewer steps a median is one of chance."""


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTimer:
    """Times steps between two ticks: on a CPU each by itself, on a GPU from one step's end to the next one's.

    On a CPU it is the computing thread's processor time, which other processes on the same cores do not lengthen. The
    first steps of a plan do not count: libraries prepare in them for its shapes.
    Nothing waits for a GPU: events are recorded, and read once the device has come that far.
    """

    def __init__(self, device: torch.device) -> None:
        """Has timed nothing yet."""
        self._device = device
        self._last: Any = None  # seconds on a CPU, an event on a GPU
        self._spans: list[tuple[Any, Any]] = []
        self._num_to_skip = _NUM_FIRST_STEPS

    def begin(self) -> None:
        """Notes that a step begins."""
        if self._last is None or self._device.type == "cpu":
            self._last = self._mark()

    def end(self, *, counts: bool) -> None:
        """Notes that a step has ended; `counts` where it was one of a whole batch."""
        now = self._mark()
        if counts and self._num_to_skip:
            self._num_to_skip -= 1
        elif counts and self._last is not None:
            self._spans.append((self._last, now))
        self._last = now

    def interrupt(self) -> None:
        """Notes that other work comes before the next step."""
        self._last = None

    def restart(self) -> None:
        """Forgets the steps so far: those that follow are of another kind, after other work."""
        self._last, self._spans, self._num_to_skip = None, [], _NUM_FIRST_STEPS

    def read(self) -> Callable[[], float | None]:
        """Returns what gives the median step in milliseconds once the steps are done, and begins anew.

        With too few steps it gives None, and they count towards the next reading.
        """
        if len(self._spans) < _MIN_STEPS:
            return lambda: None
        spans, self._spans = self._spans, []
        if self._device.type == "cpu":
            return lambda: median(1e3 * (last - first) for first, last in spans)
        return lambda: median(first.elapsed_time(last) for first, last in spans)

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class TimeShare:
    """Keeps work beside the training within a share of the time since it began; without a share all is allowed.

    The next piece is taken to last as long as the last one, where `expect` says nothing else.
    """

    def __init__(self, device: torch.device, share: float | None) -> None:
        """Starts the clock."""
        self._device, self._share = device, share
        self._began = time.perf_counter()
        self._spent_seconds = self._last_seconds = 0.0

    @property
    def seconds_to_wait(self) -> float:
        """Seconds after which another piece would be within the share; 0 where it is so now."""
        if self._share is None:
            return 0.0
        due = (self._spent_seconds + self._last_seconds) / self._share
        return max(due - (time.perf_counter() - self._began), 0.0)

    def expect(self, seconds: float) -> None:
        """Expects the next piece to take this long."""
        self._last_seconds = seconds

    @contextlib.contextmanager
    def timed(self, *, counts: bool = True) -> Iterator[None]:
        """Times the piece of work inside, and waits for the device to do so; one that does not count is a sample."""
        if self._share is None:
            yield
            return
        synchronize(self._device)
        began = time.perf_counter()
        try:
            yield
            synchronize(self._device)
        finally:
            self._last_seconds = time.perf_counter() - began
            self._spent_seconds += self._last_seconds if counts else 0.0
