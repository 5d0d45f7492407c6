"""Runs work that needs a remote store, with retries: in the calling thread, or in the background."""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import DiskFullError, StoreError
from triaccel_ray.service.storage.storage_path import StoragePath

PATIENCE_S = 60.0
"""Seconds that a store may be unreachable when a run begins or ends; after that it is an error."""
RETRY_S = 5.0

_logger = logging.getLogger(__name__)


def retry(work: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Calls `work`, and retries it with backoff while it raises StoreError.

    Raises:
        StoreError: the store is still unreachable after `patience_s` seconds.
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


@contextlib.contextmanager
def naming_local_copy(place: StoragePath, folder: Path) -> Iterator[None]:
    """Extends a StoreError of the body: says that the files are in `folder`, and which command uploads them."""
    try:
        yield
    except StoreError as error:
        whole = place.name.partition("/")[0]  # for a trial, its search
        command = shlex.join(["triaccel", "resume", whole, "--storage-path", place.storage])
        raise StoreError(
            f"not everything of {place} is in the store ({error}). Nothing is lost: it is in {folder} on this "
            f"machine, and `{command}` typed here uploads it once the store answers"
        ) from error


class RetryingThread:
    """Runs `work` in a background thread; retries it if the store is unreachable or the disk is full."""

    def __init__(self, work: Callable[[], object], what: str, *, interval_s: float | None = None) -> None:
        """Starts the thread.

        Args:
            work: the function to call.
            what: its name in messages.
            interval_s: seconds after which it is called without a request; None: only on request.
        """
        self._work, self._what, self._interval_s = work, what, interval_s
        self._requested, self._is_ending = threading.Event(), False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"mirror {what}", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Requests a call of `work` soon; raises the error that has ended the thread, if any."""
        if self._error is not None and not self._thread.is_alive():
            raise self._error
        self._requested.set()

    def stop(self, patience_s: float) -> None:
        """Ends the thread; requested work that has not begun is dropped.

        Raises:
            StoreError: the thread still waits for the store after `patience_s` seconds.
        """
        self._is_ending = True
        self._requested.set()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise StoreError(f"{self._what}: the store has not answered for {patience_s:.0f} s")

    def _run(self) -> None:
        while True:
            self._requested.wait(self._interval_s if self._error is None else RETRY_S)
            self._requested.clear()
            if self._is_ending:
                return
            try:
                self._work()
            except (StoreError, DiskFullError, OSError) as error:
                if self._error is None:
                    _logger.warning("%s: %s. Training continues, and files are uploaded later", self._what, error)
                self._error = error
            except Exception as error:
                if not isinstance(error, TakenOverError):  # `request` raises it, but may never be called for others
                    _logger.exception("%s: nothing more is uploaded in the background", self._what)
                self._error = error
                return
            else:
                if self._error is not None:
                    _logger.warning("%s: the store has everything again", self._what)
                self._error = None
