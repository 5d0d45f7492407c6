"""Keeps the working copies of commands in sync with a store; raises StoreError if it cannot be reached."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from filelock import FileLock, Timeout

from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import DiskFullError, StoreError, cause_of
from triaccel_ray.service.storage.layout import (
    COMMAND_FILES,
    COMPARISON,
    EVENTS,
    LOG_FILES,
    SEARCH,
    folder_in_use,
    is_set_of_runs,
    name_in_use,
)
from triaccel_ray.service.storage.storage_path import StoragePath, is_plain_name
from triaccel_ray.service.storage.store import Stamp, Store
from triaccel_ray.service.storage.training_folder import (
    PATIENCE_S,
    RetryingThread,
    TrainingFolder,
    naming_local_copy,
    retry,
)

INTERVAL_S = 5.0
"""Seconds between two synchronizations of a command with the store."""

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def mirrored(place: StoragePath) -> Iterator[None]:
    """Syncs a command's working copy with the store while the body runs; does nothing if the storage is a folder.

    Uploads the command's files, and downloads the logs of runs. Before and after the body it also uploads files that
    runs on this machine could not. If another process has taken over the command's work, nothing more is uploaded.

    Raises:
        StoreError: the store is unreachable at the start or end, or another command on this machine works on `place`.
    """
    if place.uri is None:
        yield
        return

    def sync() -> None:
        _push_commands(place)
        _pull_logs(place)

    def sync_all() -> None:
        _push_runs(place)
        sync()

    try:
        lock = _lock(place).acquire(timeout=PATIENCE_S)
    except Timeout:
        raise StoreError(
            f"{place}: another process of this machine works on it; wait for it, or end it, then go on with "
            "`triaccel resume`"
        ) from None
    with lock:
        sync_all()
        background = RetryingThread(sync, str(place), interval_s=INTERVAL_S)
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(StoreError):  # the last sync below uploads what is missing
                background.stop(5.0)
            if cause_of(error) != "taken_over":
                try:  # briefly: the user is waiting for the error message
                    with naming_local_copy(place, StoragePath(place.storage).folder):
                        retry(sync_all, 5.0)
                except (StoreError, DiskFullError) as failure:
                    _logger.warning("%s", failure)
            raise
        with naming_local_copy(place, StoragePath(place.storage).folder):
            background.stop()
            retry(sync_all)


def upload(place: StoragePath, files: Sequence[str]) -> None:
    """Uploads files that a command has just written at `place`; logs a warning if it cannot."""
    if place.uri is not None:
        try:
            Store(place).push(place.folder, files, Store(place).files(recursive=False))
        except StoreError as error:
            _logger.warning("%s: on this machine alone for now: %s", ", ".join(files), error)


def pull_all(place: StoragePath) -> None:
    """Downloads the files at and below `place`, without checkpoints and models, unless a command here already does."""
    if place.uri is None:
        return
    if not place.folder.exists():
        _push_runs(place)  # a run that began here and has uploaded nothing yet
    if folders := _remote_folders(place):
        with contextlib.suppress(Timeout), _lock(place).acquire(timeout=0.0):
            for folder, remote in folders:
                Store(folder).pull(folder.folder, (*COMMAND_FILES, *LOG_FILES), remote)


def pull_run(place: StoragePath) -> None:
    """Downloads the logs of runs at and below `place`, wherever they train."""
    if place.uri is not None:
        retry(lambda: _pull_logs(place))


def require_unused(place: StoragePath) -> None:
    """Raises ValueError if something exists at `place`, here or in the store; it is left unchanged."""
    if place.uri is None:
        if place.folder.exists():
            raise folder_in_use(place.folder)
        return
    is_here = any(place.folder.glob("*")) or any(place.training_folder.rglob(EVENTS))
    if is_here or Store(place).files(recursive=True):
        raise name_in_use(place.base_name, str(place))


def _pull_logs(place: StoragePath) -> None:
    for folder, remote in _remote_folders(place):
        if not remote.keys() & {SEARCH, COMPARISON}:  # its command writes its log
            Store(folder).pull(folder.folder, LOG_FILES, remote)


def _push_commands(place: StoragePath) -> None:
    remote = dict(_remote_folders(place))
    for path in (place.folder, *place.folder.rglob("*/")):
        folder = place / path.relative_to(place.folder)
        files = (*COMMAND_FILES, EVENTS) if is_set_of_runs(path) else COMMAND_FILES
        Store(folder).push(path, files, remote.get(folder, {}))


def _push_runs(place: StoragePath) -> None:
    """Uploads files that runs on this machine could not upload, except for runs that continue elsewhere."""
    root = place.training_folder
    for log in sorted(root.rglob(EVENTS)):
        with contextlib.suppress(TakenOverError):
            TrainingFolder(place / log.parent.relative_to(root)).push()


def _remote_folders(place: StoragePath) -> list[tuple[StoragePath, dict[str, Stamp]]]:
    """Returns the folders at and below `place` in the store, and the files in each."""
    stamps: dict[str, dict[str, Stamp]] = {}
    for path, stamp in Store(place).files(recursive=True).items():
        folder, _, file = path.rpartition("/")
        parts = folder.split("/") if folder else []
        if all(map(is_plain_name, parts)):  # a key may be ../../anything
            stamps.setdefault(folder, {})[file] = stamp
    return [(place / folder, files) for folder, files in sorted(stamps.items())]


def _lock(place: StoragePath) -> FileLock:
    """Returns the lock of the command that works on `place`, or on the search or comparison that it belongs to."""
    root = StoragePath(place.storage).folder
    root.mkdir(parents=True, exist_ok=True)
    return FileLock(root / f".{place.name.partition('/')[0]}.lock")
