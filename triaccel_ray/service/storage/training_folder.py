"""The local folder in which a run trains, its synchronization with the store, and fencing of earlier writers.

The store's file WRITER names the training folder that owns the run; that folder may be ahead of the store. A process
that trains in another folder first downloads all files. Its first upload puts its own folder's name into WRITER, which
fences off the previous writer. StoreError means that the store cannot be reached.
"""

from __future__ import annotations

import contextlib
import io
import platform
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock

from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.storage.layout import EVENTS, LOG_FILES, PREVIOUS, RUN_FILES, WRITER, write_atomically
from triaccel_ray.service.storage.retrying import PATIENCE_S, RetryingThread, naming_local_copy, retry
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store


class TrainingFolder:
    """The local folder of a run while it trains; nothing is copied if the storage is a folder itself."""

    def __init__(self, place: StoragePath, *, patience_s: float = PATIENCE_S) -> None:
        """Stores the arguments; `patience_s` is how long, in seconds, the store may be unreachable later."""
        self.path, self._place, self._patience_s = place.training_folder, place, patience_s
        self._writer_before: str | None = None
        self._pushing: RetryingThread | None = None

    def open(self, files: Sequence[str] = RUN_FILES) -> None:
        """Downloads `files` of the run, which may have begun on another machine, and starts background uploads."""
        if self._place.uri is not None:
            retry(lambda: self._download(files), self._patience_s)
            self._pushing = RetryingThread(self.push, str(self._place))

    def push_soon(self) -> None:
        """Requests an upload of changed files in the background.

        Raises:
            TakenOverError: the run continues in another training folder.
        """
        if self._pushing is not None:
            self._pushing.request()

    def close(self) -> None:
        """Uploads everything and ends background uploads; may be called again.

        Raises:
            StoreError: the store cannot be reached; the message names the local folder, and the command to upload it.
            TakenOverError: the run continues in another training folder.
        """
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            with naming_local_copy(self._place, self.path):
                pushing.stop(self._patience_s)
                retry(self.push, self._patience_s)

    def push(self) -> None:
        """Uploads the files that have changed.

        Raises:
            TakenOverError: the run continues in another training folder.
        """
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
