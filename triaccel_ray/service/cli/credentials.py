"""The command line of this process, as `ps` shows it to everybody on the machine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from triaccel_ray.service.tracking.tracking import HIDDEN, without_credentials


def hide_credentials(proc: Path = Path("/proc/self")) -> None:
    """Overwrites users and passwords of URIs in the command line with stars; does nothing where there is no `/proc`.

    The words keep their lengths: they are overwritten in place, in memory that nothing else of Python uses.
    """
    try:
        line = (proc / "cmdline").read_bytes()
        start = int((proc / "stat").read_text().rpartition(")")[2].split()[45])  # field 48, arg_start
    except (OSError, ValueError, IndexError):
        return
    hidden = b"\0".join(map(_starred, line.split(b"\0")))
    if hidden != line and start and ctypes.string_at(start, len(line)) == line:
        ctypes.memmove(start, hidden, len(hidden))


def _starred(word: bytes) -> bytes:
    """Returns the word with stars in place of user and password, as long as it was."""
    before, mark, after = without_credentials(os.fsdecode(word)).partition(HIDDEN)
    if not mark:
        return word
    head, tail = os.fsencode(before), b"@" + os.fsencode(after)
    return head + b"*" * (len(word) - len(head) - len(tail)) + tail
