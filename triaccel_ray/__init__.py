"""Precision, learning rate and batch size of PyTorch training under one control loop."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
    from triaccel_ray.events import EventLog
    from triaccel_ray.loop import ControlLoop
    from triaccel_ray.plan import Precision

__all__ = [
    "BatchConfig",
    "ControlConfig",
    "ControlLoop",
    "CurvatureConfig",
    "EventLog",
    "Precision",
    "PrecisionConfig",
]

_HOMES = {
    "BatchConfig": "config",
    "ControlConfig": "config",
    "ControlLoop": "loop",
    "CurvatureConfig": "config",
    "EventLog": "events",
    "Precision": "plan",
    "PrecisionConfig": "config",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is asked for: settings and decisions are read without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
