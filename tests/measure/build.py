"""Sensors of a small network that has taken a step, and a reading of them."""

from __future__ import annotations

import torch

from tests.build import FP32, collected, mlp
from triaccel_ray.measure.memory import ResidentMemory
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.measure.sensors import Sensors
from triaccel_ray.measure.timing import StepTimer
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Plan, Precision
from triaccel_ray.records.signals import Observation

PLAN = Plan(batch_size=8, precision={"0": FP32, "2": FP32, "4": FP32})


def sensors_of() -> Sensors:
    model = mlp()
    layers = find_layers(model)
    named: list[tuple[str, tuple[Precision, ...]]] = [(layer.name, tuple(Precision)) for layer in layers]
    named[1] = ("2", (FP32,))
    moments = GradientMoments(layers, list(model.parameters()), beta=0.5)
    sensors = Sensors(
        named, moments, ResidentMemory(None), StepTimer(torch.device("cpu")), torch.zeros(2, dtype=torch.float64)
    )
    model[0].weight.grad = torch.arange(model[0].weight.numel()).view_as(model[0].weight).float()
    moments.update(collected(model), torch.tensor(2.0))
    return sensors


def read(sensors: Sensors, tick: int = 4) -> Observation:
    scale = torch.tensor([1024.0, 3.0, 2.0], dtype=torch.float64)  # the scale, steps skipped, of these in a row
    return sensors.read(PLAN, scale, step=100, tick=tick, epoch=1.5)()
