"""Precision, learning rate and batch size of PyTorch training under one control loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triaccel_ray.apply.evaluate import Evaluation
    from triaccel_ray.config import (
        BatchConfig,
        ControlConfig,
        CurvatureConfig,
        ExecutionConfig,
        LossScaleConfig,
        PrecisionConfig,
    )
    from triaccel_ray.control.divergence import NonFiniteGradientsError
    from triaccel_ray.control.epochs import EpochStats
    from triaccel_ray.cuda.allocator import hold_less
    from triaccel_ray.data.data_source import DataSource
    from triaccel_ray.data.iterable import IterableSource
    from triaccel_ray.data.sources import DatasetSource, TensorSource
    from triaccel_ray.loop import ControlLoop
    from triaccel_ray.measure.score import efficiency_score
    from triaccel_ray.model.metrics import ACCURACY, BITS_PER_BYTE, PERPLEXITY, Metric
    from triaccel_ray.records.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
    from triaccel_ray.records.events import EventLog, LogError, read_events
    from triaccel_ray.records.plan import Plan, Precision
    from triaccel_ray.service.api import compare, run, search
    from triaccel_ray.service.failures import RunFailedError
    from triaccel_ray.service.result import Report
    from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

__all__ = [
    "ACCURACY",
    "BITS_PER_BYTE",
    "PERPLEXITY",
    "BatchConfig",
    "CheckpointError",
    "ControlConfig",
    "ControlLoop",
    "CurvatureConfig",
    "DataSource",
    "DatasetSource",
    "EpochStats",
    "Evaluation",
    "EventLog",
    "ExecutionConfig",
    "IterableSource",
    "LogError",
    "LossScaleConfig",
    "Metric",
    "NonFiniteGradientsError",
    "Plan",
    "Precision",
    "PrecisionConfig",
    "Purpose",
    "Recipe",
    "Report",
    "RunFailedError",
    "Splits",
    "Task",
    "TensorSource",
    "compare",
    "efficiency_score",
    "hold_less",
    "load_checkpoint",
    "read_events",
    "run",
    "save_checkpoint",
    "search",
]

_HOMES = {
    name: f"triaccel_ray.{module}"
    for module, names in {
        "apply.evaluate": "Evaluation",
        "config": "BatchConfig ControlConfig CurvatureConfig ExecutionConfig LossScaleConfig PrecisionConfig",
        "control.divergence": "NonFiniteGradientsError",
        "control.epochs": "EpochStats",
        "cuda.allocator": "hold_less",
        "data.data_source": "DataSource",
        "data.iterable": "IterableSource",
        "data.sources": "DatasetSource TensorSource",
        "loop": "ControlLoop",
        "measure.score": "efficiency_score",
        "model.metrics": "ACCURACY BITS_PER_BYTE Metric PERPLEXITY",
        "records.checkpoint": "CheckpointError load_checkpoint save_checkpoint",
        "records.events": "EventLog LogError read_events",
        "records.plan": "Plan Precision",
        "service.api": "compare run search",
        "service.failures": "RunFailedError",
        "service.result": "Report",
        "trainables.task": "Purpose Recipe Splits Task",
    }.items()
    for name in names.split()
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is asked for: settings and decisions are read without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Returns the public names as well, for editors and notebooks."""
    return sorted({*globals(), *_HOMES})
