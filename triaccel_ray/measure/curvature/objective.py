"""The function whose curvature is measured, and the state a model is in while it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.layers import forward

Loss = Callable[[Any, Any], Tensor]
"""Maps the model's outputs and the targets to the mean loss over the samples, a scalar."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """L(W) = (1/b) sum_i l_i(W): the mean loss of a model over b samples, as a function of its weights.

    The samples lie along dimension 0 of every tensor in `inputs` and `targets` and do not see each other.
    """

    model: nn.Module
    loss: Loss
    inputs: Any
    targets: Any
    chunk_bytes: int = 256 * 2**20
    """Bytes that one block of per-sample gradients may take; larger ones are formed and used up in pieces."""

    @property
    def num_samples(self) -> int:
        """The number of samples, b.

        Raises:
            ValueError: a tensor has no dimension 0, or the tensors disagree about its size.
        """
        shapes = [tuple(t.shape) for t in (*_tensors(self.inputs), *_tensors(self.targets))]
        sizes = {shape[0] if shape else 0 for shape in shapes}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                f"inputs and targets have shapes {shapes}: dimension 0 of every tensor must be the samples, and as "
                "many everywhere; keep what all samples share in a buffer of the model"
            )
        return sizes.pop()

    def sample(self, index: int) -> Objective:
        """Returns the objective of one sample alone: l_i."""
        return replace(self, inputs=_sample(self.inputs, index), targets=_sample(self.targets, index))

    def outputs(self) -> Any:
        """Returns the model's outputs for all samples."""
        return forward(self.model, self.inputs)

    def value(self, outputs: Any) -> Tensor:
        """Returns the mean loss of `outputs`, a scalar.

        Raises:
            ValueError: `loss` returned something else.
        """
        value = self.loss(outputs, self.targets)
        if value.dim() != 0:
            raise ValueError(f"loss returned shape {tuple(value.shape)}: must be the mean over samples, a scalar")
        return value


@contextlib.contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Holds the model in the state it is measured in: eval mode, full precision, gradients on; restored after.

    The flag `training` is written module by module rather than through `eval()`, which some models override to act.
    cuDNN's recurrent kernels refuse a backward pass in eval mode, and any second one, so that they are off while a
    recurrent model is measured.
    """
    was_training = [(module, module.training) for module in model.modules()]
    device_types = {p.device.type for p in model.parameters()}
    is_recurrent = any(isinstance(module, nn.RNNBase) for module, _ in was_training)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        if is_recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        try:
            for module, _ in was_training:
                module.training = False
            yield
        finally:
            for module, flag in was_training:
                module.training = flag


def _tensors(structure: Any) -> list[Tensor]:
    if isinstance(structure, Tensor):
        return [structure]
    if isinstance(structure, Mapping):
        return [t for value in structure.values() for t in _tensors(value)]
    if isinstance(structure, tuple | list):
        return [t for value in structure for t in _tensors(value)]
    return []


def _sample(structure: Any, index: int) -> Any:
    if isinstance(structure, Tensor):
        return structure[index : index + 1]
    if isinstance(structure, Mapping):
        return {name: _sample(value, index) for name, value in structure.items()}
    if isinstance(structure, tuple):
        return tuple(_sample(value, index) for value in structure)
    if isinstance(structure, list):
        return [_sample(value, index) for value in structure]
    return structure
