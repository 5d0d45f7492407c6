"""Hides users and passwords of URIs from messages, files and the process list."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

HIDDEN = "***@"
"""Replaces user and password in a URI."""

_STORE_SCHEME = re.compile(r"(.*=)?(abfss?|gs|gcs|hdfs|viewfs)")
"""Schemes of storage paths, where text without a colon before an @ names a container or user: see `StoragePath`."""
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]*")


def without_credentials(uri: str) -> str:
    """Returns `uri` with *** in place of user and password; a file path, which may hold an @, is left unchanged.

    An unescaped password, such as one with a slash, is hidden too: if the text before the first slash cannot be a host,
    the last @ ends the password.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or rest.startswith("/") or "@" not in rest:
        return uri
    if _STORE_SCHEME.fullmatch(scheme) and ":" not in rest.rpartition("@")[0]:
        return uri
    if re.match(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d+)?/", rest):
        return uri  # the @ is in the path
    return f"{scheme}://{HIDDEN}{rest.rpartition('@')[2]}"


def without_passwords(text: str) -> str:
    """Returns `text` without the users and passwords of the URIs in it."""
    return _URI.sub(lambda found: without_credentials(found[0]), text)


def hide_credentials(proc: Path = Path("/proc/self")) -> None:
    """Overwrites users and passwords of URIs in this process's command line, which `ps` shows to everyone, with stars.

    Does nothing without `/proc`. Words keep their lengths: they are overwritten in place, in memory that Python does
    not use otherwise.
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
    """Returns the word with stars in place of user and password, at its original length."""
    before, mark, after = without_credentials(os.fsdecode(word)).partition(HIDDEN)
    if not mark:
        return word
    head, tail = os.fsencode(before), b"@" + os.fsencode(after)
    return head + b"*" * (len(word) - len(head) - len(tail)) + tail
