"""Hides users and passwords of URLs and addresses from messages."""

from __future__ import annotations

import re

_LOGIN = re.compile(r"\b(https?|ray)://\S*@", re.IGNORECASE)
"""User and password of a URL, up to the last @: an unescaped password may hold slashes."""


def without_passwords(text: str) -> str:
    """Returns `text` with *** in place of the users and passwords of the URLs in it."""
    return _LOGIN.sub(r"\1://***@", text)


def display_address(address: str) -> str:
    """Returns `address`, with or without a scheme, without user and password."""
    return re.sub(r"^(\w+://)?.*@", r"\1***@", address)
