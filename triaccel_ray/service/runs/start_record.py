"""The first record of a run."""

from __future__ import annotations

from typing import Any

import torch

from triaccel_ray.config import ControlConfig
from triaccel_ray.measure.memory import MemoryMeter
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import Start
from triaccel_ray.service.runs.environment import environment
from triaccel_ray.service.runs.spec import RunSpec


def start_record(spec: RunSpec, control: ControlConfig, device: torch.device, memory: MemoryMeter) -> Start:
    """Returns what was asked for, and where the run trains: on `device`, by `control`, within the limit of `memory`."""
    info = {"task": spec.task, "method": spec.method, "seed": str(spec.seed), "purpose": spec.purpose.value}
    recipe: dict[str, Any] = {f"recipe.{name}": value for name, value in encode(spec.recipe).items()}
    if spec.trials_per_gpu > 1:
        info["trials_per_gpu"] = str(spec.trials_per_gpu)
    info["memory_source"] = memory.source
    return Start(
        control=control,
        goal=spec.goal,
        info={**info, **environment(device)},
        parameters={**recipe, "memory_limit_bytes": memory.limit_bytes},
    )
