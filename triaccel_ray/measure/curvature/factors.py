"""Gradient columns of a layer whose gradient has a closed form, as sums of outer products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaccel_ray.model.layers import Layer, is_transposed

_OPERATIONS_PER_ELEMENT_MOVED = 16
"""Multiply-adds in the time that one element takes to be written and read again: an order of magnitude for GPUs and
CPUs. It matters only for the choice between two ways of similar cost."""

_PIECE_BYTES = 20 * 2**20
"""Bytes of patches or columns held at once if samples have a single column each. As large as PyTorch's allocator
segments, so that they fit into memory freed by a training step, whose tensors are smaller than patches."""
_MAX_PIECES = 4
"""Most pieces into which columns are split to that end; each piece forms all patches again."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one layer's columns: b samples with q columns each; a weight of g groups of o rows of k elements."""

    b: int
    q: int
    g: int
    o: int
    k: int

    @classmethod
    def of(cls, layer: Layer, b: int, q: int) -> Shape:
        """Returns the sizes of a factored layer's columns."""
        weight, module = layer.weights[0], layer.modules[0]
        if is_transposed(module):
            return cls(b=b, q=q, g=1, o=weight.shape[1], k=weight.shape[0])
        groups = getattr(module, "groups", 1)
        return cls(b=b, q=q, g=groups, o=weight.shape[0] // groups, k=weight.numel() // weight.shape[0])


@dataclass(frozen=True, eq=False)
class Factors:
    """The columns of one call of a layer, as sums of outer products over positions t = 1..T.

        column[i, c] = sum_t left[i, c, t] (x) right[i, c, t]

    One factor comes from the call's input and is the same for all columns c of a sample i. The other is the gradient
    with respect to the call's output. Both are computed on demand for a slice of s samples, since an unfolded image is
    many times larger than the image.
    """

    num_positions: int
    """T."""
    left: Callable[[slice], Tensor]
    """The factor along the weight's rows: [s, g, q, T, o]; int64 row indices [s, T] if it is one-hot."""
    right: Callable[[slice], Tensor]
    """The factor along the rest of the weight: [s, g, q or 1, T, k]."""
    is_one_hot: bool = False
    """Whether `left` returns row indices."""


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

    Chooses the cheaper of two ways. One forms the columns, for some rows of the weight at a time. The other does not:
    <l (x) r, l' (x) r'> = <l, l'> <r, r'>, summed over all pairs of positions. The second suits few positions (linear
    layers without a sequence, late convolutions) and large vocabularies.
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

    def left(samples: slice) -> Tensor:
        return gradients[samples].reshape(-1, q, g, gradients.shape[2] // g, num_positions).permute(0, 2, 1, 4, 3)

    def right(samples: slice) -> Tensor:
        return _patches(module, inputs[samples], gradients.shape[3:])

    return Factors(num_positions=num_positions, left=left, right=right)


def _patches(module: nn.Conv2d, inputs: Tensor, image: torch.Size) -> Tensor:
    """Returns the patches [s, g, 1, T, k] of images, each in the order row, column, channel.

    One strided view, copied once: F.unfold launches a kernel for every sample. In channels_last a pixel is contiguous.
    """
    padded = F.pad(inputs, module._reversed_padding_repeated_twice)  # private: nothing public covers padding="same"
    g, dtype, pixels = module.groups, padded.dtype, padded.permute(0, 2, 3, 1)
    if pixels.is_contiguous() and padded.shape[1] // g % 4 == 0 and dtype is torch.float32:
        # Four elements move as one: index arithmetic bounds the copy. Flat: dimensions of size 1 may have odd strides.
        pixels = pixels.reshape(-1).view(torch.complex128).view(*pixels.shape[:3], -1)
    channels = pixels.shape[3] // g
    sample, *pixel, channel = pixels.stride()
    inside = [step * stride for step, stride in zip(module.dilation, pixel, strict=True)]
    between = [step * stride for step, stride in zip(module.stride, pixel, strict=True)]
    sizes = (len(pixels), g, *image, *module.kernel_size, channels)
    patches = pixels.as_strided(sizes, (sample, channels * channel, *between, *inside, channel))
    return patches.reshape(len(pixels), g, 1, math.prod(image), -1).view(dtype)


def _is_pairing_cheaper(factors: Sequence[Factors], shape: Shape) -> bool:
    """Compares both ways by multiply-adds, counting each element moved as `_OPERATIONS_PER_ELEMENT_MOVED` of these."""
    if len({f.is_one_hot for f in factors}) > 1:
        return False  # an embedding tied to a linear layer: their products do not separate into pairs of one kind
    columns, positions = shape.b * shape.q, sum(f.num_positions for f in factors)
    pairs = (columns * positions) ** 2
    products = pairs * shape.k if factors[0].is_one_hot else pairs * shape.o + pairs // shape.q**2 * shape.k
    by_pairs = shape.g * (products + pairs * _OPERATIONS_PER_ELEMENT_MOVED)
    by_columns = shape.g * columns * shape.o * shape.k * (positions + columns + _OPERATIONS_PER_ELEMENT_MOVED)
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

    Shape [s q, g * rows * k]; calls are added one after the other.
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
    # An extra row collects the entries of all other rows: a boolean index would wait for the device.
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
    # Calls of one layer add up to one column, as positions do, so they count as further positions.
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

    For row indices [s, T] and [b, T] the product is 1 where they are equal, 0 elsewhere.
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


def compute_dtype(layer: Layer) -> torch.dtype:
    """Returns the dtype for Gram matrices of `layer`: that of its weights, at least FP32."""
    return torch.promote_types(layer.weights[0].dtype, torch.float32)
