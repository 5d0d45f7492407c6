"""Operations on whole batches of images, on the device that trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def random_crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Returns every image shifted by up to `padding` pixels each way, zeros entering, and mirrored half of the time.

    That is a random crop of the zero-padded image, then a horizontal flip, in one gather. `images` is [b, c, h, w] of
    any dtype, on the generator's device; so is the result, in channels_last memory.
    """
    batch, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, (padding, padding, padding, padding))
    offsets = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator, device=device)
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator, device=device)
    columns = torch.arange(width, device=device)
    columns = torch.where(mirrored == 1, columns.flip(0), columns) + offsets[0]  # [b, w]
    rows = torch.arange(height, device=device) + offsets[1]  # [b, h]
    samples = torch.arange(batch, device=device)
    # Advanced indices around a slice put the slice last: [b, h, w, c] in memory, which is what channels_last means.
    return padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class PrepareImages:
    """Maps uint8 images [b, c, h, w] to float32 ones, normalised per channel, resized if asked, in channels_last."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], size: int | None = None) -> None:
        """Takes each channel's `mean` and `std` on the scale [0, 1], and the edge in pixels to resize to, if any."""
        # (x / 255 - mean) / std = x scale + shift
        self._scale = tuple(1.0 / (255.0 * s) for s in std)
        self._shift = tuple(-m / s for m, s in zip(mean, std, strict=True))
        self._size = size
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Returns the prepared batch."""
        scale, shift = self._constants_on(images.device)
        prepared = images.to(torch.float32, memory_format=torch.channels_last).mul_(scale).add_(shift)
        if self._size is not None:
            prepared = F.interpolate(prepared, size=self._size, mode="bilinear", align_corners=False)
        return prepared.contiguous(memory_format=torch.channels_last)

    def _constants_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        # Kept, because copying them to a GPU anew at every batch would make the host wait for it.
        if device not in self._constants:
            scale, shift = torch.tensor([self._scale, self._shift], device=device).reshape(2, 1, -1, 1, 1)
            self._constants[device] = (scale, shift)
        return self._constants[device]
