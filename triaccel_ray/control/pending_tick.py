"""A tick under way: on a GPU some steps lie between what is seen, the decision on it, and the record of both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import End, EventLog, Start, Tick
from triaccel_ray.records.signals import Observation

_DECIDE_AFTER = 3
"""Steps after which a tick on a GPU decides: while the device makes them, the host has time to read and to think."""
RECORD_AFTER = 8
"""Steps after a tick when it is put on record: the host has run ahead of the device, which need not wait for that."""


class PendingTick:
    """Keeps what was observed until it is time to decide on it, and what was decided until it is time to record it."""

    def __init__(self, on_tick: Callable[[Tick], None] | None, config: ControlConfig, *, decides_late: bool) -> None:
        """Begins with nothing under way; `on_tick` takes the records, an empty `EventLog` first its start record.

        With `decides_late`, a decision is due `_DECIDE_AFTER` steps after the observation and its record later still;
        without, both at once.
        """
        self._on_tick, self.decides_late = on_tick, decides_late
        self._observe: Callable[[], Observation] | None = None
        self.decide_at = 0
        """The step after which a decision is due; at the end of an epoch it is due in any case."""
        self._unrecorded: Tick | None = None
        log = getattr(on_tick, "__self__", None)
        self._log = log if isinstance(log, EventLog) else None
        if self._log is not None and self._log.num_records == 0:
            self._log.append(Start(control=config))

    def observing(self, observe: Callable[[], Observation], *, step: int) -> None:
        """Takes what will return, once the device has come that far, what was seen after `step` steps."""
        self._observe, self.decide_at = observe, step + _DECIDE_AFTER

    def take_observation(self) -> Observation | None:
        """Returns what was observed, waiting for the device if need be; None if that has been decided on.

        The tick before is put on record first.
        """
        if self._observe is None:
            return None
        self.record()
        observation, self._observe = self._observe(), None
        return observation

    def decided(self, tick: Tick) -> None:
        """Keeps the tick for its record."""
        self._unrecorded = tick
        if not self.decides_late:
            self.record()

    def record(self) -> None:
        """Puts the last tick on record, if it is not there yet."""
        tick, self._unrecorded = self._unrecorded, None
        if tick is not None and self._on_tick is not None:
            self._on_tick(tick)

    def close(self) -> None:
        """Records what can be; ends a log that is still open, unless an error is on its way through the caller."""
        self.record()
        log, self._log = self._log, None
        if log is not None and not log.closed and sys.exc_info()[0] is None:
            log.append(End(status="finished"))

    def state_dict(self) -> Any:
        """Returns the observation that is not yet decided on, as plain values, or None; records what can be."""
        self.record()
        if self._observe is None:
            return None
        observation = self._observe()
        self._observe = lambda: observation  # the device need not be asked again
        return encode(observation)

    def load_state_dict(self, state: Any) -> None:
        """Goes on from where `state_dict` was taken."""
        self._observe = None
        if state is not None:
            observation = decode(Observation, state)
            self.observing(lambda: observation, step=observation.step)
