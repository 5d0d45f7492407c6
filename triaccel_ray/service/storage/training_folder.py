"""The local folder in which a run trains, its uploads in the background, and fencing of earlier writers.

The store's file WRITER names the training folder that owns the run; that folder may be ahead of the store. A process
that trains in another folder first downloads all files. Its first upload puts its own folder's name into WRITER, which
fences off the previous writer. StoreError means that the store cannot be reached.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import platform
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock

from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import DiskFullError, StoreError
from triaccel_ray.service.storage.layout import EVENTS, LOG_FILES, PREVIOUS, RUN_FILES, WRITER, write_atomically
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store

PATIENCE_S = 60.0
"""Seconds that a store may be unreachable when a run begins or ends; after that it is an error."""
RETRY_S = 5.0

_logger = logging.getLogger(__name__)


class TrainingFolder:
    """The local folder of a run while it trains; nothing is copied if the storage is a folder itself.

    Methods that upload raise TakenOverError if the run continues in another training folder.
    """

    def __init__(self, place: StoragePath) -> None:
        """Copies nothing yet."""
        self.path, self._place = place.training_folder, place
        self._writer_before: str | None = None
        self._pushing: RetryingThread | None = None

    def open(self, files: Sequence[str] = RUN_FILES) -> None:
        """Downloads `files` of the run, which may have begun on another machine, and starts background uploads."""
        if self._place.uri is not None:
            retry(lambda: self._download(files))
            self._pushing = RetryingThread(self.push, str(self._place))

    def push_soon(self) -> None:
        """Requests an upload of changed files in the background."""
        if self._pushing is not None:
            self._pushing.request()

    def close(self) -> None:
        """Uploads everything and ends background uploads; may be called again.

        Raises:
            StoreError: the store cannot be reached; the message names the local folder, and the command to upload it.
        """
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            with naming_local_copy(self._place, self.path):
                pushing.stop()
                retry(self.push)

    def push(self) -> None:
        """Uploads the files that have changed."""
        if not any((self.path / file).exists() for file in RUN_FILES):
            return  # a refused run must not reserve its name
        with FileLock(self.path / ".push.lock"):
            remote, writer = self._remote_state()
            own_name = self._own_name()
            if writer not in (None, own_name, self._writer_before):
                raise TakenOverError(
                    f"{self._place}: another process has taken this run over, and goes on with it ({writer}); this one "
                    "has ended and uploads nothing more"
                )

            def take_over() -> None:
                if writer != own_name:
                    content = own_name.encode()
                    Store(self._place).write(WRITER, io.BytesIO(content), len(content))
                self._writer_before = None  # even if an upload fails: the earlier writer's name now means takeover

            Store(self._place).push(self.path, RUN_FILES, remote, before=take_over)

    def _download(self, files: Sequence[str]) -> None:
        remote, self._writer_before = self._remote_state()
        if self._writer_before is not None and self._writer_before != self._own_name():
            for file in (EVENTS, *RUN_FILES, PREVIOUS):  # outdated: the run continued elsewhere
                (self.path / file).unlink(missing_ok=True)
        missing = [file for file in files if not (self.path / file).exists()]
        Store(self._place).pull(self.path, missing, remote)

    def _remote_state(self) -> tuple[dict[str, Stamp], str | None]:
        """Returns the run's files in the store, and the name of its writer."""
        store = Store(self._place)
        remote = store.files(recursive=False)
        return remote, store.read_text(WRITER) if WRITER in remote else None

    def _own_name(self) -> str:
        path = self.path / WRITER
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{platform.node()} {uuid.uuid4().hex}")
        return path.read_text()


@contextlib.contextmanager
def editing_log(place: StoragePath) -> Iterator[Path]:
    """Yields the local folder of a run that is not training; uploads the log that the body has changed."""
    folder = TrainingFolder(place)
    folder.open(LOG_FILES)
    try:
        yield folder.path
    finally:
        folder.close()


def retry(work: Callable[[], object], at_most_s: float = math.inf) -> None:
    """Calls `work`, again and again while it raises StoreError, for at most `PATIENCE_S` or `at_most_s` seconds."""
    deadline, pause_s = time.monotonic() + min(PATIENCE_S, at_most_s), 0.2
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

    def stop(self, at_most_s: float = math.inf) -> None:
        """Ends the thread; requested work that has not begun is dropped.

        Raises StoreError if the thread still waits for the store after `PATIENCE_S` or `at_most_s` seconds.
        """
        patience_s = min(PATIENCE_S, at_most_s)
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
