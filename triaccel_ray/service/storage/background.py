"""Work that needs a store which may be out of reach: insisted on, or done in a thread beside those who train."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import DiskFullError, StoreError

PATIENCE_S = 60.0
"""How long a store may be out of reach where a run begins or ends, until that counts as an error."""
RETRY_S = 5.0

_logger = logging.getLogger(__name__)


def insist(work: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Does `work`, again and again while the store cannot be reached.

    Raises:
        StoreError: it still could not be after `patience_s`.
    """
    deadline, pause_s = time.monotonic() + patience_s, 0.2
    while True:
        try:
            work()
            return
        except StoreError:
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2.0 * pause_s, RETRY_S)


class Background:
    """Does one kind of work in a thread of its own, and again where the store, or room on the disk, is missing."""

    def __init__(self, work: Callable[[], object], what: str, *, interval_s: float | None = None) -> None:
        """Begins at once.

        Args:
            work: what to do.
            what: names it in messages.
            interval_s: pause after which it is done without being asked; None: never.
        """
        self._work, self._what, self._interval_s = work, what, interval_s
        self._asked, self._is_ending = threading.Event(), False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._go_on, name=f"mirror {what}", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Has the work done soon; raises what has ended the thread."""
        if self._error is not None and not self._thread.is_alive():
            raise self._error
        self._asked.set()

    def stop(self, patience_s: float) -> None:
        """Ends the thread; work that has not begun is not done any more.

        Raises:
            StoreError: the thread still waits for the store after `patience_s`.
        """
        self._is_ending = True
        self._asked.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise StoreError(f"{self._what}: the store has not answered for {patience_s:.0f} s")

    def _go_on(self) -> None:
        while True:
            self._asked.wait(self._interval_s if self._error is None else RETRY_S)
            self._asked.clear()
            if self._is_ending:
                return
            try:
                self._work()
            except (StoreError, DiskFullError, OSError) as error:
                if self._error is None:
                    _logger.warning("%s: %s. Work goes on, and is brought there later", self._what, error)
                self._error = error
            except Exception as error:
                if not isinstance(error, TakenOverError):  # which `ask` tells, and others may never be asked for
                    _logger.exception("%s: nothing more is brought to the store meanwhile", self._what)
                self._error = error
                return
            else:
                if self._error is not None:
                    _logger.warning("%s: the store has everything again", self._what)
                self._error = None
