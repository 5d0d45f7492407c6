"""Models and loops on a GPU whose steps are captured, or not."""

from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.plan import Precision

Data = tuple[Tensor, Tensor]


def images(num_samples: int, size: int = 16) -> Data:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 10, (num_samples,), generator=generator)
    inputs = torch.randn(num_samples, 3, size, size, generator=generator)
    inputs[:, 0] += targets.view(-1, 1, 1) / 3
    return inputs.cuda(), targets.cuda()


def network(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10),
    ).cuda().to(memory_format=torch.channels_last)  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def fixed(level: Precision, *, batch: int = 64, **execution: Any) -> ControlConfig:
    return ControlConfig(
        every_steps=5,
        revert_slowdowns=False,  # curvature is measured when it is due, whatever it costs
        precision=PrecisionConfig(enabled=False, initial=level),
        curvature=CurvatureConfig(enabled=False),
        batch=BatchConfig(enabled=False, start=batch, minimum=batch // 2, maximum=batch, granularity=1),
        execution=ExecutionConfig(**{"compile": "off", **execution}),
    )


def loop_of(model: nn.Module, config: ControlConfig, make: Any = sgd, data: Any = None, **options: Any) -> Any:
    options = {"loss": nn.functional.cross_entropy, "data": data or images(640), **options}
    return ControlLoop(model, make(model), config=config, **options)


def distance(first: nn.Module, second: nn.Module) -> float:
    """Largest relative difference between two models' weights and buffers."""
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-6)) for a, b in pairs)


def faults_of(ticks: list[Any]) -> list[Any]:
    return [fault for tick in ticks for fault in tick.observation.faults]


def fault_messages(ticks: list[Any]) -> list[str]:
    return [f"{fault.kind}: {fault.detail}" for fault in faults_of(ticks)]
