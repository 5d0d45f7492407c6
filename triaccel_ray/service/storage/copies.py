"""Copies files to and from a store. Each file has one writer, which uploads it whole; all others download it.

A run writes to its training folder, on the machine where it trains (`training_folder`). A command writes to its
working copy, on the machine where it was started, and downloads the logs of runs to it (`mirror`). A copy has the size
and modification time of its original; files that agree in both are not copied again. Functions that access a store
raise StoreError while it is unreachable.

A checkpoint counts the records of its log. Whoever downloads both must find at least as many in the log. So a log is
uploaded before its checkpoint, but opened after it, and downloaded after it. The trained model is uploaded before the
log and opened after it. So if a log says how the run ended, the model is in the store.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.storage.layout import (
    CHECKPOINT,
    COMPARISON,
    DAMAGED,
    ERROR,
    EVENTS,
    FIXED_SETTING,
    JOURNAL,
    MODEL,
    PREPARED,
    REPLACED,
    REPORT,
    SEARCH,
    SETTINGS,
    SHIPPED,
    SPEC,
    TUNED_THRESHOLDS,
)
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store

LOG_FILES = (SPEC, ERROR, DAMAGED, REPLACED, EVENTS)
"""Files to view a run, though not to resume it; the log is last because it says what the others hold."""
RUN_FILES = (MODEL, *LOG_FILES, CHECKPOINT)
"""Files that a run uploads, in this order. Everything else stays on its machine."""
PAGE_FILES = (SETTINGS, TUNED_THRESHOLDS, REPORT)
WRITER = ".writer"
"""File in the store that names the training folder in which a run continues."""
COMMAND_FILES = (SEARCH, COMPARISON, PREPARED, FIXED_SETTING, JOURNAL, SHIPPED, *PAGE_FILES)
"""Files that a command writes: request, results, suggestions, MLflow state, reports. With a spec also its log."""


def push(
    place: StoragePath,
    folder: Path,
    files: Sequence[str],
    remote: Mapping[str, Stamp],
    *,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Uploads those `files` of `folder`, in this order, that the store lacks or has in another version.

    `remote` lists the store's files at `place`. Nothing is deleted in a store: a traceback that is gone here becomes an
    empty file there. `before` is called once before the first upload, and not at all if there is none.
    """
    with contextlib.ExitStack() as open_files:
        changed: dict[str, tuple[BinaryIO, int]] = {}
        for file in reversed(files):  # a checkpoint first: the log then holds all records it counts
            try:
                source = open_files.enter_context((folder / file).open("rb"))
            except FileNotFoundError:
                if file == ERROR and file in remote and remote[file].size:
                    changed[file] = io.BytesIO(), 0
                continue
            local = Stamp.of(os.fstat(source.fileno()))
            if local != remote.get(file):
                changed[file] = source, local.size  # records appended from here on are uploaded later
        if changed:
            before()
        for file, (content, num_bytes) in reversed(changed.items()):
            stamp = Store(place).write(file, content, num_bytes)
            if not isinstance(content, io.BytesIO):
                os.utime(content.fileno(), ns=(stamp.mtime_ns, stamp.mtime_ns))


def pull(place: StoragePath, folder: Path, files: Sequence[str], remote: Mapping[str, Stamp]) -> None:
    """Downloads those `files` that `folder` lacks or has in another version; an empty one deletes the local file.

    A command's file that is newer here is kept: the command may have been killed before it could upload it.

    Raises:
        DiskFullError: the disk has no room for them.
    """
    for file in reversed(files):
        path, stamp = folder / file, remote.get(file)
        if stamp is None:
            continue
        local = Stamp.of(path.stat()) if path.exists() else None
        if local == stamp:
            continue
        if local is not None and file in COMMAND_FILES and local.mtime_ns > stamp.mtime_ns:
            continue
        if stamp.size == 0:
            path.unlink(missing_ok=True)
            continue
        Store(place).read(file, path)
        os.utime(path, ns=(stamp.mtime_ns, stamp.mtime_ns))


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
