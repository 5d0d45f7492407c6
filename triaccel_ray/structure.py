"""Nested containers of tensors, as models take and return them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns `value` with every tensor in it replaced by `function` of it; containers keep their types.

    Mappings, named tuples, tuples and lists are walked through; anything else that is no tensor stays as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if isinstance(value, dict):  # of any kind, such as one that knows a default
            same = copy.copy(value)
            same.update(items)
            return same
        return type(value)(items)  # type: ignore[call-arg]  # as mappings are made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in `value`, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found
