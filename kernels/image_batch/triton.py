"""Image batches as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements of the result per program: three programs per CIFAR image, over 1,500 at batch 512."""


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
    """Returns the batch; see `triaccel_ray.kernels.image_batch.image_batch`, which checks the arguments."""
    _, channels, height, width = images.shape
    num = len(indices)
    out = torch.empty(
        (num, channels, height, width), dtype=dtype, device=images.device, memory_format=torch.channels_last
    )
    size = channels * height * width
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(images):  # triton launches on the current device, not on that of the tensors
        _image_batch[(num, triton.cdiv(size, _BLOCK))](
            images, indices, scale, shift, indices if key is None else key, indices if epoch is None else epoch, out,
            len(images), PADDING=padding, REFLECT=reflect, CUTOUT=cutout,
            CHANNELS=channels, HEIGHT=height, WIDTH=width, AUGMENT=key is not None, ALTERNATE=epoch is not None,
            BLOCK=_BLOCK, enable_fp_fusion=True,  # Triton warns about the default, which 3.10 turns off
        )  # fmt: skip
    return out


@triton.jit
def _mix(word):
    """Returns `reference._mix` of uint32 `word`."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    return word ^ (word >> 16)


# A slice of an epoch's order may have any alignment: Triton would compile a version for each when it first occurs.
@triton.jit(do_not_specialize=["num_images"], do_not_specialize_on_alignment=["indices", "key", "epoch"])
def _image_batch(
    images, indices, scale, shift, key, epoch, out, num_images,
    PADDING: tl.constexpr, REFLECT: tl.constexpr, CUTOUT: tl.constexpr,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    AUGMENT: tl.constexpr, ALTERNATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    index = tl.load(indices + place)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # of the output image, [height, width, channel]
    inside = element < HEIGHT * WIDTH * CHANNELS
    channel = element % CHANNELS
    x = element // CHANNELS % WIDTH
    y = element // (CHANNELS * WIDTH)
    kept = inside
    # A limit, since Triton's interpreter would convert a scalar bool to a number when it broadcasts it to a block.
    readable = element < tl.where((index >= 0) & (index < num_images), HEIGHT * WIDTH * CHANNELS, 0)
    if AUGMENT:
        state = tl.load(key)
        counter = _mix(place.to(tl.uint32) ^ _mix(state.to(tl.uint32)))
        counter = _mix(counter + _mix((state >> 32).to(tl.uint32) ^ 0x9E3779B9))
        offsets = _mix(counter)
        if CUTOUT > 0:
            center = _mix(counter + 0x3C6EF372)  # 2 * reference._GOLDEN in 32 bits
            left = (((center >> 16) * WIDTH) >> 16).to(tl.int32) - CUTOUT // 2
            top = (((center & 0xFFFF) * HEIGHT) >> 16).to(tl.int32) - CUTOUT // 2
            kept = inside & ((x < left) | (x >= left + CUTOUT) | (y < top) | (y >= top + CUTOUT))
        if ALTERNATE:
            mirrored = ((_mix(index.to(tl.uint32)) >> 31) ^ (tl.load(epoch).to(tl.uint32) & 1)) != 0
        else:
            mirrored = (_mix(counter + 0x9E3779B9) >> 31) != 0
        x = tl.where(mirrored, WIDTH - 1 - x, x) + (((offsets >> 16) * (2 * PADDING + 1)) >> 16).to(tl.int32) - PADDING
        y = y + (((offsets & 0xFFFF) * (2 * PADDING + 1)) >> 16).to(tl.int32) - PADDING
        if REFLECT:
            x = WIDTH - 1 - tl.abs(WIDTH - 1 - tl.abs(x))
            y = HEIGHT - 1 - tl.abs(HEIGHT - 1 - tl.abs(y))
        readable = readable & (x >= 0) & (x < WIDTH) & (y >= 0) & (y < HEIGHT)
    # Reading images stored in channels_last memory instead takes as long: 2.0 us at batch 96, 4.4 at 512 on an H200.
    offset = index * (CHANNELS * HEIGHT * WIDTH) + (channel * HEIGHT + y) * WIDTH + x
    pixel = tl.load(images + offset, mask=readable, other=0).to(tl.float32)
    factor = tl.load(scale + channel, mask=inside, other=0.0)
    summand = tl.load(shift + channel, mask=inside, other=0.0)
    start = place.to(tl.int64) * (CHANNELS * HEIGHT * WIDTH)
    value = tl.where(kept, pixel * factor + summand, 0.0)
    tl.store(out + start + element, value.to(out.dtype.element_ty), mask=inside)
