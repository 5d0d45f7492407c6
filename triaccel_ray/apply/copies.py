"""Low-precision copies of weights, which forward passes read and the optimizer writes: autocast casts nothing.

For steps that are not compiled. There a cast of each weight, and of its gradient, is a launch of its own: 8 % of a
step of ResNet-18 at batch 96 on an H200.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.multi_tensor import have_equal_dense_strides
from triaccel_ray.model.gradients import has_hooks
from triaccel_ray.model.layers import NORMS, Layer


class ComputeCopies:
    """For each layer in low precision a copy of its parameters, a leaf of the autograd graph.

    The copies are written by whoever updates the parameters, in the same pass; what anybody else writes into a
    parameter (a checkpoint, the user) is noticed by its version counter. Writing through `.data` in place leaves that
    counter as it is and goes unnoticed: use `torch.no_grad`. A parameter with hooks has no copy, where they would not
    fire. A copy once made is kept until `drop_unused`, which is for when no graph is left: captured graphs hold its
    address. Where it cannot be kept, `generation` rises.
    """

    def __init__(self, layers: Sequence[Layer], parameters: Sequence[nn.Parameter]) -> None:
        """Makes copies, when asked, of those of `parameters` that belong to exactly one of `layers`."""
        owned = {layer.name: _parameters_of(layer) for layer in layers}
        owners = Counter(id(p) for of_layer in owned.values() for p in of_layer)
        in_fp32 = {id(p) for layer in layers for p in looked_up(layer)}  # autocast leaves embeddings in FP32
        updated = {id(p) for p in parameters} - in_fp32
        self._parameters = {
            name: [p for p in of_layer if owners[id(p)] == 1 and id(p) in updated and p.dtype is torch.float32]
            for name, of_layer in owned.items()
        }
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}
        self._covered: list[nn.Parameter] = []
        self._seen: dict[int, Any] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}
        self.in_force: dict[int, Tensor] = {}
        """Id of a parameter -> the copy that computes in its place."""
        self.generation = 0
        """Rises whenever a copy that a captured graph may read is no longer kept."""

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Puts copies of these dtypes into force, one for each layer's name; none where the dtype is FP32."""
        self._dtypes = dict(dtypes)
        low = [(p, dtype) for name, dtype in dtypes.items() for p in self._parameters[name] if dtype != torch.float32]
        low = [(p, dtype) for p, dtype in low if p.requires_grad and not has_hooks(p)]
        self.in_force = {id(parameter): self._copy(parameter, dtype) for parameter, dtype in low}
        self._covered = [parameter for parameter, _ in low]
        self.write(self._covered)

    def refresh(self) -> None:
        """Writes the parameters that somebody has changed since into their copies, or makes those anew."""
        stale = [p for p in self._covered if self._seen[id(p)] != _state(p)]
        unfit = any(has_hooks(p) or not p.requires_grad for p in self._covered)
        if unfit or any(not have_equal_dense_strides(self.in_force[id(p)], p) for p in stale):
            self._made.clear()
            self.generation += 1
            self.set(self._dtypes)
        else:
            self.write(stale)

    @torch.no_grad()
    def write(self, parameters: Sequence[nn.Parameter]) -> None:
        """Writes these parameters into their copies, those that have one."""
        covered: list[Tensor] = [p for p in parameters if id(p) in self.in_force]
        if covered:
            torch._foreach_copy_([self.in_force[id(p)] for p in covered], covered)
        self._seen.update({id(p): _state(p) for p in covered})

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Adds the copies' gradients to the parameters' own, in FP32: sums of parts lose digits in 16 bits."""
        for parameter in self._covered:
            copy = self.in_force[id(parameter)]
            if copy.grad is not None:
                gradient = copy.grad.to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
                copy.grad = None

    def zero_grad(self) -> None:
        """Drops the copies' gradients."""
        for copy in self._made.values():
            copy.grad = None

    def drop_unused(self) -> None:
        """Frees the copies that are not in force."""
        in_force = {id(copy) for copy in self.in_force.values()}
        self._made = {key: copy for key, copy in self._made.items() if id(copy) in in_force}

    def _copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        key = (id(parameter), dtype)
        made = self._made.get(key)
        if made is None or not have_equal_dense_strides(made, parameter):
            self.generation += made is not None
            self._made[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=True)
        return self._made[key]


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """Returns what changes when somebody writes into the parameter, or puts another tensor in its place."""
    return parameter._version, parameter.data_ptr(), parameter.stride()


def looked_up(layer: Layer) -> list[Tensor]:
    """Returns the weights of `layer` that an embedding looks up."""
    parts = [part for module in layer.modules for part in module.modules()]
    return [part.weight for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]


def _parameters_of(layer: Layer) -> list[nn.Parameter]:
    parts = [part for module in layer.modules for part in module.modules() if not isinstance(part, NORMS)]
    own = [p for part in parts for p in part.parameters(recurse=False)]
    return list(dict.fromkeys(p for p in own if p.is_floating_point()))
