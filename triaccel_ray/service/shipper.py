"""From event logs to MLflow: a thread of the driver that follows the logs of all runs below a folder.

The training processes write their logs and know nothing of MLflow. What was shipped is kept beside each log, in
`mlflow.json`: an outage loses nothing, a restarted driver goes on where the last one stopped, and a resumed run goes on
in the MLflow run that it had.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from triaccel_ray.service.log_tail import LogTail
from triaccel_ray.service.tracking import Tracker

EVENTS = "events.jsonl"
SHIPPED = "mlflow.json"
FIGURES = "figures"
ARTIFACTS = (EVENTS, "spec.json", FIGURES)
"""What is uploaded of a run's folder when the run ends."""

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
"""MLflow's own limits."""
LONGEST_PAUSE_S = 60.0
LOCK_TIMEOUT_S = 10.0

_STATUS: Mapping[str, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The run of the whole search or comparison, which the runs below the folder are shown under."""

    name: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """What is on record of one folder's run: the content of its `mlflow.json`."""

    store: str
    """Where it is on record: another store gets everything from the beginning."""
    key: str
    """Tag that the MLflow run is found by; fixed before the run is created."""
    run_id: str | None = None
    """None until MLflow has assigned it."""
    cursor: int = -1
    """Sequence of the last event shipped; ends do not count, for a resumed run writes on in their place."""
    start_ms: int | None = None
    """Time of the start record shipped last."""
    end_ms: int | None = None
    """Time of the end record shipped; None while the run goes on."""


class Shipper:
    """Ships the event logs at and below `root`; whatever the store does, no exception leaves it."""

    def __init__(
        self, tracker: Tracker, root: Path, *, experiment: str, parent: Parent | None = None, interval_s: float = 2.0
    ) -> None:
        """Remembers what to do; nothing is read or sent before `start`, `ship_once` or `flush`.

        Args:
            tracker: where to.
            root: a run's folder, or one with many runs' folders below it.
            experiment: the MLflow experiment of all runs.
            parent: the run that stands for `root` itself and has the others as children; it ends when the log in
                `root` does. None: `root` is an ordinary run, if it has a log.
            interval_s: pause between two looks at the logs; grows up to a minute while the store fails.
        """
        self.last_error: str | None = None
        """What went wrong in the last pass, secrets masked; None when all went well."""
        self._tracker, self._root, self._experiment = tracker, root.absolute(), experiment
        self._parent, self._parent_id, self._interval_s = parent, None, interval_s
        self._tails: dict[Path, LogTail] = {}
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begins to ship from a daemon thread, which does not keep the process alive."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._follow, name="mlflow-shipper", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after the pass it is in; what is not shipped stays for the next `flush` or process."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def flush(self, timeout_s: float) -> bool:
        """Ships everything written so far; returns whether that succeeded. A call under way may outlast the timeout."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.2
        while True:
            self.ship_once()
            left_s = deadline - time.monotonic()
            if self.last_error is None or left_s <= 0.0:
                return self.last_error is None
            time.sleep(min(pause_s, left_s))
            pause_s *= 2.0

    def ship_once(self) -> int:
        """Ships what is new in all logs and returns the number of events; failures are left in `last_error`."""
        with self._turn:
            num_events, error = 0, None
            try:
                if self._parent is not None and self._parent_id is None:
                    num_events += self._ship_run(self._root)
                for folder in self._folders():
                    try:
                        num_events += self._ship_run(folder)
                    # Whatever store, network or a damaged log raise: training does not depend on it.
                    except Exception as failure:
                        error = self._describe(folder, failure)
                        self._tracker.check()
            except Exception as failure:
                # The store itself is out of reach: the other runs would only wait for the same.
                error = self._describe(self._root, failure)
            self._report(error)
            return num_events

    def _follow(self) -> None:
        failures = 0
        while not self._stopping.wait(min(self._interval_s * 2**failures, max(LONGEST_PAUSE_S, self._interval_s))):
            self.ship_once()
            failures = 0 if self.last_error is None else min(failures + 1, 10)

    def _folders(self) -> list[Path]:
        """Returns the folders with a log, the parent's last: it ends after its children."""
        found = {path.parent for path in self._root.rglob(EVENTS)} - {self._root}
        # A store's copies of logs are no runs.
        stored = self._tracker.artifact_root
        runs = sorted(folder for folder in found if stored not in folder.parents)
        return [*runs, self._root] if (self._root / EVENTS).exists() else runs

    def _ship_run(self, folder: Path) -> int:
        tail = self._tails.setdefault(folder, LogTail(folder / EVENTS))
        is_parent = self._parent is not None and folder == self._root
        if not tail.changed and not (is_parent and self._parent_id is None):
            return 0
        # Two drivers may follow the same folder: one that was given up, and the one that took over.
        with FileLock(folder / f".{SHIPPED}.lock", timeout=LOCK_TIMEOUT_S):
            ...
        return 0
