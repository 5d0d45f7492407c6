"""A sound as a function of time, learned by a network with sine activations. Its first layer alone needs FP32."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triaccel_ray.config import BatchConfig, ControlConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.model.metrics import Metric
from triaccel_ray.trainables.split import SPLIT_SEED
from triaccel_ray.trainables.task import WITHIN_BUDGET, Purpose, Recipe, SizeByDevice, Splits, Task, parameter_groups

_FIRST_OMEGA, _OMEGA = 3000.0, 30.0
"""Angular frequencies of the first and of the other layers, as Sitzmann et al. chose them for sound."""


class Sine(nn.Module):
    """sin(omega * (W x + b))."""

    def __init__(self, num_inputs: int, width: int, omega: float, bound: float) -> None:
        """Draws W from the uniform distribution on [-bound, bound]."""
        super().__init__()
        self.linear, self.omega = nn.Linear(num_inputs, width), omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [b, width] for x [b, num_inputs]."""
        return torch.sin(self.omega * self.linear(x))


def siren(*, layers: int, width: int) -> nn.Sequential:
    """Returns a SIREN, [b, 1] -> [b, 1]: `layers` hidden layers with sine activations, and a linear output.

    Weights are drawn so that the outputs of all layers are distributed alike (Sitzmann et al. 2020, "Implicit Neural
    Representations with Periodic Activation Functions", section 3.2).
    """
    bound = math.sqrt(6.0 / width) / _OMEGA
    later = (Sine(width, width, _OMEGA, bound) for _ in range(layers - 1))
    last = nn.Linear(width, 1)
    nn.init.uniform_(last.weight, -bound, bound)
    return nn.Sequential(Sine(1, width, _FIRST_OMEGA, 1.0), *later, last)


def melody(num_samples: int, rate: int) -> Tensor:
    """Returns float64 [num_samples] of unit power, `rate` samples a second; always the same sound.

    It has four plucked tones a second, of 110 to 415 Hz, with overtones of up to four times that.
    """
    generator = torch.Generator().manual_seed(0)
    time = torch.arange(num_samples, dtype=torch.float64) / rate
    sound = torch.zeros_like(time)
    for index in range(math.ceil(4 * num_samples / rate)):
        pitch = 110.0 * 2 ** (int(torch.randint(0, 24, (), generator=generator)) / 12)
        seconds = (time - index / 4).clamp(min=0)
        envelope = torch.exp(-4 * seconds) * -torch.expm1(-200 * seconds)
        for harmonic in range(1, 5):
            sound += envelope * torch.sin(2 * math.pi * harmonic * pitch * seconds) / harmonic
    return sound / sound.square().mean().sqrt()


def squared_error(outputs: Any, targets: Tensor) -> Tensor:
    """Returns the squared error of each sample, [b, 1]."""
    errors: Tensor = (outputs.float() - targets).square()
    return errors


SIGNAL_TO_NOISE = Metric(values=squared_error, of_mean=lambda noise: -10 * math.log10(max(noise, 1e-12)))
"""Decibels by which a signal of unit power exceeds the error; at most 120."""


class AudioSiren(Task):
    """Time -> amplitude, learned from 80 % of a sound's samples; 10 % each are for validation and test.

    The first layer computes sines of angles in the thousands. In BF16 these are off by radians, and nothing is learned;
    in FP16 little is. The sound is computed. A subclass may set the size. Defaults are 7 s at 44.1 kHz and 4.2 million
    weights on a GPU, 2 s at 16 kHz and 50,000 weights on a CPU.
    """

    unread: ClassVar[Collection[str]] = ("data_dir", "momentum", "nesterov", "label_smoothing")
    layers = SizeByDevice(gpu=5, cpu=4)
    """Hidden layers."""
    width = SizeByDevice(gpu=1024, cpu=128)
    """Units of each."""
    seconds = SizeByDevice(gpu=7, cpu=2)
    """Length of the sound."""
    rate = SizeByDevice(gpu=44_100, cpu=16_000)
    """Samples of the sound per second."""
    recipe: ClassVar[Recipe] = Recipe(epochs=100, lr=1e-4, warmup_epochs=1.0, weight_decay=0.0, amp="bf16")
    control: ClassVar[ControlConfig] = ControlConfig(
        **WITHIN_BUDGET,
        every_steps=20,
        precision=PrecisionConfig(tau_high=1e-3),
        batch=BatchConfig(start=8192, minimum=4096, maximum=8192, granularity=1024, step_up=1024, step_down=2048),
    )
    metrics: ClassVar[Mapping[str, Metric]] = {"snr_db": SIGNAL_TO_NOISE}
    objective: ClassVar[str] = "snr_db"

    def model(self) -> nn.Module:
        """Returns the network."""
        return siren(layers=self.layers, width=self.width)

    def data(self, purpose: Purpose) -> Splits:
        """Returns times in [-1, 1] and the sound's values there, each float32 [n, 1]."""
        num_samples = self.seconds * self.rate
        times = torch.linspace(-1, 1, num_samples).unsqueeze(1)
        sound = melody(num_samples, self.rate).float().unsqueeze(1)
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(SPLIT_SEED))
        tenth = num_samples // 10
        test, validation, train = order.split([tenth, tenth, num_samples - 2 * tenth])
        held_out = validation
        if purpose is Purpose.FINAL:
            train, held_out = torch.cat((train, validation)), test
        return Splits(
            train=TensorSource(times[train], sound[train]), held_out=TensorSource(times[held_out], sound[held_out])
        )

    def loss(self, outputs: Any, targets: Tensor, recipe: Recipe) -> Tensor:
        """Returns the mean squared error of outputs [b, 1] and targets [b, 1]."""
        return F.mse_loss(outputs.float(), targets)

    def optimizer(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """Returns AdamW, by default without weight decay: Adam."""
        return torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.lr, fused=True)
