"""Data sets of small images, kept as raw pixels in memory that the training device can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from triaccel_ray.config import check_fields, knob
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.kernels.image_batch import image_batch

_PADDING = 4
"""Pixels by which a random crop may move each way, with reflection padding."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How raw images are augmented, normalized and resized for a model."""

    mean: Sequence[float]
    """Mean of each channel, on the scale [0, 1]."""
    std: Sequence[float]
    """Standard deviation of each channel, likewise; above 0."""
    size: int | None = None
    """Edge in pixels to which images are resized, the last operation; None: not resized."""
    augment: bool = False
    """Whether training batches are cropped at random, and images mirrored in every other epoch: "alternating flip"
    (Jordan 2024). Even epochs mirror the same images for all seeds."""
    mirror_views: bool = False
    """Whether evaluation averages the model's outputs for each image and its mirror image."""
    cutout: int = knob(0, "[0, inf)")
    """Edge in pixels of the square that is cut out of every augmented image; 0: none."""

    def __post_init__(self) -> None:
        check_fields(self)


class ImageSource(TensorSource):
    """Images kept as uint8; each batch is cropped, mirrored, normalized, cast and resized on the device."""

    def __init__(self, images: Tensor, targets: Tensor, preparation: Preparation) -> None:
        """Holds images uint8 [n, c, h, w] and targets [n, ...].

        Raises:
            ValueError: the numbers of images and targets differ, or those of channels and means or deviations.
        """
        super().__init__(images.contiguous(), targets)
        channels = images.shape[1]
        for name, values in (("mean", preparation.mean), ("std", preparation.std)):
            if len(values) != channels:
                raise ValueError(f"{name} has {len(values)} entries: the images have {channels} channels")
        self.preparation = preparation
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (preparation.mean, preparation.std))
        # (x / 255 - mean) / std = x scale + shift
        self._scale = (1.0 / (255.0 * std)).float().to(images.device)
        self._shift = (-mean / std).float().to(images.device)
        # On the device, where a captured step reads it.
        self._epoch = torch.zeros((), dtype=torch.int64, device=images.device)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the images at `indices`, [b, c, h, w] in channels_last memory, and their targets.

        They are augmented if the preparation says so and a generator is given, from which one number is drawn.
        """
        device, preparation = self.inputs.device, self.preparation
        indices = indices.to(device, non_blocking=True)
        key = None
        if preparation.augment and generator is not None:
            key = torch.randint(2**63 - 1, (), generator=generator, device=device)
        images = image_batch(
            self.inputs, indices, self._scale, self._shift, key=key, epoch=self._epoch,
            padding=_PADDING, reflect=True, cutout=preparation.cutout,
        )  # fmt: skip
        if preparation.size is not None:
            images = F.interpolate(images, size=preparation.size, mode="bilinear", align_corners=False)
            images = images.contiguous(memory_format=torch.channels_last)
        return images, self.targets[indices]

    def views(self, inputs: Tensor) -> Sequence[Tensor]:
        """Returns prepared images and, if the preparation says so, their mirror images."""
        return (inputs, inputs.flip(-1)) if self.preparation.mirror_views else (inputs,)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which decides which augmented images are mirrored."""
        self._epoch.fill_(epoch)

    def to(self, device: torch.device) -> Self:
        """Returns a source whose images are on `device`, reset to epoch 0."""
        return self._with(self.inputs.to(device), self.targets.to(device))

    def _with(self, inputs: Tensor, targets: Tensor) -> Self:
        moved, device = super()._with(inputs, targets), inputs.device
        moved._scale, moved._shift = self._scale.to(device), self._shift.to(device)
        moved._epoch = torch.zeros_like(self._epoch, device=device)
        return moved
