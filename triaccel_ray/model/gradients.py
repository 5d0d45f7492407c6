"""Collects the gradients of one step for the gradient statistics and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.kernels.multi_tensor import TensorTable, have_equal_dense_strides


class Gradients:
    """The gradient of each watched parameter, or None, and the table through which kernels read them.

    If a parameter's layer computes with a low-precision copy, the gradient is that of the copy, in its dtype. Nothing
    casts it to FP32 before the optimizer. A split weight has a BF16 gradient, or an FP32 sum over micro-batches.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.tensors: list[Tensor | None] = [None] * len(self.parameters)
        self.table = TensorTable(
            len(self.parameters), self.parameters[0].device, sizes=[p.numel() for p in self.parameters]
        )

    @torch.no_grad()
    def collect(self, copies: Mapping[int, Tensor], sums: Mapping[int, Tensor]) -> None:
        """Takes the gradients from the parameters, or from their copies or sums (id of the parameter -> tensor).

        Each is brought into the memory layout of its parameter. `publish` makes their addresses known to kernels.
        """
        self.tensors = [gradient_of(p, copies.get(id(p)), sums.get(id(p))) for p in self.parameters]
        self.table.point_to(self.tensors, upload=False)

    def pack(self, copies: Mapping[int, Tensor]) -> None:
        """Prepares to send the gradients to other ranks, if there are any; a collective.

        Either all ranks run out of memory here, or none does. An eager pass has sent nothing then.
        """

    def send(self) -> None:
        """Replaces the gradients by their sums over ranks, if there are several; a collective."""

    def begin(self, *, publishes: bool) -> None:
        """Drops the tensors of the previous step; `publishes` is False during CUDA graph capture."""
        self.drop()

    def publish(self) -> None:
        """Copies the tensors' last addresses to the device; not to be called during CUDA graph capture."""
        self.table.upload_named()

    def drop(self) -> None:
        """Drops the tensors; the table keeps their addresses, which stay valid in a captured graph's replays."""
        self.tensors = [None] * len(self.parameters)
        self.table.forget()


def gradient_of(parameter: nn.Parameter, copy: Tensor | None, total: Tensor | None) -> Tensor | None:
    """Returns the gradient of a parameter, of its copy or their sum, or `total`, in the parameter's memory layout."""
    gradient = parameter.grad if total is None else total
    if copy is not None and copy.grad is not None:
        # Both exist only if the model also reads the weight itself, outside the layer that computes with the copy.
        gradient = copy.grad if gradient is None else gradient + copy.grad
    if gradient is not None and gradient.is_sparse:  # for example of `F.embedding(..., sparse=True)`
        gradient = gradient.to_dense()
    if gradient is None or gradient.stride() == parameter.stride() or have_equal_dense_strides(gradient, parameter):
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def buckets_by_arrival(
    parameters: Sequence[nn.Parameter], order: Sequence[nn.Parameter], *, elements: int, in_first: int
) -> list[list[int]]:
    """Returns indices of `parameters` in buckets, in the order in which gradients arrive: those used last come first.

    `order` is that of the forward pass, as far as it is known. A bucket is full at so many `elements`, the first one
    at `in_first`.
    """
    place_of = {p: place for place, p in enumerate(order)}
    found: list[list[int]] = [[]]
    size, limit = 0, in_first
    for index in sorted(range(len(parameters)), key=lambda index: -place_of.get(parameters[index], -1)):
        if size >= limit:
            found.append([])
            size, limit = 0, elements
        found[-1].append(index)
        size += parameters[index].numel()
    return found


def has_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether hooks act on the parameter's gradient."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
