"""How the parameters of layers are kept: as they are, or so that computing in 16 bits needs no casts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.model.layers import NORMS, Layer


class Weights:
    """FP32 parameters, and nothing beside them. Subclasses keep those of layers in 16 bits in another way."""

    generation = 0
    """Rises whenever memory that a captured graph may read is no longer kept."""

    def __init__(self) -> None:
        self.in_force: Mapping[int, Tensor] = {}
        """Id of a parameter -> what the optimizer writes beside it; another object whenever that changes."""
        self.sums: dict[int, Tensor] = {}
        """Id of a parameter -> the FP32 sum of its gradients over the parts of a batch, where `.grad` has 16 bits."""

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Puts the dtype of each layer, by name, into force."""

    def refresh(self) -> None:
        """Takes in what somebody has changed since the last step; to be called before each."""

    def written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Takes in what an optimizer has written to `parameters` without raising their versions."""

    def join(self) -> None:
        """Makes all parameters FP32 until the next `refresh`."""

    def release(self) -> None:
        """Makes all parameters FP32 for good."""

    def gather_gradient(self, parameter: Tensor) -> None:
        """Adds up in FP32 what a part of a batch has left in 16 bits: there, sums lose digits."""

    def zero_grad(self) -> None:
        """Drops gradients that are not the parameters' own."""

    def drop_unused(self) -> None:
        """Frees what only captured graphs could still read."""

    def computing(self, module: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns what makes a context for a forward pass of `module` in 16 bits."""
        return contextlib.nullcontext  # the same for all: compiled code is shared where modules differ in nothing


def parameters_of_one(layers: Sequence[Layer], updated: Iterable[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """Returns by layer the FP32 parameters of `updated` that belong to it alone, without those of norms.

    Without weights that an embedding looks up, too: autocast leaves embeddings in FP32.
    """
    parts = {layer.name: [part for module in layer.modules for part in module.modules()] for layer in layers}
    looked_up = {
        id(part.weight) for each in parts.values() for part in each if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    }
    found = {
        name: list(dict.fromkeys(p for part in each if not isinstance(part, NORMS) for p in part.parameters(False)))
        for name, each in parts.items()
    }
    owners = Counter(id(p) for own in found.values() for p in own)
    fit = {id(p) for p in updated if owners[id(p)] == 1 and p.dtype is torch.float32} - looked_up
    return {name: [p for p in own if id(p) in fit] for name, own in found.items()}
