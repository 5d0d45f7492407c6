"""Reads the new lines of an event log that another process appends to, or replaces."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 2**20
"""Bytes read at once; a line is never split."""


class TruncatedLogError(Exception):
    """A log no longer has the last line that was read: it was cut, or replaced."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a log has been read; by default, not at all."""

    num_lines: int = 0
    num_bytes: int = 0
    last_bytes: int = 0
    """Length of the last line read."""
    last_checksum: int = 0
    """CRC-32 of that line. Each line has its time, so a log that another attempt has written differs in it."""

    def after(self, lines: Sequence[bytes]) -> Position:
        """Returns the position after further lines, of which there is at least one."""
        return Position(
            num_lines=self.num_lines + len(lines),
            num_bytes=self.num_bytes + sum(map(len, lines)),
            last_bytes=len(lines[-1]),
            last_checksum=zlib.crc32(lines[-1]),
        )


def lines_after(position: Position, path: Path) -> Iterator[list[bytes]]:
    """Yields the complete lines after `position`, with their line ends, in blocks.

    Raises:
        TruncatedLogError: the last line that was read is no longer there. Size alone does not show this: the file may
            have grown again since.
    """
    with path.open("rb") as file:
        file.seek(position.num_bytes - position.last_bytes)
        if zlib.crc32(file.read(position.last_bytes)) != position.last_checksum:
            raise TruncatedLogError
        while lines := [line for line in file.readlines(BLOCK_BYTES) if line.endswith(b"\n")]:
            yield lines
            position = position.after(lines)
            file.seek(position.num_bytes)
