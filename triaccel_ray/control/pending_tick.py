"""A tick in progress: on a GPU, some steps pass between its observation, its decision and its record."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import End, EventLog, Start, Tick
from triaccel_ray.records.plan import FaultKind
from triaccel_ray.records.signals import Observation

_DECIDE_AFTER = 3
"""Steps between observation and decision on a GPU: while the device computes them, the host reads and decides."""
RECORD_AFTER = 8
"""Steps after which a tick is recorded: by then the host is ahead of the device, which does not have to wait."""
_LOGGER = logging.getLogger("triaccel_ray")
_EXPECTED = (
    FaultKind.COMPILED, FaultKind.PRECISION_REFUSED, FaultKind.PLAN_REPLACED, FaultKind.NOT_A_LAYER,
    FaultKind.CURVATURE_WAITS, FaultKind.CURVATURE_FALLBACK,
)  # fmt: skip
"""Kinds of faults that most runs have."""


class FaultLogger:
    """Logs each fault of a run once, at level INFO if most runs have such faults, else at level WARNING."""

    def __init__(self) -> None:
        """Starts without a fault."""
        self._logged: set[tuple[FaultKind, str]] = set()

    def __call__(self, tick: Tick) -> None:
        """Logs the faults of a tick that are new."""
        for fault in (*tick.observation.faults, *tick.applied.faults):
            if (key := (fault.kind, fault.detail)) not in self._logged:
                self._logged.add(key)
                level = logging.INFO if fault.kind in _EXPECTED else logging.WARNING
                _LOGGER.log(level, "step %d: %s: %s", fault.step, fault.kind, fault.detail)


class PendingTick:
    """Holds an observation until its decision is due, and a decided tick until its record is due."""

    def __init__(self, on_tick: Callable[[Tick], None] | None, config: ControlConfig, *, decides_late: bool) -> None:
        """Starts without a pending tick; `on_tick` receives the records. An empty `EventLog` gets its start record now.

        With `decides_late`, a decision is due `_DECIDE_AFTER` steps after the observation, and its record later still.
        Otherwise both are due at once.
        """
        self._on_tick, self.decides_late = on_tick, decides_late
        self._observe: Callable[[], Observation] | None = None
        self.decide_at = 0
        """Step after which a decision is due; at the end of an epoch it is due in any case."""
        self._unrecorded: Tick | None = None
        log = getattr(on_tick, "__self__", None)
        self._log = log if isinstance(log, EventLog) else None
        if self._log is not None and self._log.num_records == 0:
            self._log.append(Start(control=config))

    def observing(self, observe: Callable[[], Observation], *, step: int) -> None:
        """Stores `observe`, which waits for the device and returns the observation made after `step` steps."""
        self._observe, self.decide_at = observe, step + _DECIDE_AFTER

    def take_observation(self) -> Observation | None:
        """Returns the pending observation, waiting for the device if necessary; None if there is none.

        Records the previous tick first.
        """
        if self._observe is None:
            return None
        self.record()
        observation, self._observe = self._observe(), None
        return observation

    def decided(self, tick: Tick) -> None:
        """Keeps the tick until its record is due."""
        self._unrecorded = tick
        if not self.decides_late:
            self.record()

    def record(self) -> None:
        """Records the last tick, unless that is already done."""
        tick, self._unrecorded = self._unrecorded, None
        if tick is not None and self._on_tick is not None:
            self._on_tick(tick)

    def close(self) -> None:
        """Records a decided tick, and ends a log that is still open unless an exception is being handled."""
        self.record()
        log, self._log = self._log, None
        if log is not None and not log.closed and sys.exc_info()[0] is None:
            log.append(End(status="finished"))

    def state_dict(self) -> Any:
        """Returns the pending observation as plain values, or None; records a decided tick first."""
        self.record()
        if self._observe is None:
            return None
        observation = self._observe()
        self._observe = lambda: observation  # no second read from the device
        return encode(observation)

    def load_state_dict(self, state: Any) -> None:
        """Restores the state that `state_dict` returned."""
        self._observe = None
        if state is not None:
            observation = decode(Observation, state)
            self.observing(lambda: observation, step=observation.step)
