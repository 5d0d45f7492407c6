"""Tails an event log that another process appends to, or replaces by another file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 2**20
"""Bytes read at once; a line is never split."""


class LogTail:
    """Yields the new lines of one file, like `tail -F`; starts over at the first line if the file was truncated."""

    def __init__(self, path: Path) -> None:
        """Starts at the first line of `path`, which need not exist yet."""
        self.path = path
        self.last_line = b""
        """Last complete line read."""
        self.num_lines = 0
        """Lines read since the beginning of the file."""
        self.checksum = 0
        """CRC-32 of these lines, line ends included."""
        self._offset = 0
        self._seen: tuple[int, int, int] | None = None

    @property
    def changed(self) -> bool:
        """Whether the file has changed since its end was last reached."""
        return self._stamp() != self._seen

    def blocks(self) -> Iterator[list[bytes]]:
        """Yields the new complete lines, without line ends, in blocks.

        A block counts as read once the next one is requested: a caller that fails on it gets it again.
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
        """Starts over at the first line."""
        self._offset, self.num_lines, self.checksum, self.last_line, self._seen = 0, 0, 0, b"", None

    def _read(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._offset)
        return [line for line in file.readlines(BLOCK_BYTES) if line.endswith(b"\n")]

    def _is_continued(self, file: BinaryIO) -> bool:
        """Returns whether the last line read is still where it was.

        Size alone does not show truncation: the file may have regrown since. Its new lines have other timestamps.
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
