"""Entry point of the operation: checks the images and selects the kernel or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from triaccel_ray.kernels.image_batch.reference import image_batch as reference

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def image_batch(
    images: Tensor,
    indices: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    key: Tensor | None,
    epoch: Tensor | None = None,
    padding: int = 4,
    reflect: bool = False,
    cutout: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns the images at `indices`, each pixel x as x scale[channel] + shift[channel], [b, c, h, w] of `dtype`.

    With a `key`, image i of the batch is first padded by `padding` pixels on each side. It is cropped to h x w at an
    offset drawn uniformly from (2 padding + 1)^2, and mirrored left to right with probability 1/2. Offset and mirroring
    are a hash of (key, i) alone: equal keys give equal batches. With an `epoch` too, mirroring depends on the image's
    index and the parity of the epoch instead. About half of the images are mirrored in even epochs, the others in odd
    ones. So two epochs show each image both ways (Jordan 2024, "alternating flip"). The padding is a raw 0, which the
    normalization maps to shift[channel], or with `reflect` the image mirrored at its outermost pixels. Last, with
    `cutout`, a square becomes 0 in the result (DeVries and Taylor 2017). Its center is drawn uniformly over the image,
    and it may extend beyond the image.

    On a GPU it is one launch without synchronization. Replays of a CUDA graph read the current indices, key and epoch.

    Args:
        images: uint8 [n, c, h, w], contiguous.
        indices: int64 [b] in [0, n), contiguous, on the device of `images`. On a GPU an index out of range gives raw
            zeros, normalized like others; on a CPU it raises.
        scale: float32 [c], of the raw values, on the device of `images`.
        shift: float32 [c], on the device of `images`.
        key: int64 scalar on the device of `images`; None disables augmentation.
        epoch: int64 scalar on the device of `images`; ignored without a key.
        padding: pixels by which a crop may move each way, 0 to 32767; with `reflect` less than h and w.
        reflect: whether the padding mirrors the image; otherwise it is 0.
        cutout: edge of the square in pixels, 0 to 32767; 0 disables it.
        dtype: of the result: float32, float16 or bfloat16. Arithmetic is float32.

    Returns:
        The batch, in channels_last memory.

    Raises:
        TypeError: images are not uint8, or `dtype` is none of the above.
        ValueError: images or indices have another shape or memory layout, or `padding` is too large to reflect.
    """
    if images.dtype is not torch.uint8:
        raise TypeError(f"images is {images.dtype}: must be torch.uint8")
    if dtype not in _DTYPES:
        raise TypeError(f"dtype = {dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if images.dim() != 4:
        raise ValueError(f"images have shape {list(images.shape)}: must be [n, channels, height, width]")
    if not images.is_contiguous():
        raise ValueError(f"images have strides {images.stride()}: must be contiguous; call .contiguous() once")
    if indices.dim() != 1 or not indices.is_contiguous():
        raise ValueError(f"indices have shape {list(indices.shape)}: must be a contiguous vector")
    if reflect and padding >= min(images.shape[2:]):
        edges = list(images.shape[2:])
        raise ValueError(f"padding = {padding}: must be less than the images' edges, {edges}, to reflect")
    make = reference
    if images.is_cuda:
        from triaccel_ray.kernels.image_batch.triton import image_batch as make  # triton may be missing without a GPU
    return make(
        images, indices, scale, shift,
        key=key, epoch=epoch, padding=padding, reflect=reflect, cutout=cutout, dtype=dtype,
    )  # fmt: skip
