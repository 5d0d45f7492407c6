"""Atomic, durable file writes, which survive a power failure."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


def partial_path(path: Path) -> Path:
    """Returns a new name beside `path`, for a file that is to replace it."""
    # No process ID: in a shared folder, another machine may have a process of the same ID.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")


@contextlib.contextmanager
def atomic_write(path: Path, confirm: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
    """Yields a file to write to, which replaces `path` when the block ends, once it is complete on disk.

    `confirm` is called just before. If it or anything else raises, `path` is unchanged. Otherwise the file stays open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    file = partial.open("xb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        if confirm is not None:
            confirm()
        partial.replace(path)
        if os.name == "posix":  # elsewhere folders cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        partial.unlink(missing_ok=True)
        raise
