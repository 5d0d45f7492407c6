"""Counts the bytes that autograd saves for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class SavedBytes:
    """The memory of tensors saved for backward, without that of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        self._device = own[0].device
        self._own = {StorageWeakRef(tensor.untyped_storage()) for tensor in own}
        self._found: dict[StorageWeakRef, int] = {}

    @property
    def total(self) -> int:
        """Bytes counted so far; memory that several tensors share counts once."""
        return sum(self._found.values())

    def add(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor on the model's device."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if tensor.device == self._device and reference not in self._own:
            self._found[reference] = storage.nbytes()


@contextlib.contextmanager
def counting_saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Returns a context that counts what passes of `model` save for backward."""
    counted = SavedBytes(model)

    def pack(tensor: Tensor) -> Tensor:
        counted.add(tensor)
        return tensor.detach()  # or an output that its own node saves would keep the graph alive in a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield counted
