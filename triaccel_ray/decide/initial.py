"""The plan and the state of the first step, before anything is measured."""

from __future__ import annotations

from collections.abc import Iterable

from triaccel_ray.config import Activations, ControlConfig
from triaccel_ray.decide.precision import bf16_or_fp16
from triaccel_ray.records.plan import Plan, Precision, Storage, nearest_supported
from triaccel_ray.records.state import BatchState, ControlState, Decision, LayerState


def initial_decision(
    config: ControlConfig, layers: Iterable[tuple[str, tuple[Precision, ...]]], regions: Iterable[str] = ()
) -> Decision:
    """Returns the plan and state of the first step, from the layers' names and supported precisions.

    `regions` are the names of the regions whose storage can change.
    """
    wanted, default = config.precision.initial_layers, config.precision.initial
    offered, precision = dict(layers), dict[str, Precision]()
    has_bf16 = any(Precision.BF16 in supported for supported in offered.values())
    for name, supported in offered.items():
        level = wanted.get(name, default)
        level = bf16_or_fp16(supported, has_bf16=has_bf16) if level is Precision.BF16 else level
        precision[name] = nearest_supported(level, supported)
    plan = Plan(
        batch_size=config.batch.start,
        num_micro_batches=config.batch.accumulate,
        precision=precision,
        lr_scale=dict.fromkeys(precision, 1.0),
        storage=storage_of_all(config.execution.activations, regions),
    )
    # New layers count as having kept their precision for the dwell time: statistics may act at the first tick.
    dwell_ticks = config.precision.dwell_ticks
    state = ControlState(
        layers={name: LayerState(by_variance=each, ticks_since_change=dwell_ticks) for name, each in precision.items()},
        batch=BatchState(ticks_since_change=config.batch.dwell_ticks),
    )
    return Decision(plan=plan, state=state)


def storage_of_all(activations: Activations, regions: Iterable[str]) -> dict[str, Storage]:
    """Returns the storage of regions that are all treated alike; `auto` keeps them all."""
    return {} if activations in ("auto", "keep") else dict.fromkeys(regions, Storage(activations))
