"""Maps records of an event log to MLflow metrics, params and tags.

Metrics of ticks and epochs are logged at the optimizer step, so that their curves share one axis. The metric `epoch`
says which step ended which epoch. Metrics of a timed batch size are logged at that size. Final results are metrics
named `final/...` at step 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from triaccel_ray.measure.score import BYTES_PER_GB
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import End, Epoch, Start, Throughput, Tick
from triaccel_ray.records.plan import Precision, Storage
from triaccel_ray.service.runs.spec import BASELINES

RESULT_PREFIX = "final/"
"""Prefix of the metrics that hold a run's final results."""

INFO_PARAMS = ("task", "method", "seed", "kind", "space", "objective", "margin", "methods")
"""Entries of a start record's `info` that become params, besides tags."""

_IN_EFFECT_WHEN_OFF: Mapping[str, tuple[str, ...]] = {"precision": ("initial",), "batch": ("start",)}
"""Part of the control loop -> its settings that apply even if the part is switched off."""

_ILLEGAL = re.compile(r"[^\w.\- :/]")
"""Characters that MLflow does not allow in names."""


def metrics_of(record: Tick | Epoch | Throughput | End) -> dict[str, float]:
    """Returns the metrics of one record, without values that were not measured. 1 GB is 10^9 bytes."""
    if isinstance(record, Tick):
        values = _tick_metrics(record)
    elif isinstance(record, Epoch):
        values = _epoch_metrics(record)
    elif isinstance(record, Throughput):
        values = _throughput_metrics(record)
    else:
        values = {f"{RESULT_PREFIX}{legal_name(name)}": value for name, value in record.results.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def step_of(record: Tick | Epoch | Throughput | End) -> int:
    """Returns the optimizer step that the record's metrics belong to; the batch size of a `Throughput`."""
    if isinstance(record, Tick):
        return record.observation.step
    if isinstance(record, Throughput):
        return record.batch_size
    return record.step if isinstance(record, Epoch) else 0


def params_of(start: Start) -> dict[str, str]:
    """Returns the settings in effect: those in `INFO_PARAMS`, the control loop's under dotted names, and the recipe.

    A baseline trains without the control loop. A parent run has no settings of a single run.
    """
    method = start.info.get("method")
    settings: dict[str, Any] = {name: start.info[name] for name in INFO_PARAMS if name in start.info}
    if method in BASELINES:
        settings["batch.start"] = start.control.batch.start
    elif method is not None:
        settings |= _settings_in_effect(encode(start.control))
    settings |= start.parameters
    if method != "amp":
        settings.pop("recipe.amp", None)
    return {legal_name(name): _text(value) for name, value in settings.items()}


def tags_of(start: Start) -> dict[str, str]:
    """Returns the tags to filter runs by, under plain names that make good columns: task, method, seed, ..."""
    return {legal_name(name): value for name, value in start.info.items()}


def legal_name(name: str) -> str:
    """Returns `name` with an underscore for each character that MLflow refuses."""
    return _ILLEGAL.sub("_", name)


def _tick_metrics(tick: Tick) -> dict[str, float | None]:
    observation, memory, plan = tick.observation, tick.observation.memory, tick.applied.plan
    levels = list(plan.precision.values())
    stored, predicted = list(plan.storage.values()), tick.decision.state.memory.predicted_bytes
    scales = [plan.lr_scale.get(name, 1.0) for name in plan.precision]
    layers = tick.decision.state.layers.values()
    eigenvalues = [layer.eigenvalues[0] for layer in layers if layer.eigenvalues]
    return {
        "train/loss": observation.loss,
        "control/batch_size": plan.batch_size,
        "control/micro_batches": plan.num_micro_batches,
        "control/adapt_seconds": tick.applied.adapt_ms / 1e3,
        "memory/used_gb": memory.used_bytes / BYTES_PER_GB,
        "memory/window_peak_gb": memory.window_peak_bytes / BYTES_PER_GB,
        "memory/peak_gb": memory.peak_bytes / BYTES_PER_GB,
        "memory/allocated_peak_gb": memory.allocated_peak_bytes / BYTES_PER_GB,
        "memory/share": memory.share(),
        "memory/predicted_peak_gb": None if predicted is None else predicted / BYTES_PER_GB,
        "memory/predicted_step_ms": tick.decision.state.memory.predicted_ms,
        "memory/recomputed_regions": sum(each.repeats for each in stored),
        "memory/offloaded_regions": stored.count(Storage.OFFLOAD),
        **{f"layers/{level.value}": levels.count(level) for level in Precision},
        "curvature/largest_eigenvalue": max(eigenvalues, default=None),
        "curvature/layers_held": sum(layer.held for layer in layers),
        "lr/scale_min": min(scales, default=None),
        "lr/scale_mean": sum(scales) / len(scales) if scales else None,
        "lr/batch_scale": plan.batch_lr_scale,
        "loss_scale": observation.loss_scale,
        "skipped_steps": observation.num_skipped,
        "faults": len(observation.faults),
    }


def _epoch_metrics(epoch: Epoch) -> dict[str, float | None]:
    # A baseline has no ticks: its batch size and the allocator's peak are known from its epochs alone.
    return {
        "epoch": epoch.epoch,
        "train/epoch_loss": epoch.train_loss,
        **{f"val/{legal_name(name)}": value for name, value in epoch.held_out_metrics.items()},
        "val/loss": epoch.held_out_loss,
        "seconds_per_epoch": epoch.seconds,
        "images_per_second": epoch.images_per_second,
        "control/batch_size": epoch.batch_size,
        "memory/peak_gb": epoch.peak_bytes / BYTES_PER_GB,
        "memory/allocated_peak_gb": epoch.allocated_peak_bytes / BYTES_PER_GB,
        "energy/joules": epoch.joules,
        "skipped_steps": epoch.num_skipped,
        "score": epoch.score,
    }


def _throughput_metrics(throughput: Throughput) -> dict[str, float | None]:
    ms = throughput.ms_per_sample
    return {
        "samples_per_second": None if ms is None else 1e3 / ms,
        "step_ms": throughput.step_ms,
        "control/micro_batches": throughput.num_micro_batches,
        "memory/peak_gb": throughput.peak_bytes / BYTES_PER_GB,
    }


def _settings_in_effect(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the settings under dotted names, without those that a switched-off part does not use."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            flat[f"{prefix}{name}"] = value
            continue
        if value.get("enabled") is False:
            value = {key: value[key] for key in ("enabled", *_IN_EFFECT_WHEN_OFF.get(name, ()))}
        flat |= _settings_in_effect(value, f"{prefix}{name}.")
    return flat


def _text(value: Any) -> str:
    """Returns the value as text; whole numbers have no decimals, even if they are floats."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if is_whole else str(value)
