"""Ships event logs to MLflow: a thread of the driver tails the logs of all runs below a folder.

Training processes write their logs and do not use MLflow. A file beside each log records what has arrived. So an outage
loses nothing, a restarted driver continues where the last one stopped, and a resumed run continues its MLflow run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from triaccel_ray.service.failures import is_disk_full
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.shipment import ParentRun, Shipment
from triaccel_ray.service.tracking.tracker import Tracker, TrackingUnavailableError

MAX_PAUSE_S = 60.0
MAX_MESSAGE_LENGTH = 500
_SQLITE_FULL = "database or disk is full"
"""SQLite's message, raised here or returned by a server."""

_logger = logging.getLogger(__name__)


class Shipper:
    """Ships the event logs at and below a folder to MLflow; raises no exception, whatever the store does."""

    def __init__(
        self, tracker: Tracker, root: Path, *, experiment: str, parent: ParentRun | None = None, interval_s: float = 2.0
    ) -> None:
        """Stores the arguments; nothing is read or sent before `start`, `ship_once` or `flush`.

        Args:
            tracker: the store to ship to.
            root: a run's folder, or one with many runs' folders below it.
            experiment: the MLflow experiment of all runs.
            parent: the parent run, for the log in `root`; it ends and reopens as that log does. None: `root` is an
                ordinary run, if it has a log.
            interval_s: pause between two passes over the logs; grows up to a minute while the store fails.
        """
        self.last_error: str | None = None
        """Error of the last pass, without secrets; None if it succeeded."""
        self._tracker, self._root, self._interval_s = tracker, root.absolute(), interval_s
        self._experiment, self._parent = experiment, parent
        self._shipments: dict[Path, Shipment] = {}
        self._pass_lock, self._stopping, self._timeout_s = threading.Lock(), threading.Event(), 0.0
        # A daemon, as a call to a hanging server cannot be aborted and must not keep the process alive.
        self._thread = threading.Thread(target=self._follow, name="mlflow-shipper", daemon=True)

    def start(self) -> None:
        """Starts the thread that ships."""
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Ships the remaining events, ends the thread, and returns whether everything has arrived.

        Waits as long as the store answers. If it fails or does not answer, gives up after the timeout; the next
        process ships the rest.
        """
        self._timeout_s, began = timeout_s, time.monotonic()
        self._stopping.set()
        if self._thread.ident is None:
            self.start()
        while self._thread.is_alive():
            self._thread.join(0.1)
            asked_at = self._tracker.asked_at
            if asked_at is not None and time.monotonic() - max(asked_at, began) > timeout_s:
                self.last_error = f"the store has not answered for {timeout_s:.0f} s"
                return False
        return self.last_error is None

    def flush(self, timeout_s: float) -> bool:
        """Ships everything written so far; returns whether that succeeded. A running call may outlast the timeout."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.2
        while True:
            self.ship_once()
            left_s = deadline - time.monotonic()
            if self.last_error is None or left_s <= 0.0:
                return self.last_error is None
            time.sleep(min(pause_s, left_s))
            pause_s *= 2.0

    def ship_once(self) -> int:
        """Ships the new events of all logs and returns their number; a failure is stored in `last_error`."""
        with self._pass_lock:
            num_events, folder = 0, self._root
            error: str | None = None
            try:
                if self.last_error is not None:
                    self._tracker.check()  # takes at most 3 s; a call to a hanging server takes 40 s
                parent_id = None if self._parent is None else self._shipment(self._root).open()
                for folder in self._folders():
                    try:
                        num_events += self._shipment(folder).ship(parent_id)
                    except TrackingUnavailableError:
                        raise
                    except Exception as failure:
                        error = self._describe(folder, failure)
                        # An error of one run does not affect the others; an unavailable store ends the pass.
                        self._tracker.check()
            except Exception as failure:  # from MLflow, store, network or disk: training must go on
                error = error or self._describe(folder, failure)
            self._report(error)
            return num_events

    def _follow(self) -> None:
        if sys.platform == "linux":  # elsewhere the priority is the whole process's
            with contextlib.suppress(OSError):
                # On a machine with few cores this thread would slow trials, whose steps are timed.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        pause_s = self._interval_s
        while not self._stopping.wait(pause_s):
            self.ship_once()
            longer_s = min(2.0 * pause_s, max(MAX_PAUSE_S, self._interval_s))
            pause_s = self._interval_s if self.last_error is None else longer_s
        self.flush(self._timeout_s)

    def _folders(self) -> list[Path]:
        """Returns the folders with a log, children first: their parent ends after them."""
        folders = {path.parent for path in self._root.rglob(EVENTS)}
        # Copies that a SQLite store keeps, in <artifact root>/<run id>/artifacts, are not runs.
        stored = self._tracker.artifact_root
        runs = [each for each in folders if not (each.name == "artifacts" and each.parent.parent == stored)]
        return sorted(runs, key=lambda folder: (folder == self._root, folder))

    def _shipment(self, folder: Path) -> Shipment:
        if folder not in self._shipments:
            self._shipments[folder] = Shipment(
                self._tracker, folder, self._root, experiment=self._experiment, parent=self._parent
            )
        return self._shipments[folder]

    def _describe(self, folder: Path, failure: Exception) -> str:
        if _SQLITE_FULL in str(failure):
            text = f"the disk of {self._tracker.uri} is full: make room there"
        elif is_disk_full(failure):  # MLflow's copying does not say which disk: take the one with the least room
            disks = (path for path in (folder, self._tracker.artifact_root) if path.exists())
            fullest = min(disks, key=lambda path: shutil.disk_usage(path).free)
            text = f"the disk of {fullest} is full: make room there"
        else:  # SQLAlchemy may put a note first, and adds the statement with all values
            lines = (line for line in str(failure).strip().split("\n") if not line.startswith("(raised as a result of"))
            text = f"{type(failure).__name__}: {next(lines, '')}"
        return f"{folder.name}: {text}"[:MAX_MESSAGE_LENGTH]

    def _report(self, error: str | None) -> None:
        if error is not None:
            self._shipments.clear()  # the next pass rereads the logs, and verifies that the runs exist
            if self.last_error is None:
                _logger.warning("MLflow: %s; training goes on, the event logs keep everything", error)
        elif self.last_error is not None:
            _logger.info("MLflow: everything has arrived")
        self.last_error = error
