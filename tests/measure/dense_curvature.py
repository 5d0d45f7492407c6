"""Dense curvature blocks in FP64, each from its definition: the references of test_curvature."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.model.layers import Layer, Loss


def sample_gradients(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layer: Layer) -> Tensor:
    """Each sample's gradient of its own loss, one at a time: [b, n]."""
    rows = []
    for i in range(len(targets)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1])
        gradients = torch.autograd.grad(value, layer.weights, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def fisher_block(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layer: Layer) -> Tensor:
    rows = sample_gradients(model, loss, inputs, targets, layer)
    return rows.T @ rows / len(rows)


def ggn_block(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layer: Layer) -> Tensor:
    outputs_of, weights = _as_function(model, inputs, layer)
    slopes = jacobian(outputs_of, weights)
    outputs = outputs_of(weights)
    blocks = []
    for i in range(len(targets)):
        curvature = hessian(lambda z, i=i: loss(z.unsqueeze(0), targets[i : i + 1]), outputs[i])
        blocks.append(slopes[i].T @ curvature @ slopes[i])
    return torch.stack(blocks).mean(dim=0)


def hessian_block(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, layer: Layer) -> Tensor:
    outputs_of, weights = _as_function(model, inputs, layer)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        return hessian(lambda w: loss(outputs_of(w), targets), weights)


def largest(block: Tensor, top_k: int, *, by_magnitude: bool = False) -> Tensor:
    """The top_k eigenvalues in descending order, FP64."""
    values = torch.linalg.eigvalsh(block)
    order = values.abs() if by_magnitude else values
    return values[order.argsort(descending=True)[:top_k]].sort(descending=True).values


def _as_function(model: nn.Module, inputs: Any, layer: Layer) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    positions = {id(weight): i for i, weight in enumerate(layer.weights)}
    names = {name: positions[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if id(p) in positions}
    sizes = [weight.numel() for weight in layer.weights]

    def outputs_of(flat: Tensor) -> Tensor:
        parts = [part.view_as(w) for part, w in zip(flat.split(sizes), layer.weights, strict=True)]
        return functional_call(model, {name: parts[i] for name, i in names.items()}, (inputs,))

    return outputs_of, torch.cat([weight.detach().flatten() for weight in layer.weights])
