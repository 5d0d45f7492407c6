"""Timing of single training steps, and a time limit for work beside training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch

_NUM_FIRST_STEPS = 2
_MIN_STEPS = 4
"""Fewest steps for a median; that of fewer is too noisy."""


def synchronize(device: torch.device) -> None:
    """Waits for a GPU to finish its work; returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepTimer:
    """Times the steps between two ticks: on a CPU each by itself, on a GPU from one step's end to the next one's.

    On a CPU it measures the calling thread's processor time. With one thread, other work on its core does not count.
    With several, this one spins while it waits for the others, so the shortest step counts in place of the median.
    The first steps of a plan do not count: libraries prepare for its shapes in them. Timing does not wait for a GPU:
    events are recorded, and read once the device has reached them.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts without timed steps."""
        self._device = device
        self._last: Any = None  # seconds on a CPU, an event on a GPU
        self._spans: list[tuple[Any, Any]] = []
        self._num_to_skip = _NUM_FIRST_STEPS

    @property
    def num_timed(self) -> int:
        """Number of steps timed since the last reading."""
        return len(self._spans)

    def begin(self) -> None:
        """Marks the start of a step."""
        if self._last is None or self._device.type == "cpu":
            self._last = self._mark()

    def end(self, *, counts: bool) -> None:
        """Marks the end of a step; `counts` is True for a step on a whole batch, the only kind that is timed."""
        now = self._mark()
        if counts and self._num_to_skip:
            self._num_to_skip -= 1
        elif counts and self._last is not None:
            self._spans.append((self._last, now))
        self._last = now

    def interrupt(self) -> None:
        """Marks that other work precedes the next step, so that it does not count as part of it."""
        self._last = None

    def restart(self) -> None:
        """Discards the steps so far: later ones are of another kind, and other work precedes them."""
        self._last, self._spans, self._num_to_skip = None, [], _NUM_FIRST_STEPS

    def read(self) -> Callable[[], float | None]:
        """Returns a function that gives a step's milliseconds, as the class says, once the steps are done; starts over.

        With too few steps the function gives None, and they count toward the next reading.
        """
        if len(self._spans) < _MIN_STEPS:
            return lambda: None
        spans, self._spans = self._spans, []
        if self._device.type == "cpu":
            typical = median if torch.get_num_threads() == 1 else min
            return lambda: typical(1e3 * (last - first) for first, last in spans)
        return lambda: median(first.elapsed_time(last) for first, last in spans)

    def state_dict(self) -> dict[str, Any]:
        """Returns the steps timed so far, so that a resumed run reads its next time at the same tick; none on a GPU."""
        if self._device.type != "cpu":
            return {}
        return {"num_to_skip": self._num_to_skip, "seconds": [last - first for first, last in self._spans]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self.restart()
        if state and self._device.type == "cpu":
            self._num_to_skip = state["num_to_skip"]
            self._spans = [(0.0, seconds) for seconds in state["seconds"]]

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class TimeShare:
    """Limits work beside training to a share of the elapsed time; without a share there is no limit.

    The next piece of work is assumed to take as long as the last one, unless `expect` gives another estimate. `share`
    may be set anew if it is not None.
    """

    def __init__(self, device: torch.device, share: float | None) -> None:
        """Starts the clock."""
        self._device, self.share = device, share
        self._began = time.perf_counter()
        self._spent_seconds = self._last_seconds = 0.0

    @property
    def seconds_to_wait(self) -> float:
        """Seconds until another piece of work fits the share; 0 if it fits now."""
        if self.share is None:
            return 0.0
        due = (self._spent_seconds + self._last_seconds) / self.share
        return max(due - (time.perf_counter() - self._began), 0.0)

    def expect(self, seconds: float) -> None:
        """Sets how long the next piece of work is expected to take."""
        self._last_seconds = seconds

    @contextlib.contextmanager
    def timed(self, *, counts: bool = True) -> Iterator[None]:
        """Times the work inside, waiting for the device; without `counts` only as an estimate of the next piece."""
        if self.share is None:
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
