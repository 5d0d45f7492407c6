"""Parses and formats amounts of memory and counts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

_FACTORS: Final[Mapping[str, int]] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_BINARY: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def parse_bytes(text: str, name: str = "amount of memory") -> int:
    """Returns the number of bytes in `text`: a positive number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB.

    Raises:
        ValueError: `text` is not such an amount; the message calls it `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    factors = {unit.lower(): factor for unit, factor in _FACTORS.items()}
    amount = float(match[1]) * factors.get(match[2].lower(), 0) if match else 0.0
    if not 1 <= amount < math.inf:
        raise ValueError(f"{name} = {text!r}: must be a positive number with a unit, such as 2GiB or 1500MB")
    return int(amount)


def counted(number: int, noun: str) -> str:
    """Returns `number` and the noun, with an s unless `number` is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(num_bytes: float) -> str:
    """Returns `num_bytes` in the largest binary unit of which it is at least one, to three digits."""
    for unit, factor in _BINARY[:-1]:
        if (amount := num_bytes / factor) >= 1:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_exactly(num_bytes: int) -> str:
    """Returns `num_bytes` as text for an option: in the largest binary unit of which it is a whole number."""
    unit, factor = next(pair for pair in _BINARY if num_bytes % pair[1] == 0)
    return f"{num_bytes // factor}{unit}"
