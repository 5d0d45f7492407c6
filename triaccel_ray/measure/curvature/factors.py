"""The columns of one layer: outer products where its gradient is known in closed form, `torch.func` where it is not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from triaccel_ray.measure.curvature.calls import Call
from triaccel_ray.measure.curvature.objective import Head, Objective
from triaccel_ray.model.layers import Layer
from triaccel_ray.model.pytree import tensors_in

Cotangents = Mapping[Call, Sequence[Tensor | None]]
"""For each call and each of its outputs, the q gradients with respect to it, [b, q, ...]; None where it has none."""

_TRAFFIC = 16
"""Multiply-adds in the time that one element takes to be written and read again: the order of magnitude on GPUs and
CPUs alike. It only moves the choice between two ways of like cost."""

_PIECE_BYTES = 20 * 2**20
"""Of patches or columns held at once where a sample has a single column: as large as PyTorch's own segments, so that a
measurement finds room in what the tensors of a training step, which are smaller than patches, leave free."""
_MAX_PIECES = 4
"""Into which all columns are cut for that: each further one forms all patches anew."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one layer's columns: b samples with q columns each; a weight of g groups of o rows of k elements."""

    b: int
    q: int
    g: int
    o: int
    k: int


@dataclass(frozen=True, eq=False)
class Factors:
    """The columns of one call of a layer, as sums of outer products over positions t = 1..T.

        column[i, c] = sum_t left[i, c, t] (x) right[i, c, t]

    One factor comes from the call's input and is the same for all columns c of a sample i, the other is the gradient
    with respect to the call's output. Both are made for a slice of s samples when asked for, since an unfolded image
    is many times the image.
    """

    num_positions: int
    """T."""
    left: Callable[[slice], Tensor]
    """The factor along the weight's rows: [s, g, q, T, o]; or int64 row numbers [s, T], where it is one-hot."""
    right: Callable[[slice], Tensor]
    """The factor along the rest of the weight: [s, g, q or 1, T, k]."""
    is_one_hot: bool = False
    """Whether `left` gives row numbers."""


def factorize(module: nn.Module, inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Factors:
    """Returns the factors of a factorizable call, its input [b, ...] and output gradient [b, q, ...]."""
    gradients = gradients.to(dtype)
    if isinstance(module, nn.Embedding):
        return _embedding(module, inputs, gradients)
    if isinstance(module, nn.Conv2d):
        return _conv2d(module, inputs.to(dtype), gradients)
    return _linear(inputs.to(dtype), gradients)


def factor_gram(factors: Sequence[Factors], shape: Shape, block_bytes: int) -> Tensor:
    """Returns the Gram matrix [b q, b q] of the columns summed over calls; the index is i q + c.

    In one of two ways, whichever costs less: from the columns themselves, formed for some rows of the weight at a
    time; or without forming them, as <l (x) r, l' (x) r'> = <l, l'> <r, r'>, summed over all pairs of positions. The
    second suits few positions (a linear layer without a sequence, late convolutions) and large vocabularies.
    """
    if _is_pairing_cheaper(factors, shape):
        return _gram_by_pairs(factors, shape, block_bytes)
    return _gram_by_columns(factors, shape, block_bytes)


def _linear(inputs: Tensor, gradients: Tensor) -> Factors:
    k, q, o = inputs.shape[-1], gradients.shape[1], gradients.shape[-1]
    num_positions = inputs[0].numel() // k
    return Factors(
        num_positions=num_positions,
        left=lambda samples: gradients[samples].reshape(-1, 1, q, num_positions, o),
        right=lambda samples: inputs[samples].reshape(-1, 1, 1, num_positions, k),
    )


def _embedding(module: nn.Embedding, indices: Tensor, gradients: Tensor) -> Factors:
    q, k = gradients.shape[1], gradients.shape[-1]
    flat = indices.flatten(1) if indices.dim() > 1 else indices.unsqueeze(1)
    num_positions = flat.shape[1]
    rows = gradients.reshape(-1, 1, q, num_positions, k)
    if module.padding_idx is not None:
        rows = rows * (flat != module.padding_idx)[:, None, None, :, None]
    return Factors(
        num_positions=num_positions,
        left=lambda samples: flat[samples],
        right=lambda samples: rows[samples],
        is_one_hot=True,
    )


def _conv2d(module: nn.Conv2d, inputs: Tensor, gradients: Tensor) -> Factors:
    g, q, num_positions = module.groups, gradients.shape[1], gradients[0, 0, 0].numel()
    vertical, horizontal = _zero_padding(module)

    def left(samples: slice) -> Tensor:
        return gradients[samples].reshape(-1, q, g, gradients.shape[2] // g, num_positions).permute(0, 2, 1, 4, 3)

    def right(samples: slice) -> Tensor:
        padded = F.pad(inputs[samples], (*horizontal, *vertical))
        # All patches in one view, copied once: F.unfold starts a kernel for every sample. The weight's elements are in
        # one order for all calls, row, column, channel; they lie in memory as the image does, so that runs stay runs.
        if padded.stride(1) == 1:
            return _patches_of_runs(module, padded, gradients.shape[3:])
        sample, channel, *pixel = padded.stride()
        inside = [step * stride for step, stride in zip(module.dilation, pixel, strict=True)]
        between = [step * stride for step, stride in zip(module.stride, pixel, strict=True)]
        (s, c), sizes = padded.shape[:2], (*module.kernel_size, padded.shape[1] // g, *gradients.shape[3:])
        patches = padded.as_strided((s, g, *sizes), (sample, c // g * channel, *inside, channel, *between))
        return patches.reshape(s, g, 1, -1, num_positions).transpose(-1, -2)

    return Factors(num_positions=num_positions, left=left, right=right)


def _patches_of_runs(module: nn.Conv2d, padded: Tensor, image: torch.Size) -> Tensor:
    """Returns the patches [s, g, 1, T, k] of images that are channels_last: every pixel of a patch is one run."""
    channels, dtype = padded.shape[1] // module.groups, padded.dtype
    pixels = padded.permute(0, 2, 3, 1)
    if pixels.is_contiguous() and channels % 4 == 0 and dtype is torch.float32:
        pixels = pixels.view(torch.complex128)  # four elements moved as one: the copy is bound by its index arithmetic
    channels = pixels.shape[3] // module.groups
    sample, *pixel, _ = pixels.stride()
    inside = [step * stride for step, stride in zip(module.dilation, pixel, strict=True)]
    between = [step * stride for step, stride in zip(module.stride, pixel, strict=True)]
    sizes = (len(pixels), module.groups, *image, *module.kernel_size, channels)
    patches = pixels.as_strided(sizes, (sample, channels, *between, *inside, 1))
    return patches.reshape(len(pixels), module.groups, 1, math.prod(image), -1).view(dtype)


def _zero_padding(module: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns how many zeros the convolution puts above and below, left and right."""
    if module.padding == "valid":
        return (0, 0), (0, 0)
    if module.padding == "same":
        totals = [d * (size - 1) for d, size in zip(module.dilation, module.kernel_size, strict=True)]
        vertical, horizontal = ((total // 2, total - total // 2) for total in totals)
        return vertical, horizontal
    above, beside = cast("tuple[int, int]", module.padding)
    return (above, above), (beside, beside)


def _is_pairing_cheaper(factors: Sequence[Factors], shape: Shape) -> bool:
    """Compares multiply-adds, and elements moved at their price in multiply-adds."""
    if len({f.is_one_hot for f in factors}) > 1:
        return False  # an embedding tied to a linear layer: their products do not separate into pairs of one kind
    columns, positions = shape.b * shape.q, sum(f.num_positions for f in factors)
    pairs = (columns * positions) ** 2
    products = pairs * shape.k if factors[0].is_one_hot else pairs * shape.o + pairs // shape.q**2 * shape.k
    by_pairs = shape.g * (products + pairs * _TRAFFIC)
    by_columns = shape.g * columns * shape.o * shape.k * (positions + columns + _TRAFFIC)
    return by_pairs < by_columns


def _gram_by_columns(factors: Sequence[Factors], shape: Shape, block_bytes: int) -> Tensor:
    everything = factors[0].right(slice(0, 1))
    itemsize, num_columns = everything.element_size(), shape.b * shape.q
    gram = everything.new_zeros(num_columns, num_columns)
    bytes_per_row = num_columns * shape.g * shape.k * itemsize
    bytes_per_sample = shape.g * shape.k * itemsize * max(f.num_positions for f in factors)
    patch_bytes = column_bytes = block_bytes
    if shape.q == 1:
        patch_bytes = min(block_bytes, _PIECE_BYTES)
        column_bytes = min(block_bytes, max(_PIECE_BYTES, bytes_per_row * -(-shape.o // _MAX_PIECES)))
    for rows in slices(shape.o, column_bytes // bytes_per_row):
        pieces = slices(shape.b, patch_bytes // bytes_per_sample)
        blocks = [factor_columns(factors, samples, rows, shape) for samples in pieces]
        columns = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        gram.addmm_(columns, columns.T)
    return gram


def factor_columns(factors: Sequence[Factors], samples: slice, rows: slice, shape: Shape) -> Tensor:
    """Returns the columns of some samples, summed over calls, restricted to some rows of the weight in each group.

    [s q, g * rows * k], made by one call after the other.
    """
    columns = _columns(factors[0], samples, rows, shape)
    for other in factors[1:]:
        columns += _columns(other, samples, rows, shape)
    return columns


def _columns(factors: Factors, samples: slice, rows: slice, shape: Shape) -> Tensor:
    """Returns the columns of some samples, restricted to some rows of the weight in each group: [s q, g * rows * k]."""
    left, right = factors.left(samples), factors.right(samples)
    num_samples, num_rows = len(left), rows.stop - rows.start
    if not factors.is_one_hot:
        # [s, g, q * rows, T] @ [s, g, T, k]: the columns of a sample share its right factor, so that none is copied.
        product = (_stacked_rows(left[..., rows]) @ right.squeeze(2)).view(
            num_samples, shape.g, shape.q, num_rows, shape.k
        )
        return product.transpose(1, 2).reshape(num_samples * shape.q, -1)
    num_columns = num_samples * shape.q
    # One row more than asked for takes in what belongs to other rows: a boolean index would wait for the device.
    is_inside = (left >= rows.start) & (left < rows.stop)
    row = torch.where(is_inside, left - rows.start, num_rows).repeat_interleave(shape.q, dim=0)
    offset = torch.arange(num_columns, device=row.device).unsqueeze(1) * (num_rows + 1)
    table = right.new_zeros(num_columns * (num_rows + 1), shape.k)
    table.index_add_(0, (row + offset).flatten(), right.reshape(-1, shape.k))
    return table.view(num_columns, num_rows + 1, shape.k)[:, :-1].reshape(num_columns, -1)


def _stacked_rows(left: Tensor) -> Tensor:
    """Returns [s, g, q, T, rows] as [s, g, q * rows, T], copied, if at all, along the dimension that is contiguous."""
    s, g, q, t, rows = left.shape
    if left.stride(-1) == 1:
        return left.transpose(2, 3).reshape(s, g, t, q * rows).transpose(-1, -2)
    return left.transpose(-1, -2).reshape(s, g, q * rows, t)


def _gram_by_pairs(factors: Sequence[Factors], shape: Shape, block_bytes: int) -> Tensor:
    # Calls of one layer sum into one column, as positions do: they are further positions.
    everything = slice(0, shape.b)
    left = torch.cat([f.left(everything) for f in factors], dim=-1 if factors[0].is_one_hot else -2)
    right = torch.cat([f.right(everything) for f in factors], dim=-2)
    num_positions, num_columns = right.shape[-2], shape.b * shape.q
    gram = right.new_zeros(shape.b, shape.q, shape.b, shape.q)
    bytes_per_sample = shape.g * num_columns * shape.q * num_positions**2 * right.element_size()
    for samples in slices(shape.b, block_bytes // bytes_per_sample):
        products = _inner(left[samples], left) * _inner(right[samples], right)
        gram[samples] = products.sum(dim=(0, 3, 6))
    return gram.view(num_columns, num_columns)


def _inner(some: Tensor, others: Tensor) -> Tensor:
    """Returns all inner products of factors [s, g, p, T, d] with [b, g, p, T, d]: [g, s, p, T, b, p, T].

    Row numbers [s, T] and [b, T] have product 1 where they are equal, 0 elsewhere.
    """
    if some.dim() == 2:
        return some[None, :, None, :, None, None, None] == others[None, None, None, None, :, None, :]
    s, g, p, t, _ = some.shape
    a = some.transpose(0, 1).reshape(g, s * p * t, -1)
    b = others.transpose(0, 1).reshape(g, len(others) * p * t, -1)
    return (a @ b.transpose(1, 2)).view(g, s, p, t, len(others), p, t)


def slices(stop: int, size: int) -> Iterator[slice]:
    """Returns slices that cover 0..stop in pieces of `size`, at least 1 each."""
    step = max(1, size)
    return (slice(start, min(start + step, stop)) for start in range(0, stop, step))


def module_columns(
    layer: Layer, cotangents: Cotangents, num_samples: int, elements: slice | None, block_bytes: int
) -> Tensor:
    """Returns these elements of the columns [s q, n] of a layer of any kind, from its calls or the whole model's.

    `torch.func` runs the module again and pulls the cotangents back to the weights, for some samples side by side.

    Raises:
        Exception: whatever a module raises that does not work with `torch.func`.
    """
    q = max(len(c[0]) for tensors in cotangents.values() for c in tensors if c is not None)
    bytes_per_sample = q * layer.num_elements * layer.weights[0].element_size()
    blocks = []
    # The fused attention kernels have no batching rule; what else has none runs one by one, as is fitting here.
    # Without gradients of its own: the columns would keep the graph of how the module's other parameters made them.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        for samples in slices(num_samples, block_bytes // bytes_per_sample):
            parts = [_call_columns(layer, call, tensors, samples) for call, tensors in cotangents.items()]
            columns = parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)
            blocks.append(columns[:, elements or slice(None)])
    return torch.cat(blocks)


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


def require_replaceable(layer: Layer, call: Call) -> None:
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
    return tuple(tensors_in(functional_call(call.module, named, args, kwargs)))


def compute_dtype(layer: Layer) -> torch.dtype:
    """Returns what Gram matrices of `layer` are computed in: its weights' dtype, at least FP32."""
    return torch.promote_types(layer.weights[0].dtype, torch.float32)


def sample_columns(sample: Objective, layers: Sequence[Layer], head: Head) -> list[Tensor]:
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


def _flat(gradient: Tensor | None, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if gradient is None:
        return weight.new_zeros(weight.numel(), dtype=dtype)
    return gradient.to_dense().flatten().to(dtype)
