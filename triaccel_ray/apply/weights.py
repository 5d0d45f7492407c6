"""Storage of the parameters of layers: as they are, or so that computing in 16 bits needs no casts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from triaccel_ray.kernels.multi_tensor import have_equal_dense_strides
from triaccel_ray.model.gradients import has_hooks
from triaccel_ray.model.layers import NORMS, Layer, is_transposed

Shown = list[tuple[nn.Module, dict[str, tuple[nn.Parameter, nn.Parameter]]]]
"""Modules, and by name a parameter of theirs and the copy that they compute with."""
_PRODUCTS = {
    each.forward
    for each in (
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
}
"""Forward functions that multiply by their parameters and add them, and do nothing else with them."""


class Weights:
    """Stores FP32 parameters and nothing else. Subclasses store those of layers in 16 bits in other ways."""

    generation = 0
    """Incremented whenever memory that a captured graph may read is freed."""

    def __init__(self) -> None:
        self.companions: Mapping[int, Tensor] = {}
        """Id of a parameter -> the tensor that the optimizer writes beside it; a new mapping at each change."""
        self.sums: dict[int, Tensor] = {}
        """Id of a parameter whose `.grad` has 16 bits -> the FP32 sum of its gradients over micro-batches."""

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Sets the dtype that each layer, by name, computes in."""

    def refresh(self) -> None:
        """Picks up parameter changes made outside the optimizer; call it before every step."""

    def written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Picks up what an optimizer has written to `parameters` without raising their version counters."""

    def join(self) -> None:
        """Makes all parameters FP32 until the next `refresh`."""

    def release(self) -> None:
        """Makes all parameters FP32 for good."""

    def gather_gradient(self, parameter: Tensor) -> None:
        """Adds a micro-batch's gradient in 16 bits to a sum in FP32: sums in 16 bits lose digits."""

    def zero_grad(self) -> None:
        """Drops gradients that are stored outside the parameters' `.grad`."""

    def drop_unused(self) -> None:
        """Frees memory that only captured graphs could still read."""

    def shown_by(self, module: nn.Module) -> Shown:
        """Returns the copies for `module` and its submodules; the dictionaries are filled, and changed, later."""
        return []


@contextlib.contextmanager
def showing(shown: Shown) -> Iterator[None]:
    """Returns a context in which modules have the copies in place of their parameters; compiled code may enter it.

    Whatever else stands in a parameter's place is left there, as by `torch.func.functional_call` or pruning.
    """
    replaced = []
    for part, copies in shown:
        for name, (parameter, copy) in copies.items():
            if part._parameters.get(name) is parameter:
                part._parameters[name] = copy
                replaced.append((part, name, parameter))
    try:
        yield
    finally:
        for part, name, parameter in replaced:
            part._parameters[name] = parameter


class ComputeCopies(Weights):
    """Keeps low-precision copies of the parameters of layers in 16 bits: autograd leaves that get the gradients.

    Forward passes read the copies, so that no weight is cast, nor its gradient. A copy takes the memory of the cast
    that the backward pass needs, and its gradient half of an FP32 one.

    An optimizer step writes the copies along with the parameters. Other writes to a parameter (by a checkpoint, the
    user) are detected by its version counter, except in-place writes through `.data`. A copy is kept until
    `drop_unused`: captured graphs hold its address.

    Some parameters have no copy: those with hooks, which would not fire on a copy, and those of a module with its own
    forward function. That may write to a parameter. Lookups add up many gradients of one element.
    """

    def __init__(self, layers: Sequence[Layer], parameters: Iterable[nn.Parameter]) -> None:
        """Prepares for copies, which `set` makes, of those of `parameters` that belong to exactly one of `layers`."""
        super().__init__()
        fit = multiplied_parameters(layers)
        self._parameters = parameters_of_one(layers, [p for p in parameters if id(p) in fit])
        self._made: dict[tuple[int, torch.dtype], nn.Parameter] = {}
        self._covered: list[nn.Parameter] = []
        self._seen: dict[int, Any] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._shown: Shown = []

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Puts copies in these dtypes, given by layer name, into force; a layer in FP32 has none."""
        self._dtypes = dict(dtypes)
        low = {
            p: dtype
            for name, dtype in dtypes.items()
            for p in self._parameters[name]
            if dtype != torch.float32 and p.requires_grad and not has_hooks(p)
        }
        copy_of = {id(parameter): self._copy(parameter, dtype) for parameter, dtype in low.items()}
        self.companions = copy_of
        self._covered = list(low)
        self.written(self._covered)
        for part, copies in self._shown:
            copies.clear()
            copies.update({name: (p, copy_of[id(p)]) for name, p in _own(part) if id(p) in copy_of})

    def refresh(self) -> None:
        """Writes parameters changed outside the optimizer to their copies; recreates copies that no longer fit."""
        stale = [p for p in self._covered if self._seen[id(p)] != _state(p)]
        unfit = any(has_hooks(p) or not p.requires_grad for p in self._covered)
        if unfit or any(not have_equal_dense_strides(self.companions[id(p)], p) for p in stale):
            self._made.clear()
            self.generation += 1
            self.set(self._dtypes)
        else:
            self.written(stale)

    @torch.no_grad()
    def written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Writes these parameters to their copies, if they have any."""
        covered: list[Tensor] = [p for p in parameters if id(p) in self.companions]
        if covered:
            torch._foreach_copy_([self.companions[id(p)] for p in covered], covered)
        self._seen.update({id(p): _state(p) for p in covered})

    @torch.no_grad()
    def gather_gradient(self, parameter: Tensor) -> None:
        """Adds the gradient of the parameter's copy to its own, in FP32."""
        copy = self.companions.get(id(parameter))
        if copy is not None and copy.grad is not None:
            gradient = copy.grad.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            copy.grad = None

    def zero_grad(self) -> None:
        """Drops the copies' gradients."""
        for copy in self._made.values():
            copy.grad = None

    def drop_unused(self) -> None:
        """Frees the copies that are not in force."""
        in_force = {id(copy) for copy in self.companions.values()}
        self._made = {key: copy for key, copy in self._made.items() if id(copy) in in_force}

    def shown_by(self, module: nn.Module) -> Shown:
        """Returns the copies for `module` and its submodules; `set` fills and changes the dictionaries."""
        shown: Shown = [(part, {}) for part in module.modules() if _own(part)]
        self._shown.extend(shown)
        return shown

    def _copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        made = self._made.get((id(parameter), dtype))
        if made is None or not have_equal_dense_strides(made, parameter):
            if made is not None:
                self.generation += 1
            # A parameter: PyTorch then compiles for its shape, also where other shapes are dynamic.
            made = self._made[id(parameter), dtype] = nn.Parameter(torch.empty_like(parameter, dtype=dtype))
        return made


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in module._parameters.items() if p is not None]


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """Returns a value that changes when the parameter is written to or gets another tensor."""
    return parameter._version, parameter.data_ptr(), parameter.stride()


def multiplied_parameters(layers: Sequence[Layer]) -> set[int]:
    """Returns the ids of the parameters of modules that are known to only multiply by them, and to add them."""
    parts = [part for layer in layers for module in layer.modules for part in module.modules()]
    return {id(p) for part in parts if _only_multiplies(part) for p in part.parameters(recurse=False)}


def _only_multiplies(module: nn.Module) -> bool:
    return (type(module).forward in _PRODUCTS or is_transposed(module)) and "forward" not in module.__dict__


def parameters_of_one(layers: Sequence[Layer], updated: Iterable[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """Returns, by layer name, the FP32 parameters of `updated` that belong to that layer alone.

    Excludes those of norms and parametrizations, which compute in FP32, and weights that an embedding looks up:
    autocast leaves embeddings in FP32.
    """
    found: dict[str, list[nn.Parameter]] = {}
    looked_up: set[int] = set()
    apart = (NORMS, ParametrizationList)
    for layer in layers:
        parts = [part for module in layer.modules for part in module.modules()]
        own = [p for part in parts if not isinstance(part, apart) for p in part.parameters(recurse=False)]
        found[layer.name] = list(dict.fromkeys(own))
        looked_up.update(id(part.weight) for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag))
    owners = Counter(id(p) for own in found.values() for p in own)
    fit = {id(p) for p in updated if owners[id(p)] == 1 and p.dtype is torch.float32} - looked_up
    return {name: [p for p in own if id(p) in fit] for name, own in found.items()}
