"""Gram matrices of any layer: a module differentiated for all samples side by side, or the model sample by sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.layers import Layer
from triaccel_ray.measure.curvature.calls import Call
from triaccel_ray.measure.curvature.objective import Objective

Head = Callable[[Any, Objective], tuple[Tensor, Sequence[Tensor | None]]]
"""Maps the model's outputs to the tensor to differentiate and the q cotangents that make the columns: column (i, c) is
what sample i contributes to the gradient under cotangent c. A single cotangent None says that the tensor is scalar."""

Cotangents = Mapping[Call, Sequence[Tensor | None]]
"""For each call and each of its outputs, the q gradients with respect to it, [b, q, ...]; None where it has none."""


def module_gram(
    layer: Layer, cotangents: Cotangents, shape: tuple[int, int], chunk_bytes: int, *, check: bool = True
) -> Tensor:
    """Returns the Gram matrix [b q, b q] of a layer of any kind from its calls, or from the call of the whole model.

    `torch.func` runs the module again and pulls the cotangents back to the weights, for all samples side by side.

    Args:
        layer: whose weights to differentiate with respect to.
        cotangents: the calls to differentiate, and what arrives at their outputs.
        shape: (b, q).
        chunk_bytes: bytes of columns to hold at once.
        check: whether to make sure that the module can be run again with other weights.

    Raises:
        LookupError: the module has hooks, or computes with references to its weights that cannot be replaced.
        Exception: whatever a module raises that does not work with `torch.func`.
    """

    def columns(samples: slice) -> list[Tensor]:
        parts = [_call_columns(layer, call, tensors, samples) for call, tensors in cotangents.items()]
        return [parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)]

    # The fused attention kernels have no batching rule; what else has none runs one by one, as is fitting here.
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        for call in cotangents if check else ():
            _require_replaceable(layer, call)
        return _blocked_grams(columns, [layer], shape, chunk_bytes)[0]


def sample_grams(objective: Objective, layers: Sequence[Layer], head: Head, shape: tuple[int, int]) -> list[Tensor]:
    """Returns the Gram matrices [b q, b q] of `layers` from one pass of the whole model per sample: always right."""

    def columns(samples: slice) -> list[Tensor]:
        rows = [_sample_columns(objective.sample(i), layers, head) for i in range(samples.start, samples.stop)]
        return [torch.cat(layer_rows) for layer_rows in zip(*rows, strict=True)]

    return _blocked_grams(columns, layers, shape, objective.chunk_bytes)


def _blocked_grams(
    columns: Callable[[slice], list[Tensor]], layers: Sequence[Layer], shape: tuple[int, int], chunk_bytes: int
) -> list[Tensor]:
    """Returns each layer's Gram matrix of `columns(samples)`, which gives one [s q, n] per layer.

    Two blocks of columns exist at a time. With more than two blocks the earlier ones are formed again for each later
    one: more time, bounded memory.
    """
    b, q = shape
    grams = [w.new_zeros(b * q, b * q, dtype=compute_dtype(layer)) for layer in layers for w in layer.weights[:1]]
    bytes_per_sample = q * sum(
        layer.num_elements * gram.element_size() for layer, gram in zip(layers, grams, strict=True)
    )
    step = max(1, chunk_bytes // bytes_per_sample)
    blocks = [slice(start, min(start + step, b)) for start in range(0, b, step)]
    for i, block in enumerate(blocks):
        mine = columns(block)
        for other in blocks[: i + 1]:
            theirs = mine if other is block else columns(other)
            for gram, some, others in zip(grams, mine, theirs, strict=True):
                products = some @ others.T
                here, there = slice(block.start * q, block.stop * q), slice(other.start * q, other.stop * q)
                gram[here, there] = products
                gram[there, here] = products.T
    return grams


def _sample_columns(sample: Objective, layers: Sequence[Layer], head: Head) -> list[Tensor]:
    """Returns for each layer the q columns [q, n] of an objective of one sample."""
    root, cotangents = head(sample.outputs(), sample)
    weights = [weight for layer in layers for weight in layer.weights]
    columns: list[list[Tensor]] = [[] for _ in layers]
    for c, cotangent in enumerate(cotangents):
        is_last = c == len(cotangents) - 1
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if root.requires_grad:
            gradients = torch.autograd.grad(root, weights, cotangent, retain_graph=not is_last, allow_unused=True)
        remaining = iter(gradients)
        for layer, column in zip(layers, columns, strict=True):
            column.append(torch.cat([_flat(next(remaining), weight, compute_dtype(layer)) for weight in layer.weights]))
    return [torch.stack(column) for column in columns]


def _call_columns(layer: Layer, call: Call, cotangents: Sequence[Tensor | None], samples: slice) -> Tensor:
    """Returns what one call contributes to the columns of some samples: [s q, n]."""
    keys, dims = list(call.argument_dims), list(call.argument_dims.values())
    reached = [index for index, cotangent in enumerate(cotangents) if cotangent is not None]
    output_dims = [dim for index, dim in enumerate(call.output_dims) if index in reached and dim is not None]

    def one_sample(arguments: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns one sample's gradients [q, *weight.shape]; the module sees a batch of one."""
        batch = {key: tensor.unsqueeze(dim) for key, tensor, dim in zip(keys, arguments, dims, strict=True)}

        def outputs_of(*weights: Tensor) -> tuple[Tensor, ...]:
            outputs = _run(layer, call, weights, batch)
            return tuple(outputs[index] for index in reached)

        pull_back = vjp(outputs_of, *(weight.detach() for weight in layer.weights))[1]
        batched = tuple(t.unsqueeze(1 + dim) for t, dim in zip(tangents, output_dims, strict=True))
        return cast("tuple[Tensor, ...]", vmap(pull_back)(batched))

    size = samples.stop - samples.start
    rows = [call.arguments[key].detach().narrow(d, samples.start, size) for key, d in zip(keys, dims, strict=True)]
    gradients = vmap(one_sample, in_dims=(dims, 0))(rows, [t[samples] for t in cotangents if t is not None])
    return torch.cat([g.flatten(2) for g in gradients], dim=2).flatten(0, 1).to(compute_dtype(layer))


def _require_replaceable(layer: Layer, call: Call) -> None:
    """Raises LookupError if running the module again with other weights would not be what the call was."""
    if call.module._forward_hooks or call.module._forward_pre_hooks:
        raise LookupError(f"{type(call.module).__name__} has hooks of its own, which the call was seen between")
    leaves = [weight.detach().requires_grad_() for weight in layer.weights]
    first = {key: call.arguments[key].detach().narrow(dim, 0, 1) for key, dim in call.argument_dims.items()}
    outputs = _run(layer, call, leaves, first)
    total = sum(out.sum() for out, edge in zip(outputs, call.edges, strict=True) if edge is not None)
    if any(gradient is None for gradient in torch.autograd.grad(total, leaves, allow_unused=True)):
        raise LookupError(f"{type(call.module).__name__} does not compute with the parameters it registers")


def _run(layer: Layer, call: Call, weights: Sequence[Tensor], batch: Mapping[int | str, Tensor]) -> tuple[Any, ...]:
    """Returns the outputs of a call made again with other weights and, for some arguments, other tensors."""
    replaced = {id(mine): weight for mine, weight in zip(layer.weights, weights, strict=True)}
    parameters = call.module.named_parameters(remove_duplicate=False)
    named = {name: replaced[id(parameter)] for name, parameter in parameters if id(parameter) in replaced}
    arguments = {key: value.detach() if isinstance(value, Tensor) else value for key, value in call.arguments.items()}
    arguments.update(batch)
    args = tuple(value for key, value in arguments.items() if isinstance(key, int))
    kwargs = {key: value for key, value in arguments.items() if isinstance(key, str)}
    output = functional_call(call.module, named, args, kwargs)
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def compute_dtype(layer: Layer) -> torch.dtype:
    """Returns what Gram matrices of `layer` are computed in: its weights' dtype, at least FP32."""
    return torch.promote_types(layer.weights[0].dtype, torch.float32)


def _flat(gradient: Tensor | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return weight.new_zeros(weight.numel(), dtype=dtype)
    return gradient.to_dense().flatten().to(dtype)
