"""The inputs of a captured step whose samples come from the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree  # as in `model.pytree`

from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.model.pytree import map_tensors, tensors_in

Part = tuple[int, Any, Any]
"""A micro-batch: number of samples, inputs and targets."""


class StaticBatch:
    """Micro-batches at fixed places in memory, from which a graph reads."""

    def __init__(self, parts: Iterable[Part]) -> None:
        """Copies the micro-batches. What is one tensor in several places of them is one in the copy, too."""
        self.parts = [_copied(part) for part in parts]

    def fill(self, parts: Iterable[Part]) -> None:
        """Copies other micro-batches in; the host does not wait.

        Raises:
            NotCapturableError: they differ in shapes, names or in what is no tensor.
        """
        for static, fresh in zip(self.parts, parts, strict=True):
            leaves, structure = _pytree.tree_flatten(static)
            try:
                values = structure.flatten_up_to(fresh)  # by name in dictionaries, whatever the order
            except (TypeError, ValueError):
                values = []
            if len(values) != len(leaves) or not all(map(_is_alike, leaves, values)):
                raise NotCapturableError("batches of one size differ in their shapes or in what is no tensor")
            for place, tensor in zip(tensors_in(leaves), tensors_in(values), strict=True):
                place.copy_(tensor, non_blocking=True)


def _copied(part: Part) -> Part:
    made: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone()
        return made[id(tensor)]

    copy: Part = map_tensors(copied, part)
    return copy


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether a graph made with `one` may read `other` in its place."""
    try:
        return bool(_signature(one) == _signature(other))
    except (TypeError, ValueError, RuntimeError):  # of arrays, which do not compare to one truth value
        return False


def _signature(value: Any) -> Any:
    """Returns `value` with each tensor replaced by its shape and dtype."""
    return map_tensors(lambda tensor: (tensor.shape, tensor.dtype), value)
