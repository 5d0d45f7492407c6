"""The gradients of one step, where statistics and optimizer find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.multi_tensor import TensorTable, have_equal_dense_strides

_NONE: Mapping[int, Tensor] = MappingProxyType({})


class Gradients:
    """A gradient for each watched parameter, or None, and the table through which kernels read them.

    A parameter whose layer computes from a low-precision copy gets its gradient there, in the copy's dtype: no cast
    to FP32 stands between backward pass and optimizer. That of a split weight is BF16, or an FP32 sum over the parts of
    a batch.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.tensors: list[Tensor | None] = [None] * len(self.parameters)
        self.table = TensorTable(
            len(self.parameters), self.parameters[0].device, sizes=[p.numel() for p in self.parameters]
        )

    @torch.no_grad()
    def collect(self, copies: Mapping[int, Tensor], sums: Mapping[int, Tensor] = _NONE) -> None:
        """Takes the gradients from the parameters, or from their copies or sums (id of the parameter -> tensor).

        Each has the memory layout of its parameter. `publish` makes known to kernels where they lie.
        """
        self.tensors = [_gradient(p, copies.get(id(p)), sums.get(id(p))) for p in self.parameters]
        self.table.point_to(self.tensors, upload=False)

    def begin(self, *, publishes: bool) -> None:
        """Forgets the tensors of the step before; without `publishes` a CUDA graph is being captured."""
        self.drop()

    def publish(self) -> None:
        """Brings to the device where the tensors lie, or lay; not while a CUDA graph is being captured."""
        self.table.upload_named()

    def drop(self) -> None:
        """Forgets the tensors; the table keeps their addresses, which stay valid in a captured graph's replays."""
        self.tensors = [None] * len(self.parameters)
        self.table.forget()


def _gradient(parameter: nn.Parameter, copy: Tensor | None, total: Tensor | None) -> Tensor | None:
    gradient = parameter.grad if total is None else total
    if copy is not None and copy.grad is not None:
        # Both only where the model also reads the weight itself, beside the layer that computes with the copy.
        gradient = copy.grad if gradient is None else gradient + copy.grad
    if gradient is not None and gradient.is_sparse:  # of `F.embedding(..., sparse=True)`, say
        gradient = gradient.to_dense()
    if gradient is None or gradient.stride() == parameter.stride() or have_equal_dense_strides(gradient, parameter):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether hooks act on the parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
