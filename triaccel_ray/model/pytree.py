"""Nested values that hold tensors, as models take and return them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree  # no public name yet; torch.func and Hugging Face register their types there


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Returns `value` with every tensor in it replaced by `function` of it; containers keep their types.

    Descends into containers that PyTorch's pytree knows (tuples, named tuples, lists, dicts, `ModelOutput`), other
    mappings and dataclasses. Other values that are not tensors stay as they are.
    """
    if isinstance(value, Tensor):
        return function(value)
    return _pytree.tree_map(lambda leaf: _map_leaf(function, leaf), value)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in `value`, in the order in which `map_tensors` meets them; rebuilds no container."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
            continue
        for item in _items_of(leaf):
            found += tensors_in(item)
    return found


def numbers_in(value: Any) -> list[int | float]:
    """Returns the Python numbers in `value`, flags among them, in the order of its leaves."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, int | float)]


def clone_tensors(value: Any) -> Any:
    """Returns `value` with copies of its tensors; one tensor in several places is one in the copy, too."""
    made: dict[int, Tensor] = {}

    def cloned(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
        return made[id(tensor)]

    return map_tensors(cloned, value)


def copy_tensors(target: Any, source: Any) -> None:
    """Copies the tensors of `source` into those of `target`, a value alike; by name in mappings, whatever their order.

    The host does not wait.
    """
    if isinstance(target, Tensor):
        target.copy_(source, non_blocking=True)
    elif isinstance(target, Mapping):
        for key, value in target.items():
            copy_tensors(value, source[key])
    elif isinstance(target, tuple | list):
        for pair in zip(target, source, strict=True):
            copy_tensors(*pair)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            copy_tensors(getattr(target, field.name), getattr(source, field.name))
    else:
        for pair in zip(tensors_in(target), tensors_in(source), strict=True):
            copy_tensors(*pair)


def widened(value: Any) -> Any:
    """Returns `value` with its floating-point tensors of less than 32 bits in FP32."""
    return map_tensors(lambda x: x.float() if x.is_floating_point() and x.itemsize < 4 else x, value)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _items_of(leaf: Any) -> Iterable[Any]:
    """Returns what a container that pytree does not know holds; nothing of other values."""
    if isinstance(leaf, Mapping):
        return [item for _, item in leaf.items()]
    if isinstance(leaf, tuple | list):
        return leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    return ()


def _map_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if isinstance(leaf, Mapping):
        items = {key: map_tensors(function, item) for key, item in leaf.items()}
        if not isinstance(leaf, dict):
            return type(leaf)(items)  # type: ignore[call-arg]  # the usual constructor of mappings
        mapping = copy.copy(leaf)  # keeps its class and state, such as a default factory
        for key, item in items.items():
            mapping[key] = item
        return mapping
    if isinstance(leaf, tuple | list):  # a subclass that pytree does not know
        return type(leaf)(map_tensors(function, item) for item in leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        same = copy.copy(leaf)  # `dataclasses.replace` would run the class's own checks on what `function` returns
        for field in dataclasses.fields(leaf):
            object.__setattr__(same, field.name, map_tensors(function, getattr(leaf, field.name)))
        return same
    return leaf
