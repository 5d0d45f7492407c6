"""Wall-clock time of the training part of an epoch."""

from __future__ import annotations

import time

import torch


class EpochClock:
    """Times one epoch, the device synchronised at both ends; what was timed before a checkpoint is carried over."""

    def __init__(self, device: torch.device) -> None:
        """Starts at zero, stopped."""
        self._device = device
        self._carried = 0.0
        self._started: float | None = None

    def start(self) -> None:
        """Starts or goes on; does nothing while running."""
        if self._started is None:
            self._synchronize()
            self._started = time.perf_counter()

    def glance(self) -> float:
        """Returns the seconds so far as the host sees them."""
        return self._carried + (0.0 if self._started is None else time.perf_counter() - self._started)

    def seconds(self) -> float:
        """Returns the seconds so far, synchronising the device."""
        if self._started is not None:
            self._synchronize()
        return self.glance()

    def finish(self) -> float:
        """Returns the epoch's seconds and goes back to zero, stopped."""
        total = self.seconds()
        self.restore(0.0)
        return total

    def restore(self, seconds: float) -> None:
        """Goes to `seconds`, stopped."""
        self._carried, self._started = seconds, None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
