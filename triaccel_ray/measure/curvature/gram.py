"""Each layer's Gram matrix of backpropagated columns, and the eigenvalues of the curvature block that it stands for.

A block (1/b) sum_r a_r a_r^T of m columns a_r with n elements has the non-zero eigenvalues of the m x m matrix
(1/b) <a_r, a_s>, and m is hundreds where n is millions (Dangel et al. 2022, "ViViT": there for a list of module types,
here for any module, by falling back on ever more general ways to the same matrix).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.capture import Call, find_weight_uses, locate_samples, record_calls
from triaccel_ray.measure.curvature.factors import Shape, factor_gram, factorize, is_factorizable
from triaccel_ray.measure.curvature.objective import Objective
from triaccel_ray.measure.curvature.persample import Cotangents, Head, compute_dtype, module_gram, sample_grams


@dataclass(frozen=True, kw_only=True, eq=False)
class Grams:
    """The Gram matrices of all layers."""

    matrices: list[Tensor]
    """For each layer [b q, b q], at least FP32: the inner products of its columns; column c of sample i is i q + c."""
    fallback_layers: tuple[str, ...]
    """Names of the layers that took one pass of the whole model per sample."""


def layer_grams(objective: Objective, layers: Sequence[Layer], head: Head) -> Grams:
    """Returns each layer's Gram matrix of the columns that `head` defines.

    One forward pass of all samples; one of a single sample, which shows where the samples lie in each layer's inputs
    and outputs; and one backward pass per cotangent, which keeps the gradients with respect to the layers' outputs
    alone. From these, one layer at a time, by the first way that is open:

    1. zero, for a layer that has no part in what is differentiated;
    2. from the inputs and output gradients of its calls (`nn.Linear`, `nn.Conv2d`, `nn.Embedding`);
    3. by running its modules again under `torch.func`, all samples side by side;
    4. by running the whole model so, for weights used outside their modules or on what all samples share;
    5. by one pass of the whole model per sample, where `torch.func` fails too.
    """
    model, chunk_bytes = objective.model, objective.chunk_bytes
    watched = [model, *(module for layer in layers for module in layer.modules)]
    outputs, calls = record_calls(objective.outputs, watched)
    _, single = record_calls(objective.sample(0).outputs, watched)
    locate_samples(calls, single, objective.num_samples)
    root, cotangents = head(outputs, objective)
    del outputs, single
    shape = (objective.num_samples, len(cotangents))
    own, unused = _sort_layers(root, calls, layers)
    factored = {layer for layer in own if all(is_factorizable(layer, call) for call in own[layer])}
    grams = {layer: _zeros(layer, shape) for layer in unused}

    whole: Cotangents = {}
    if len(unused) + len(factored) < len(layers):
        of_model = [call for call in calls if call.module is model and call.understood]
        in_model = find_weight_uses(root, of_model)
        whole = _pull_back(root, cotangents, of_model, retain_graph=True)
    del calls
    groups = list(_groups(own, shape[1], 4 * chunk_bytes))
    for index, group in enumerate(groups):
        wanted = [call for layer in group for call in own[layer]]
        arrived = _pull_back(root, cotangents, wanted, retain_graph=index + 1 < len(groups))
        for layer in group:
            tensors = {call: arrived.pop(call) for call in own.pop(layer)}
            if layer in factored:
                grams[layer] = _factored_gram(layer, tensors, shape, chunk_bytes)
            else:
                _try_module_gram(grams, layer, tensors, shape, chunk_bytes)
    for layer in layers:
        if layer not in grams and whole and in_model.are_calls_complete(layer, list(whole)):
            _try_module_gram(grams, layer, whole, shape, chunk_bytes)
    left = [layer for layer in layers if layer not in grams]
    if left:
        grams.update(zip(left, sample_grams(objective, left, head, shape), strict=True))
    return Grams(matrices=[grams[layer] for layer in layers], fallback_layers=tuple(layer.name for layer in left))


def block_eigenvalues(grams: Grams, layers: Sequence[Layer], num_samples: int, top_k: int) -> Tensor:
    """Returns the top_k largest eigenvalues of each layer's block, fp32 [num_layers, top_k], descending.

    NaN stands where a block of n weights and m columns has fewer than top_k candidates, min(m, n), and in the whole
    row where a column is not finite. The solver waits for the device once or more; no value is copied to the host.
    """
    # In FP64, which cuSOLVER finishes 3 times as fast as FP32 at 320 x 320 (H200), and as fast at 32 x 32.
    first = grams.matrices[0]
    dtype = first.dtype if first.device.type == "mps" else torch.float64
    stacked = torch.stack([matrix.to(first.device, dtype) for matrix in grams.matrices]) / num_samples
    is_finite = stacked.isfinite().flatten(1).all(dim=1)
    # The solver raises on NaN and infinity, which a diverging training produces and a policy should see.
    ascending = torch.linalg.eigvalsh(torch.where(is_finite[:, None, None], stacked, 0.0))
    eigenvalues = torch.where(is_finite[:, None], ascending.flip(1).clamp(min=0.0), math.nan)
    sizes = [min(eigenvalues.shape[1], layer.num_elements, top_k) for layer in layers]
    rows = [F.pad(row[:size], (0, top_k - size), value=math.nan) for row, size in zip(eigenvalues, sizes, strict=True)]
    return torch.stack(rows).float()


def _sort_layers(
    root: Tensor, calls: Sequence[Call], layers: Sequence[Layer]
) -> tuple[dict[Layer, list[Call]], list[Layer]]:
    """Returns the layers whose own calls tell everything, with these calls; and the layers that have no part at all."""
    owner = {module: layer for layer in layers for module in layer.modules}
    own: dict[Layer, list[Call]] = {layer: [] for layer in layers}
    for call in calls:
        if call.module in owner:
            own[owner[call.module]].append(call)
    uses = find_weight_uses(root, [call for of_layer in own.values() for call in of_layer])
    unused = [layer for layer in layers if not uses.is_used(layer)]
    told = {
        layer: calls
        for layer, calls in own.items()
        if layer not in unused and all(call.understood for call in calls) and uses.are_calls_complete(layer, calls)
    }
    return told, unused


def _groups(own: Mapping[Layer, Sequence[Call]], q: int, limit_bytes: int) -> Iterator[list[Layer]]:
    """Returns the layers in groups whose output gradients fit `limit_bytes`; in one group if there is one cotangent.

    Each group takes its own backward passes: for many cotangents time is exchanged for memory, while a single one
    asks for no more than training does.
    """
    group: list[Layer] = []
    held_bytes = 0
    for layer, calls in own.items():
        elements = sum(math.prod(shape) for call in calls for shape in call.outputs if shape is not None)
        needed_bytes = q * elements * layer.weights[0].element_size()
        if group and q > 1 and held_bytes + needed_bytes > limit_bytes:
            yield group
            group, held_bytes = [], 0
        group.append(layer)
        held_bytes += needed_bytes
    if group:
        yield group


def _pull_back(
    root: Tensor, cotangents: Sequence[Tensor | None], calls: Sequence[Call], *, retain_graph: bool
) -> dict[Call, list[Tensor | None]]:
    """Returns the gradients with respect to each call's outputs under each cotangent, [b, q, ...]; None: has none."""
    edges = [edge for call in calls for edge in call.edges if edge is not None]
    q = len(cotangents)
    stacks: list[Tensor | None] = [None] * len(edges)
    for c, cotangent in enumerate(cotangents if edges else ()):
        keep = retain_graph or c + 1 < q
        arrived = torch.autograd.grad(root, edges, cotangent, retain_graph=keep, allow_unused=True)
        for e, gradient in enumerate(arrived):
            if gradient is not None and q == 1:
                stacks[e] = gradient.unsqueeze(0)
            elif gradient is not None:
                stack = gradient.new_empty(q, *gradient.shape) if c == 0 else stacks[e]
                assert stack is not None  # which edges are reached does not depend on the cotangent
                stack[c] = gradient
                stacks[e] = stack
    remaining = iter(stacks)
    return {
        call: [
            _samples_first(next(remaining), dim) if edge is not None else None
            for edge, dim in zip(call.edges, call.output_dims, strict=True)
        ]
        for call in calls
    }


def _samples_first(stack: Tensor | None, dim: int | None) -> Tensor | None:
    return None if stack is None or dim is None else stack.movedim(dim + 1, 0)


def _factored_gram(layer: Layer, tensors: Cotangents, shape: tuple[int, int], chunk_bytes: int) -> Tensor:
    factors = [
        factorize(call, gradient, compute_dtype(layer))
        for call, gradients in tensors.items()
        for gradient in gradients
        if gradient is not None
    ]
    if not factors:
        return _zeros(layer, shape)
    weight = layer.weights[0]
    groups = getattr(layer.modules[0], "groups", 1)
    sizes = Shape(b=shape[0], q=shape[1], g=groups, o=weight.shape[0] // groups, k=weight.numel() // weight.shape[0])
    return factor_gram(factors, sizes, chunk_bytes)


def _try_module_gram(
    grams: dict[Layer, Tensor], layer: Layer, tensors: Cotangents, shape: tuple[int, int], chunk_bytes: int
) -> None:
    """Adds the layer's matrix to `grams` if differentiating the modules of these calls under `torch.func` works."""
    reached = {call: gradients for call, gradients in tensors.items() if any(g is not None for g in gradients)}
    try:
        grams[layer] = module_gram(layer, reached, shape, chunk_bytes) if reached else _zeros(layer, shape)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the module is foreign code under a transformation that it need not support in any way
        return


def _zeros(layer: Layer, shape: tuple[int, int]) -> Tensor:
    size = shape[0] * shape[1]
    return layer.weights[0].new_zeros(size, size, dtype=compute_dtype(layer))
