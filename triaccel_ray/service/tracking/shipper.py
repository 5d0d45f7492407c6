"""From event logs to MLflow: a thread of the driver that follows the logs of all runs below a folder.

The training processes write their logs and know nothing of MLflow. What has arrived is noted beside each log: an outage
loses nothing, a restarted driver goes on where the last one stopped, and a resumed run continues its MLflow run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from triaccel_ray.service.failures import is_disk_full
from triaccel_ray.service.storage.layout import BASELINES, EVENTS
from triaccel_ray.service.tracking.shipment import Label, Shipment
from triaccel_ray.service.tracking.tracking import Tracker, TrackingUnavailableError

LONGEST_PAUSE_S = 60.0
LONGEST_MESSAGE = 500
_SQLITE_FULL = "database or disk is full"
"""What SQLite says, here or in the answer of a server."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The run of a whole search or comparison, which the runs below its folder are shown under."""

    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    pruned: Callable[[], Container[str]] = tuple
    """Returns the names of the runs that the search itself has stopped."""
    closing_tags: Callable[[], Mapping[str, str]] = dict
    """Returns the tags that are known at its end alone."""


class Shipper:
    """Ships the event logs at and below a folder; whatever the store does, no exception leaves it."""

    def __init__(
        self, tracker: Tracker, root: Path, *, experiment: str, parent: Parent | None = None, interval_s: float = 2.0
    ) -> None:
        """Remembers what to do; nothing is read or sent before `start`, `ship_once` or `flush`.

        Args:
            tracker: where to.
            root: a run's folder, or one with many runs' folders below it.
            experiment: the MLflow experiment of all runs.
            parent: stands for `root`, with the other runs as children; it ends and opens again as the log in `root`
                does. None: `root` is an ordinary run, if it has a log.
            interval_s: pause between two looks at the logs; grows up to a minute while the store fails.
        """
        self.last_error: str | None = None
        """What went wrong in the last pass, without secrets; None when all went well."""
        self._tracker, self._root, self._interval_s = tracker, root.absolute(), interval_s
        self._experiment, self._parent = experiment, parent
        self._shipments: dict[Path, Shipment] = {}
        self._turn, self._stopping, self._timeout_s = threading.Lock(), threading.Event(), 0.0
        # A daemon does not keep the process alive, and a call to a server that hangs cannot be cut short.
        self._thread = threading.Thread(target=self._follow, name="mlflow-shipper", daemon=True)

    def start(self) -> None:
        """Begins to ship from a thread of its own."""
        self._thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Ships what is left, ends the thread, and returns whether all has arrived.

        A store that answers is waited for. One that fails, or has not answered, is given up after the timeout: what
        has not arrived waits for the next process.
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
        """Ships everything written so far; returns whether that succeeded. A call under way may outlast the timeout."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.2
        while True:
            self.ship_once()
            left_s = deadline - time.monotonic()
            if self.last_error is None or left_s <= 0.0:
                return self.last_error is None
            time.sleep(min(pause_s, left_s))
            pause_s *= 2.0

    def ship_once(self) -> int:
        """Ships what is new in all logs and returns the number of events; a failure is left in `last_error`."""
        with self._turn:
            num_events, error, folder = 0, None, self._root
            try:
                if self.last_error is not None:
                    self._tracker.check()  # in three seconds, where a server that hangs would hold a call for forty
                parent_id = None if self._parent is None else self._shipment(self._root).open()
                for folder in self._folders():
                    try:
                        shown_below = folder != self._root and not self._is_baseline(folder)
                        num_events += self._shipment(folder).ship(parent_id if shown_below else None)
                    except TrackingUnavailableError:
                        raise
                    except Exception as failure:
                        error = self._describe(folder, failure)
                        # One run's trouble is its own; the store's is everyone's, and ends the pass.
                        self._tracker.check()
            except Exception as failure:  # of MLflow, the store, network or disk: training does not depend on it
                error = error or self._describe(folder, failure)
            self._report(error)
            return num_events

    def _follow(self) -> None:
        failures = 0
        while not self._stopping.wait(min(self._interval_s * 2**failures, max(LONGEST_PAUSE_S, self._interval_s))):
            self.ship_once()
            failures = 0 if self.last_error is None else min(failures + 1, 10)
        self.flush(self._timeout_s)

    def _folders(self) -> list[Path]:
        """Returns the folders with a log, children first: their parent ends after them."""
        _make_way()
        found = {path.parent for path in self._root.rglob(EVENTS)}
        # A SQLite store's own copies are no runs; they lie in <artifact root>/<run id>/artifacts.
        stored = self._tracker.artifact_root
        runs = {folder for folder in found if (folder.name, folder.parent.parent) != ("artifacts", stored)}
        return sorted(runs, key=lambda folder: (folder == self._root, folder))

    def _shipment(self, folder: Path) -> Shipment:
        if folder not in self._shipments:
            self._shipments[folder] = Shipment(self._tracker, folder, self._label(folder))
        return self._shipments[folder]

    def _label(self, folder: Path) -> Label:
        root, parent = self._root, self._parent
        key = str(folder.relative_to(root.parent)).replace("'", "_")
        label = Label(experiment=self._experiment, name=folder.name, key=key)
        if parent is None:
            return label
        if folder == root:
            closing = parent.closing_tags
            return replace(label, name=parent.name, tags=parent.tags, is_parent=True, closing_tags=closing)
        if self._is_baseline(folder):
            tags = {"kind": "baseline", "search": root.name}
            label = replace(label, name=f"{folder.name} of {root.name}", tags=tags)
        return replace(label, is_pruned=lambda: folder.name in parent.pruned())

    def _is_baseline(self, folder: Path) -> bool:
        """Returns whether the run is one that a search is judged by: it is shown beside the search, not folded away."""
        return self._parent is not None and folder.parent == self._root / BASELINES and folder.name != "probe"

    def _describe(self, folder: Path, failure: Exception) -> str:
        if _SQLITE_FULL in str(failure):
            text = f"the disk of {self._tracker.display_uri} is full: make room there"
        elif is_disk_full(failure):  # MLflow's copies do not say which disk: the one with the least room
            places = (place for place in (folder, self._tracker.artifact_root) if place.exists())
            place = min(places, key=lambda each: shutil.disk_usage(each).free)
            text = f"the disk of {place} is full: make room there"
        else:  # SQLAlchemy begins with its own doings at times, and adds the statement, with all values
            lines = (line for line in str(failure).strip().split("\n") if not line.startswith("(raised as a result of"))
            text = f"{type(failure).__name__}: {next(lines, '')}"
        return self._tracker.mask(f"{folder.name}: {text}")[:LONGEST_MESSAGE]

    def _report(self, error: str | None) -> None:
        if error is not None:
            self._shipments.clear()  # the next pass reads the logs again, and asks whether the runs are there
            if self.last_error is None:
                _logger.warning("MLflow: %s; training goes on, the event logs keep everything", error)
        elif self.last_error is not None:
            _logger.info("MLflow: everything has arrived")
        self.last_error = error


def _make_way() -> None:
    """Lowers this thread's priority: on a machine with few cores it would slow the trials whose steps are timed."""
    if sys.platform == "linux":  # elsewhere the priority is the whole process's
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
