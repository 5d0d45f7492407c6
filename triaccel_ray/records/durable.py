"""Files that are whole on the disk, or not there: what survives a power cut."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(path: Path, confirm: Callable[[], None] | None = None) -> Iterator[BinaryIO]:
    """Yields a file for what `path` is to hold; it takes that name once the block has ended, whole on the disk.

    `confirm` is called just before. If that or anything else raises, `path` stays as it was. The file stays open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process's number, which is another's on another machine of a shared folder.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    file = partial.open("xb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        if confirm is not None:
            confirm()
        partial.replace(path)
        if os.name == "posix":  # where folders can be opened
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
