"""Which values a setting may take: the bounds of a number, the words of a choice."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, get_args, get_origin


def in_bounds(value: float, bounds: str) -> bool:
    """Returns whether the number lies in an interval such as `[0, 1)`; NaN never does."""
    low, high = (float(bound) for bound in bounds[1:-1].split(","))
    above = value > low if bounds[0] == "(" else value >= low
    return above and (value < high if bounds[-1] == ")" else value <= high)


def broken_rule(value: Any, kind: Any, bounds: str) -> str:
    """Returns the rule that the value of a field of this type breaks; empty where it breaks none."""
    if kind is bool:
        return "" if isinstance(value, bool) else "must be True or False"
    if get_origin(kind) is Literal:
        words = get_args(kind)
        return "" if isinstance(value, str) and value in words else f"must be one of {', '.join(words)}"
    if kind in (int, float):
        is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return "" if is_number and (not bounds or in_bounds(value, bounds)) else _number_rule(kind, bounds)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "" if isinstance(value, kind) else f"must be a {kind.__name__}"
    return ""


def _number_rule(kind: type, bounds: str) -> str:
    noun = "an integer" if kind is int else "a number"
    if not bounds:
        return f"must be {noun}"
    low, high = bounds[1:-1].split(", ")
    if high != "inf":
        return f"must be an integer in {bounds}" if kind is int else f"must lie in {bounds}"
    if kind is float and bounds[-1] == ")":
        noun = "a finite number"
    return f"must be {noun} {'>' if bounds[0] == '(' else '>='} {low}"
