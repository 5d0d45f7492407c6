"""Image batches in plain PyTorch: the specification of the kernel, also used on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
"""2^32 over the golden ratio: the distance between the hash inputs of the words drawn from one counter."""


def image_batch(
    images: Tensor,
    indices: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    key: Tensor | None,
    epoch: Tensor | None,
    padding: int,
    reflect: bool,
    cutout: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the batch; see `triaccel_ray.kernels.image_batch.image_batch`."""
    batch = images[indices]
    if key is not None:
        rows, columns, mirrored = draw(key, len(indices), padding)
        if epoch is not None:
            mirrored = mirrored_in(epoch, indices)
        batch = _cropped_and_mirrored(batch, rows, columns, mirrored, padding, reflect=reflect)
    prepared = batch.to(torch.float32, memory_format=torch.channels_last)
    prepared = prepared.mul_(scale.view(1, -1, 1, 1)).add_(shift.view(1, -1, 1, 1))
    if key is not None and cutout:
        prepared = prepared.masked_fill_(_cut(key, batch.shape, cutout), 0.0)
    return prepared.to(dtype, memory_format=torch.channels_last)


def _cropped_and_mirrored(
    images: Tensor, rows: Tensor, columns: Tensor, mirrored: Tensor, padding: int, *, reflect: bool
) -> Tensor:
    """Returns the images [b, c, h, w] cropped and mirrored, in one gather."""
    num, _, height, width = images.shape
    y = torch.arange(height, device=images.device) + rows[:, None]  # [b, h], in the padded image
    if reflect:
        y = _reflected(y - padding, height)
    x = torch.arange(width, device=images.device)
    x = torch.where(mirrored[:, None], x.flip(0), x) + columns[:, None]  # [b, w]
    if reflect:
        x = _reflected(x - padding, width)
    padded = images if reflect else F.pad(images, (padding, padding, padding, padding))
    samples = torch.arange(num, device=images.device)
    # Advanced indices around a slice put the slice last: [b, h, w, c] in memory, which is channels_last.
    return padded[samples[:, None, None], :, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


def _reflected(position: Tensor, size: int) -> Tensor:
    """Returns positions in (-size, 2 size - 1), mirrored into the image at the centers of its outermost pixels."""
    return size - 1 - (size - 1 - position.abs()).abs()


def draw(key: Tensor, num: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the augmentation of `num` images: rows and columns, int64 [num] in [0, 2 padding], and mirrored, bool.

    16 bits of a word give the row, the others the column, by multiplication. Over 9 offsets, no probability is off by
    more than one in 7,000. The top bit of another word decides on mirroring.
    """
    span = 2 * padding + 1
    rows, columns = _pair(_word(key, num, 0), span, span)
    return rows, columns, _word(key, num, 1) >> 31 == 1


def mirrored_in(epoch: Tensor, indices: Tensor) -> Tensor:
    """Returns whether each image at `indices` is mirrored in an epoch, bool [b], by a hash and the epoch's parity."""
    return (_mix(indices & _MASK) >> 31) ^ (epoch & 1) == 1


def draw_centers(key: Tensor, num: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the center of the cutout of each of `num` images: rows in [0, height), columns in [0, width)."""
    return _pair(_word(key, num, 2), height, width)


def _cut(key: Tensor, shape: torch.Size, cutout: int) -> Tensor:
    """Returns the mask of cut-out pixels of a batch [b, c, h, w]: bool [b, 1, h, w]."""
    num, _, height, width = shape
    tops, lefts = (centers - cutout // 2 for centers in draw_centers(key, num, height, width))
    y = torch.arange(height, device=key.device) - tops[:, None]
    x = torch.arange(width, device=key.device) - lefts[:, None]
    return (((y >= 0) & (y < cutout))[:, :, None] & ((x >= 0) & (x < cutout))[:, None, :])[:, None]


def _word(key: Tensor, num: int, which: int) -> Tensor:
    """Returns 32 random bits for each of `num` images, hashed from the key's halves and its position in the batch."""
    place = torch.arange(num, dtype=torch.int64, device=key.device)
    counter = _mix(place ^ _mix(key & _MASK))
    counter = _mix((counter + _mix((key >> 32 & _MASK) ^ _GOLDEN)) & _MASK)
    return _mix((counter + which * _GOLDEN) & _MASK)


def _pair(word: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return (word & 0xFFFF) * rows >> 16, (word >> 16) * columns >> 16


def _mix(word: Tensor) -> Tensor:
    """Returns a hash that permutes the 32-bit numbers: Chris Wellons' `lowbias32` (hash-prospector).

    int64 products of two such numbers wrap around, which leaves their low 32 bits correct.
    """
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _MASK
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _MASK
    return word ^ (word >> 16)
