"""The inputs of a captured step whose samples come from the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.model.pytree import clone_tensors, copy_tensors, map_tensors

Part = tuple[int, Any, Any]
"""A micro-batch: number of samples, inputs and targets."""


class StaticBatch:
    """Micro-batches at fixed places in memory, from which a graph reads."""

    def __init__(self, parts: Iterable[Part]) -> None:
        """Copies the micro-batches."""
        self.parts: list[Part] = [clone_tensors(part) for part in parts]

    def fill(self, parts: Iterable[Part]) -> None:
        """Copies other micro-batches in; the host does not wait.

        Raises:
            NotCapturableError: they differ from the first ones in shapes, dtypes, keys or values that are no tensors.
        """
        for static, fresh in zip(self.parts, parts, strict=True):
            if not _is_alike(static, fresh):
                raise NotCapturableError(
                    "batches of one size differ in shapes, dtypes, keys or values that are not tensors"
                )
            copy_tensors(static, fresh)


def _is_alike(one: Any, other: Any) -> bool:
    """Returns whether a graph made with `one` may read `other` in its place."""
    try:
        return bool(_signature(one) == _signature(other))
    except (TypeError, ValueError, RuntimeError):  # of arrays, which do not compare to one truth value
        return False


def _signature(value: Any) -> Any:
    """Returns `value` with each tensor replaced by its shape and dtype."""
    return map_tensors(lambda tensor: (tensor.shape, tensor.dtype), value)
