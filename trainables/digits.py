"""Handwritten digits, 8 x 8 pixels, bundled with scikit-learn: trains anywhere in seconds, without a download."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import ClassVar

import torch
from torch import Tensor, nn

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.search_spaces.tuned import tuned_thresholds
from triaccel_ray.trainables.split import SPLIT_SEED, stratified_split
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

_NUM_TEST = 359
_NUM_VALIDATION = 359
_MEAN, _STD = 0.305, 0.376
"""Mean and standard deviation of all pixels, scaled to [0, 1]."""


class Digits(Task):
    """1,797 real images of digits (Alpaydin and Kaynak 1998), 60% training, 20% validation, 20% test samples.

    A sample takes 0.46 million multiply-adds: few, because CPUs only emulate FP16.
    """

    unread: ClassVar[Collection[str]] = ("data_dir",)
    recipe: ClassVar[Recipe] = Recipe(epochs=12, lr=0.1, warmup_epochs=2.0, nesterov=True)
    # Found on a CPU, where a step in FP16 takes ten times as long as one in FP32: BF16 in every layer. A layer's
    # smoothed variance falls from 3e-3..3e-4 at the first step to 3e-7..4e-9 at the last, below tau_low in the end.
    control: ClassVar[ControlConfig] = tuned_thresholds("digits").onto(
        ControlConfig(
            every_steps=6,  # an epoch has 12 steps, 5 of the largest batch
            curvature=CurvatureConfig(every_steps=40),
            batch=BatchConfig(start=96, minimum=32, maximum=256, granularity=32, lr_rule="none"),
        )
    )

    def model(self) -> nn.Module:
        """Returns three convolutions with BatchNorm, 16, 32 and 32 channels, and a linear classifier."""
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 16, 3, padding=1, bias=False),
                norm1=nn.BatchNorm2d(16),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(16, 32, 3, padding=1, bias=False),
                norm2=nn.BatchNorm2d(32),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                conv3=nn.Conv2d(32, 32, 3, padding=1, bias=False),
                norm3=nn.BatchNorm2d(32),
                relu3=nn.ReLU(),
                flatten=nn.Flatten(),
                linear=nn.Linear(32 * 4 * 4, 10),
            )
        )

    def data(self, purpose: Purpose) -> Splits:
        """Returns the samples for `purpose`; test samples are dropped before anything is built from the others.

        Nothing is augmented: random shifts by one pixel gained no validation accuracy in 12 epochs.
        """
        images, labels = _load()
        rest, test = stratified_split(labels, _NUM_TEST, SPLIT_SEED)
        if purpose is Purpose.FINAL:
            return Splits(train=_source(images, labels, rest), held_out=_source(images, labels, test))
        images, labels = images[rest], labels[rest]
        train, validation = stratified_split(labels, _NUM_VALIDATION, SPLIT_SEED)
        return Splits(train=_source(images, labels, train), held_out=_source(images, labels, validation))


def _load() -> tuple[Tensor, Tensor]:
    """Returns all images, float32 [1797, 1, 8, 8], normalized, and their labels, int64 [1797]."""
    from sklearn.datasets import load_digits  # here: it takes a second, and other tasks do not need it

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    return (images / 16 - _MEAN) / _STD, torch.tensor(digits.target, dtype=torch.int64)


def _source(images: Tensor, labels: Tensor, indices: Tensor) -> TensorSource:
    return TensorSource(images[indices], labels[indices])
