"""Per-sample gradient columns of layers: from factors, by `torch.func`, or by one pass of the model per sample."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.measure.curvature.calls import Structure, linear_maps, record_calls, used_parameters
from triaccel_ray.measure.curvature.factors import Shape, compute_dtype, factor_columns, factorize, slices
from triaccel_ray.measure.curvature.objective import FoldedNorms, Head, Objective, pull_back, tensor_cores
from triaccel_ray.model.layers import Layer
from triaccel_ray.model.pytree import map_tensors, tensors_in

Part = tuple[Layer, slice]
"""A layer and a slice of its weights' elements, flattened and concatenated; for a factored layer, a slice of the
weight's rows in each group."""


def layer_factors(
    objective: Objective, head: Head, structure: Structure, layers: Sequence[Layer]
) -> dict[Layer, list[tuple[nn.Module, Tensor, Tensor]]]:
    """Returns the inputs and output gradients of factored layers, from one forward and one backward pass.

    For each call that a gradient reaches: its module, input [b, ...] and output gradient [b, q, ...].
    """
    with FoldedNorms():
        outputs, calls = record_calls(objective.outputs, linear_maps(list(structure.strategies)))
    structure.require_same(calls, objective.num_samples)
    wanted = sorted({index for layer in layers for index in structure.own[layer]})
    edges = [edge for index in wanted if (edge := calls[index].edge) is not None]
    root, cotangents = head(outputs, objective)
    largest = max(math.prod(calls[index].output) for index in wanted)
    fitting = objective.limits.block_bytes // (largest * root.element_size())
    step = max(2, fitting) if structure.batched_columns else 1
    with fast(objective):
        stacks = dict(zip(wanted, pull_back(root, cotangents, edges, step=step), strict=True))
    found: dict[Layer, list[tuple[nn.Module, Tensor, Tensor]]] = {}
    for layer in layers:
        found[layer] = []
        for index in structure.own[layer]:
            known, argument, stack = structure.calls[index], calls[index].argument, stacks[index]
            if stack is not None:
                assert argument is not None
                assert known.argument_dim is not None
                assert known.output_dim is not None
                given = argument.detach().movedim(known.argument_dim, 0)
                found[layer].append((known.module, given, stack.movedim(known.output_dim + 1, 0)))
    return found


def factored_columns(objective: Objective, head: Head, wanted: Sequence[Part], *, structure: Structure) -> list[Tensor]:
    """Returns the columns [b q, elements] of each part, rows of the weight in each group, from a layer's factors."""
    b, q = objective.num_samples, structure.num_columns
    factors = layer_factors(objective, head, structure, list(dict.fromkeys(layer for layer, _ in wanted)))
    found = []
    for layer, rows in wanted:
        shape, dtype = Shape.of(layer, b, q), compute_dtype(layer)
        made = [factorize(*call, dtype) for call in factors[layer]]
        with fast(objective):
            if made:
                found.append(factor_columns(made, slice(0, b), rows, shape))
            else:
                size = shape.g * (rows.stop - rows.start) * shape.k
                found.append(layer.weights[0].new_zeros(b * q, size, dtype=dtype))
    return found


def model_columns(objective: Objective, head: Head, wanted: Sequence[Part], *, batched: bool) -> list[Tensor]:
    """Returns the columns [b q, elements] of each part, by a `vmap` of the whole model over samples.

    Cotangents are backpropagated to the model's outputs (`batched` as in `Structure.batched_columns`), and from there
    to the weights by `torch.func`, in blocks of samples.

    Raises:
        LookupError: dimension 0 of an output is not the batch dimension.
        Exception: any error of a model that does not work with `torch.func`.
    """
    layers = list(dict.fromkeys(layer for layer, _ in wanted))
    tangents = _output_tangents(objective, head, batched=batched)
    q = next(iter(tangents.values())).shape[1]
    model, weights, inputs = objective.model, _detached(layers), tensors_in(objective.inputs)

    def one_sample(tensors: list[Tensor], directions: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns one sample's gradients [q, *weight.shape]; the model sees a batch of one."""
        one = _refilled(objective.inputs, [tensor.unsqueeze(0) for tensor in tensors])

        def outputs_of(*replaced: Tensor) -> tuple[Tensor, ...]:
            outputs = tensors_in(_run(model, layers, replaced, one))
            return tuple(outputs[index] for index in tangents)

        gradients: tuple[Tensor, ...] = vmap(vjp(outputs_of, *weights)[1])(tuple(d.unsqueeze(1) for d in directions))
        return gradients

    bytes_per_sample = q * sum(layer.num_elements * compute_dtype(layer).itemsize for layer in layers)
    blocks: list[list[Tensor]] = [[] for _ in wanted]
    with torch.no_grad(), _for_functions():
        for some in slices(objective.num_samples, objective.limits.block_bytes // bytes_per_sample):
            found = iter(vmap(one_sample)([t[some] for t in inputs], [t[some] for t in tangents.values()]))
            columns = {
                layer: torch.cat([next(found).flatten(2) for _ in layer.weights], dim=2).flatten(0, 1)
                for layer in layers
            }
            for (layer, elements), block in zip(wanted, blocks, strict=True):
                block.append(alone(columns[layer][:, elements]).to(compute_dtype(layer)))
            del columns
    return [joined(block) for block in blocks]


def require_replaceable(objective: Objective, head: Head, layers: Sequence[Layer]) -> None:
    """Checks that the model computes with the weights that `functional_call` puts in place of its own.

    Raises:
        LookupError: a weight cannot be replaced in this way, or the loss computes with weights.
    """
    with _for_functions():
        leaves = [weight.requires_grad_() for weight in _detached(layers)]
        outputs = _run(objective.model, layers, leaves, objective.inputs)
        total = torch.stack([tensor.sum() for tensor in tensors_in(outputs) if tensor.requires_grad]).sum()
        if any(found is None for found in torch.autograd.grad(total, leaves, allow_unused=True)):
            raise LookupError("the model does not compute with the parameters that it registers")
        in_loss = used_parameters(head(map_tensors(_leaf, objective.outputs()), objective)[0], [])[1]
    if any(id(weight) in in_loss for layer in layers for weight in layer.weights):
        raise LookupError("the loss computes with weights, too")


def sample_columns(objective: Objective, head: Head, wanted: Sequence[Part]) -> list[Tensor]:
    """Returns the columns [b q, elements] of each part from one pass of the model per sample; works for any model."""
    layers = list(dict.fromkeys(layer for layer, _ in wanted))
    rows: list[list[Tensor]] = [[] for _ in wanted]
    for i in range(objective.num_samples):
        columns = dict(zip(layers, _columns_of_one(objective.part(slice(i, i + 1)), head, layers), strict=True))
        for (layer, elements), row in zip(wanted, rows, strict=True):
            row.append(alone(columns[layer][:, elements]))
        del columns
    return [joined(row) for row in rows]


def fast(objective: Objective) -> contextlib.AbstractContextManager[None]:
    """Returns the context for all work after the forward pass: TF32 if `objective` allows it."""
    return tensor_cores() if objective.allow_tf32 else contextlib.nullcontext()


def alone(part: Tensor) -> Tensor:
    """Returns the tensor, copied if it is a view of a larger one, whose memory it would keep alive."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def joined(chunks: Sequence[Tensor]) -> Tensor:
    """Returns the chunks concatenated along dimension 0; a single one is not copied."""
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


def _columns_of_one(sample: Objective, head: Head, layers: Sequence[Layer]) -> list[Tensor]:
    root, cotangents = head(sample.outputs(), sample)
    trained = [weight for layer in layers for weight in layer.weights if weight.requires_grad]
    columns: list[list[Tensor]] = [[] for _ in layers]
    for c, cotangent in enumerate(cotangents):
        gradients: Mapping[Tensor, Tensor | None] = {}
        if root.requires_grad and trained:
            is_last = c == len(cotangents) - 1
            found = torch.autograd.grad(root, trained, cotangent, retain_graph=not is_last, allow_unused=True)
            gradients = dict(zip(trained, found, strict=True))
        for layer, column in zip(layers, columns, strict=True):
            parts = [_flat(gradients.get(weight), weight) for weight in layer.weights]
            column.append(torch.cat(parts).to(compute_dtype(layer)))
    return [torch.stack(column) for column in columns]


def _output_tangents(objective: Objective, head: Head, *, batched: bool) -> Mapping[int, Tensor]:
    """Returns the cotangents with respect to the model's outputs, [b, q, ...], by their index in `tensors_in`."""
    outputs = map_tensors(_leaf, objective.outputs())
    leaves = {index: tensor for index, tensor in enumerate(tensors_in(outputs)) if tensor.requires_grad}
    root, cotangents = head(outputs, objective)
    arrived = pull_back(root, cotangents, list(leaves.values()), step=len(cotangents) if batched else 1)
    found = {index: stack for index, stack in zip(leaves, arrived, strict=True) if stack is not None}
    if any(stack.dim() < 2 or stack.shape[1] != objective.num_samples for stack in found.values()):
        raise LookupError("dimension 0 of an output is not the samples")
    return {index: stack.transpose(0, 1) for index, stack in found.items()}


def _leaf(tensor: Tensor) -> Tensor:
    """Returns an output as a leaf, detached from its autograd graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _detached(layers: Sequence[Layer]) -> list[Tensor]:
    return [weight.detach() for layer in layers for weight in layer.weights]


def _refilled(value: Any, tensors: Sequence[Tensor]) -> Any:
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), value)


def _run(model: nn.Module, layers: Sequence[Layer], weights: Sequence[Tensor], inputs: Any) -> Any:
    """Returns the model's outputs with `weights` in place of the layers' own."""
    own = [weight for layer in layers for weight in layer.weights]
    replaced = {id(mine): weight for mine, weight in zip(own, weights, strict=True)}
    parameters = model.named_parameters(remove_duplicate=False)
    named = {name: replaced[id(parameter)] for name, parameter in parameters if id(parameter) in replaced}
    if isinstance(inputs, Mapping):
        return functional_call(model, named, (), dict(inputs))
    return functional_call(model, named, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


@contextlib.contextmanager
def _for_functions() -> Iterator[None]:
    """Selects unfused attention, since fused kernels have no batching rule, and mutes warnings of slow fallbacks."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def _flat(gradient: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight).flatten() if gradient is None else gradient.to_dense().flatten()
