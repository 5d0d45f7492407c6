"""Counts the bytes that autograd saves for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


@contextlib.contextmanager
def counting_saved_bytes(model: nn.Module) -> Iterator[dict[StorageWeakRef, int]]:
    """Yields a mapping of what passes of `model` save for backward on its device: memory -> its bytes.

    Parameters and buffers are left out. Memory that several tensors share is there once.
    """
    own = [*model.parameters(), *model.buffers()]
    device, known = own[0].device, {StorageWeakRef(tensor.untyped_storage()) for tensor in own}
    found: dict[StorageWeakRef, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if tensor.device == device and reference not in known:
            found[reference] = storage.nbytes()
        return tensor.detach()  # or an output that its own node saves would keep the graph alive in a cycle

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
