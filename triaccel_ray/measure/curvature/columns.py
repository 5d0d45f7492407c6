"""Per-sample gradient columns of layers: from factors, or by one pass of the model per sample."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from triaccel_ray.measure.curvature.calls import Structure, linear_maps, record_calls
from triaccel_ray.measure.curvature.factors import Shape, compute_dtype, factor_columns, factorize
from triaccel_ray.measure.curvature.objective import FoldedNorms, Head, Objective, pull_back, tensor_cores
from triaccel_ray.model.layers import Layer

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
    weights = [weight for layer in layers for weight in layer.weights]
    columns: list[list[Tensor]] = [[] for _ in layers]
    for c, cotangent in enumerate(cotangents):
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if root.requires_grad:
            is_last = c == len(cotangents) - 1
            gradients = torch.autograd.grad(root, weights, cotangent, retain_graph=not is_last, allow_unused=True)
        parts = (_flat(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True))
        for layer, column in zip(layers, columns, strict=True):
            column.append(torch.cat([next(parts) for _ in layer.weights]).to(compute_dtype(layer)))
    return [torch.stack(column) for column in columns]


def _flat(gradient: Tensor | None, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight).flatten() if gradient is None else gradient.to_dense().flatten()
