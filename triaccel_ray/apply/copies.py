"""Low-precision copies of weights, which forward passes read and the optimizer writes: autocast casts nothing.

For steps that are not compiled. There a cast of each weight, and of its gradient, is a launch of its own: 8 % of a
step of ResNet-18 at batch 96 on an H200.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.weights import Weights, parameters_of_one
from triaccel_ray.kernels.multi_tensor import have_equal_dense_strides
from triaccel_ray.model.gradients import has_hooks
from triaccel_ray.model.layers import Layer


class ComputeCopies(Weights):
    """For each layer in low precision a copy of its parameters, a leaf of the autograd graph that gets the gradient.

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
