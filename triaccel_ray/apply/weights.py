"""How the parameters of layers are kept: as they are, or so that computing in 16 bits needs no casts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.multi_tensor import have_equal_dense_strides
from triaccel_ray.model.gradients import has_hooks
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


class ComputeCopies(Weights):
    """For each layer in low precision a copy of its parameters, a leaf of the autograd graph that gets the gradient.

    For steps that are not compiled: there a cast of each weight, and of its gradient, is a launch of its own, 8 % of a
    step of ResNet-18 at batch 96 on an H200. Forward passes read the copies, and autocast casts nothing.

    Whoever updates the parameters writes the copies in the same pass. What anybody else writes into a parameter (a
    checkpoint, the user) is noticed by its version counter, unless it is written through `.data` in place. A parameter
    with hooks has no copy, where they would not fire. A copy is kept until `drop_unused`: captured graphs hold its
    address.
    """

    def __init__(self, layers: Sequence[Layer], parameters: Iterable[nn.Parameter]) -> None:
        """Makes copies, when asked, of those of `parameters` that belong to exactly one of `layers`."""
        super().__init__()
        self._parameters = parameters_of_one(layers, parameters)
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}
        self._covered: list[nn.Parameter] = []
        self._seen: dict[int, Any] = {}
        self._dtypes: Mapping[str, torch.dtype] = {}

    def set(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Puts copies of these dtypes into force, one for each layer's name; none where the dtype is FP32."""
        self._dtypes = dict(dtypes)
        low = {
            p: dtype
            for name, dtype in dtypes.items()
            for p in self._parameters[name]
            if dtype != torch.float32 and p.requires_grad and not has_hooks(p)
        }
        self.in_force = {id(parameter): self._copy(parameter, dtype) for parameter, dtype in low.items()}
        self._covered = list(low)
        self.written(self._covered)

    def refresh(self) -> None:
        """Writes the parameters that somebody has changed since into their copies, or makes those anew."""
        stale = [p for p in self._covered if self._seen[id(p)] != _state(p)]
        unfit = any(has_hooks(p) or not p.requires_grad for p in self._covered)
        if unfit or any(not have_equal_dense_strides(self.in_force[id(p)], p) for p in stale):
            self._made.clear()
            self.generation += 1
            self.set(self._dtypes)
        else:
            self.written(stale)

    @torch.no_grad()
    def written(self, parameters: Sequence[nn.Parameter]) -> None:
        """Writes these parameters into their copies, those that have one."""
        covered: list[Tensor] = [p for p in parameters if id(p) in self.in_force]
        if covered:
            torch._foreach_copy_([self.in_force[id(p)] for p in covered], covered)
        self._seen.update({id(p): _state(p) for p in covered})

    @torch.no_grad()
    def gather_gradient(self, parameter: Tensor) -> None:
        """Adds the gradient of the parameter's copy to its own, in FP32."""
        copy = self.in_force.get(id(parameter))
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
        in_force = {id(copy) for copy in self.in_force.values()}
        self._made = {key: copy for key, copy in self._made.items() if id(copy) in in_force}

    def computing(self, module: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Returns what makes a context in which the module computes with its copies."""
        return partial(self._showing, module)

    @contextlib.contextmanager
    def _showing(self, module: nn.Module) -> Iterator[None]:
        """Lets the parameters of `module` and of the modules below it appear as their copies, where there are any."""
        saved = [(part, part._parameters) for part in (module.modules() if module._modules else (module,))]
        try:
            for part, own in saved:
                shown: dict[str, Any] = {name: self.in_force.get(id(p), p) for name, p in own.items()}
                part._parameters = shown
            yield
        finally:
            for part, own in saved:
                part._parameters = own

    def _copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        made = self._made.get((id(parameter), dtype))
        if made is None or not have_equal_dense_strides(made, parameter):
            self.generation += made is not None
            made = self._made[id(parameter), dtype] = torch.empty_like(parameter, dtype=dtype, requires_grad=True)
        return made


def _state(parameter: Tensor) -> tuple[Any, ...]:
    """Returns what changes when somebody writes into the parameter, or puts another tensor in its place."""
    return parameter._version, parameter.data_ptr(), parameter.stride()


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
