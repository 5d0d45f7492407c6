"""Following an event log that another process writes, puts another file in place of, and writes on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 2**20
"""What is read at once; a line is never split."""


class LogTail:
    """Yields the lines of one file that were not yielded before; again from the first after the file was cut back."""

    def __init__(self, path: Path) -> None:
        """Begins before the first line of the file at `path`, which need not exist yet."""
        self.path = path
        self.last_line = b""
        """Last whole line of what was read."""
        self.num_lines = 0
        """Lines read since the beginning of the file."""
        self.checksum = 0
        """CRC-32 of these lines, their ends included."""
        self._offset = 0
        self._seen: tuple[int, int, int] | None = None

    @property
    def changed(self) -> bool:
        """Whether the file was written since its end was reached."""
        return self._stamp() != self._seen

    def blocks(self) -> Iterator[list[bytes]]:
        """Yields the new whole lines, without their ends, a block at a time.

        A block counts as read once the next one is asked for: whoever fails on it gets it again.
        """
        stamp = self._stamp()
        if stamp is None:
            return
        with self.path.open("rb") as file:
            if not self._is_continued(file):
                self.restart()
            while lines := self._read(file):
                yield [line[:-1] for line in lines]
                self._offset += sum(map(len, lines))
                self.num_lines += len(lines)
                self.checksum = zlib.crc32(b"".join(lines), self.checksum)
                self.last_line = lines[-1][:-1]
        self._seen = stamp

    def restart(self) -> None:
        """Begins again before the first line."""
        self._offset, self.num_lines, self.checksum, self.last_line, self._seen = 0, 0, 0, b"", None

    def _read(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._offset)
        return [line for line in file.readlines(BLOCK_BYTES) if line.endswith(b"\n")]

    def _is_continued(self, file: BinaryIO) -> bool:
        """Returns whether the last line read is still where it was.

        A file that was cut back may have grown past its old size since; its lines bear other times then.
        """
        expected = self.last_line + b"\n" if self._offset else b""
        file.seek(self._offset - len(expected))
        return file.read(len(expected)) == expected

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns
