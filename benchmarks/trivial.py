"""Tasks with tiny models: an epoch of `Trivial` takes 10 ms on a CPU, so that a search's time is its overhead."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task


class Trivial(Task):
    """Four Gaussian blobs in eight dimensions, a network of two layers; no FP16, which a CPU emulates slowly."""

    recipe: ClassVar[Recipe] = Recipe(epochs=1, lr=0.05, warmup_epochs=0.0)
    control: ClassVar[ControlConfig] = ControlConfig(
        every_steps=10,
        precision=PrecisionConfig(enabled=False),
        curvature=CurvatureConfig(enabled=False),
        batch=BatchConfig(start=32, minimum=16, maximum=64, granularity=16, step_up=16, step_down=16),
    )

    def model(self) -> nn.Module:
        """Returns a network of two layers."""
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def data(self, purpose: Purpose) -> Splits:
        """Returns 640 training and 64 held-out samples, the same for every purpose."""
        return Splits(train=_blobs(640, seed=0), held_out=_blobs(64, seed=1))


class Layers3(Trivial):
    """Three layers; the control loop with its default interval, without FP16 and the batch rule."""

    recipe: ClassVar[Recipe] = Recipe(epochs=1000, lr=0.001, warmup_epochs=0.0)
    control: ClassVar[ControlConfig] = ControlConfig(
        precision=PrecisionConfig(tau_low=0.0), batch=BatchConfig(enabled=False, start=32)
    )
    num_layers: ClassVar[int] = 3

    def model(self) -> nn.Module:
        """Returns a network of `num_layers` layers."""
        hidden = [part for _ in range(self.num_layers - 2) for part in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), *hidden, nn.Linear(64, 4))

    def data(self, purpose: Purpose) -> Splits:
        """Returns a hundred batches of training samples, and 64 held-out samples."""
        return Splits(train=_blobs(3200, seed=0), held_out=_blobs(64, seed=1))


class Layers60(Layers3):
    """`Layers3` with sixty layers."""

    num_layers: ClassVar[int] = 60


def _blobs(num: int, *, seed: int) -> TensorSource:
    """Returns inputs, float32 [num, 8], and the index of the blob that each is drawn from, int64 [num]."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 4, (num,), generator=draw)
    centers = 3.0 * torch.eye(4, 8)
    return TensorSource(centers[targets] + torch.randn(num, 8, generator=draw), targets)
