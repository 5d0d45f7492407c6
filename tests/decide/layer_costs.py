"""What layers and their borders cost, and three layers whose variances ask for a precision."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.decide.build import BF16, FP16, FP32
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.signals import LayerCost


def cost_of(fp16: float, bf16: float, fp32: float, border: float, name: str = "") -> LayerCost:
    return LayerCost(name=name, compute_ms={FP16: fp16, BF16: bf16, FP32: fp32}, border_ms=border)


HALF = cost_of(0.5, 0.5, 1.0, 0.2)
"""FP16 or BF16 saves 0.5 ms against FP32; two borders cost 0.4."""
DEAR = cost_of(0.5, 0.5, 1.0, 0.3)
"""The same, but two borders cost 0.6."""
WORSE = cost_of(2.0, 2.0, 1.0, 0.3)
"""A layer that is slower in 16 bits."""
milliseconds = st.floats(0.0, 2.0)
known_costs = st.builds(cost_of, milliseconds, milliseconds, milliseconds, st.floats(0.0, 0.5))

VARIANCE = {FP16: 1e-8, BF16: 1e-5, FP32: 1e-1}
CONFIG = ControlConfig(
    precision=PrecisionConfig(initial=FP32, tau_low=1e-6, tau_high=1e-3, dwell_ticks=0, patience_ticks=1),
    curvature=CurvatureConfig(tau_curv=5.0, smoothing=0.0, alpha=0.0),
    batch=BatchConfig(enabled=False),
)
NAMES = ("conv", "block", "head")


def costs_of(cost: LayerCost) -> tuple[LayerCost, ...]:
    return tuple(replace(cost, name=name) for name in NAMES)
