"""Users and passwords in URIs, kept out of messages, files and the list of processes."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

HIDDEN = "***@"
"""What stands in a URI in place of user and password."""

_STORE_SCHEME = re.compile(r"(.*=)?(abfss?|gs|gcs|hdfs|viewfs)")
"""Of storage paths, whose part before an @ without a colon is the name of a container or user: see `StoragePath`."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*")


def without_credentials(uri: str) -> str:
    """Returns `uri` with *** in place of user and password; the path of a file, which may hold an @, stays as it is.

    A password that should have been escaped, as one with a slash in it, is hidden too: the last @ ends it wherever what
    comes before the first slash could not be a host.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or rest.startswith("/") or "@" not in rest:
        return uri
    if _STORE_SCHEME.fullmatch(scheme) and ":" not in rest.rpartition("@")[0]:
        return uri
    if re.match(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?/", rest):
        return uri  # it stands in the path
    return f"{scheme}://{HIDDEN}{rest.rpartition('@')[2]}"


def without_passwords(text: str) -> str:
    """Returns `text` without the users and passwords of the URIs in it."""
    return _URI.sub(lambda found: without_credentials(found[0]), text)


def hide_credentials(proc: Path = Path("/proc/self")) -> None:
    """Overwrites users and passwords of URIs in the command line, which `ps` shows to everybody, with stars.

    Does nothing where there is no `/proc`. The words keep their lengths: they are overwritten in place, in memory that
    nothing else of Python uses.
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
