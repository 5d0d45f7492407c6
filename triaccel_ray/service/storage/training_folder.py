"""Where a run is trained on this machine, and its way from and to the store.

The store's file WRITER names the training folder that a run goes on in. That folder is ahead of the store; whoever
trains in another one takes all files first, puts that one's name there with the first files that it brings, and so
fences off whoever trained before. StoreError says that the store cannot be reached.
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
from triaccel_ray.service.storage.background import PATIENCE_S, Background, insist
from triaccel_ray.service.storage.copies import LOG, RUN, WRITER, pull, push, saying_where, store_of
from triaccel_ray.service.storage.layout import EVENTS, PREVIOUS, write_atomically
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp


class TrainingFolder:
    """A run's folder while it trains; a place that is a folder is that itself, and nothing is copied."""

    def __init__(self, place: StoragePath, *, patience_s: float = PATIENCE_S) -> None:
        """Does nothing yet; later, a store may be out of reach for `patience_s`."""
        self.path, self._place, self._patience_s = place.training_folder, place, patience_s
        self._writer_before: str | None = None
        self._pushing: Background | None = None

    def open(self, files: Sequence[str] = RUN) -> None:
        """Takes what the store has of the run, which may have begun on another machine: `files`, or all."""
        if self._place.uri is not None:
            insist(lambda: self._take(files), self._patience_s)
            self._pushing = Background(self.push, str(self._place))

    def push_soon(self) -> None:
        """Has what is new brought to the store, while training goes on.

        Raises:
            TakenOverError: the run goes on in another training folder.
        """
        if self._pushing is not None:
            self._pushing.ask()

    def close(self) -> None:
        """Brings everything to the store; may be called again.

        Raises:
            StoreError: the store cannot be reached; the message says where everything is, and how to bring it there.
            TakenOverError: the run goes on in another training folder.
        """
        pushing, self._pushing = self._pushing, None
        if pushing is not None:
            with saying_where(self._place, self.path):
                pushing.stop(self._patience_s)
                insist(self.push, self._patience_s)

    def push(self) -> None:
        """Brings what has changed here to the store.

        Raises:
            TakenOverError: the run goes on in another training folder.
        """
        if not any((self.path / file).exists() for file in RUN):
            return  # a run that is refused must not use up its name
        with FileLock(self.path / ".push.lock"):
            there, writer = self._there()
            own = self._own_name()
            if writer not in (None, own, self._writer_before):
                raise TakenOverError(
                    f"{self._place}: another process has taken this run over, and goes on with it ({writer}); this one "
                    "has ended and brings nothing more there"
                )

            def take_over() -> None:
                if writer != own:
                    name, content = f"{self._place.name}/{WRITER}", own.encode()
                    store_of(self._place).write(name, io.BytesIO(content), len(content))
                self._writer_before = None  # even if a file then fails: from here on that one's name is a takeover

            push(self._place, self.path, RUN, there, before=take_over)

    def _take(self, files: Sequence[str]) -> None:
        there, self._writer_before = self._there()
        if self._writer_before is not None and self._writer_before != self._own_name():
            for file in (EVENTS, *RUN, PREVIOUS):  # the run went on elsewhere, without these
                (self.path / file).unlink(missing_ok=True)
        pull(self._place, self.path, [file for file in files if not (self.path / file).exists()], there)

    def _there(self) -> tuple[dict[str, Stamp], str | None]:
        """Returns what the store has of the run, and the name of its writer."""
        store, name = store_of(self._place), self._place.name
        there = store.files(name, recursive=False)
        return there, store.read_text(f"{name}/{WRITER}") if WRITER in there else None

    def _own_name(self) -> str:
        path = self.path / WRITER
        if not path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{platform.node()} {uuid.uuid4().hex}")
        return path.read_text()


@contextlib.contextmanager
def edited(place: StoragePath) -> Iterator[Path]:
    """Its body writes to the log of a run that nobody trains, in the folder that it gets."""
    folder = TrainingFolder(place)
    folder.open(LOG)
    try:
        yield folder.path
    finally:
        folder.close()
