"""How often work beside training is done, so that training keeps nearly all of the time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

SHARE = 0.05
"""Of the time, for what is paced."""
NEGLIGIBLE_S = 0.25
"""What took less is done whenever it may be."""


class Pace:
    """Says when work that took long the last time may be done again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has been done yet."""
        self._clock = clock
        self._ended, self._took = 0.0, 0.0

    @property
    def is_due(self) -> bool:
        """Whether what the work took the last time would be at most `SHARE` of the time since, with it, or little."""
        waited = self._clock() - self._ended
        return self._took < NEGLIGIBLE_S or self._took <= SHARE * (waited + self._took)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Notes how long the work inside takes."""
        began = self._clock()
        try:
            yield
        finally:
            self._ended = self._clock()
            self._took = self._ended - began
