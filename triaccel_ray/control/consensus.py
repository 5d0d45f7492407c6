"""Makes the ranks of a run agree: on settings and weights before the first step, on one observation at each tick."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from triaccel_ray.apply.capture import StepCache
from triaccel_ray.config import ControlConfig, require
from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Fault, Precision
from triaccel_ray.records.signals import LayerSignal, MemorySignal, NoiseSignal, Observation


def joined_ranks(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ControlConfig, *, seed: int, epochs: float | None
) -> Ranks:
    """Returns the ranks of the initialized process group, with rank 0's parameters and buffers on all of them.

    Raises:
        ValueError: the ranks were given different settings, models or optimizers; or settings that need one process.
    """
    ranks = Ranks.of_default_group()
    if ranks.is_alone:
        return ranks
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in model.named_parameters()]
    settings = {
        **_flattened(config),
        "seed": seed,
        "epochs": epochs,
        "device": next(model.parameters()).device.type,
        "model": [parameters, [[name, list(buffer.shape)] for name, buffer in model.named_buffers()]],
        "optimizer": [type(optimizer).__name__, [_options(group) for group in optimizer.param_groups]],
        "optimizer state": _sums_of_state(optimizer),
    }
    ranks.require_same_settings(settings)
    size, smallest = ranks.world_size, config.batch.minimum
    rule = f"must be at least the number of ranks, {size}: each has a sample of every whole batch"
    require(smallest >= size, "batch minimum (batch_min)", smallest, rule)
    require(
        config.step_in_backward is not True,
        "step_in_backward",
        True,
        f"must be False on {size} ranks: parameters are updated once the gradients of all ranks have been summed",
    )
    ranks.broadcast_([*model.parameters(), *model.buffers()])
    return ranks


def require_same_steps(ranks: Ranks, steps: StepCache, supported: Sequence[tuple[str, Sequence[Precision]]]) -> None:
    """Checks that ranks have the same samples, if tensors, offer layers the same precisions, and run equal steps.

    Raises:
        ValueError: they do not.
    """
    step = steps.step
    ranks.require_same_settings(
        {
            "number of samples": step.sampler.num_samples,
            "first and last sample (give every rank all samples)": _ends_of(step.sampler.source),
            "precisions": encode(supported),
            "compiled, fused, captured": [str(step.compilation), step.fusion is not None, steps.enabled],
        }
    )


def _ends_of(source: DataSource) -> str:
    """Returns a few numbers of the first and the last sample; empty if samples are not given as tensors."""
    tensors = (source.inputs, source.targets) if isinstance(source, TensorSource) else ()
    return ", ".join(str(each[at].flatten()[:4].tolist()) for each in tensors for at in (0, -1))


def _flattened(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the fields of a configuration by dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name
        found |= _flattened(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: encode(value)}
    return found


@torch.no_grad()
def _sums_of_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the sum of each tensor of the optimizer's state, and its other values, in the order of its parameters."""
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        [name, float(value.double().sum()) if isinstance(value, torch.Tensor) else str(value)]
        for parameter in updated
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
    ]


def _options(group: Mapping[str, Any]) -> dict[str, str]:
    options = {name: str(value) for name, value in group.items() if name != "params"}
    return options | {"parameters": str(len(group["params"]))}


def agreed_observation(ranks: Ranks, observation: Observation) -> Observation:
    """Returns the observation on which all ranks decide, merged from their own; a collective.

    It passes as JSON, as in the event log. So every rank decides on the same numbers, and `replay` can check each.
    """
    if ranks.is_alone:
        return observation
    return merged([decode(Observation, each) for each in ranks.all_gather_object(encode(observation))])


def merged(observations: Sequence[Observation]) -> Observation:
    """Returns one observation from those of all ranks, by rank.

    Variances, losses and the loss scale are sums over ranks already, hence equal. Memory is that of the rank with the
    least room. Times are the slowest rank's. Eigenvalues and noise are means over the ranks that measured them. The
    memory profile is rank 0's.
    """
    first = observations[0]
    step_times = [each.step_ms for each in observations if each.step_ms is not None]
    noises = [each.noise for each in observations if each.noise is not None]
    noise = None
    if noises:
        noise = NoiseSignal(
            mean_square_norm=fmean(each.mean_square_norm for each in noises),
            trace_covariance=fmean(each.trace_covariance for each in noises),
        )
    return replace(
        first,
        layers=tuple(_merged_layer(each) for each in zip(*(each.layers for each in observations), strict=True)),
        memory=_merged_memory([each.memory for each in observations]),
        step_ms=max(step_times, default=None),
        adapting_ms=max(each.adapting_ms for each in observations),
        noise=noise,
        faults=_merged_faults([each.faults for each in observations]),
    )


def _merged_layer(signals: Sequence[LayerSignal]) -> LayerSignal:
    measured = [signal.eigenvalues for signal in signals if signal.eigenvalues]
    eigenvalues = tuple(map(fmean, zip(*measured, strict=False))) or None
    return replace(signals[0], eigenvalues=eigenvalues)


def _merged_memory(signals: Sequence[MemorySignal]) -> MemorySignal:
    names = ("used_bytes", "peak_bytes", "allocated_bytes", "allocated_peak_bytes")
    most = {name: max(getattr(signal, name) for signal in signals) for name in names}
    attainable = min(signal.attainable_bytes for signal in signals)
    fullest = max(signals, key=lambda signal: signal.window_peak_bytes)
    is_unknown = any(signal.free_bytes is None for signal in signals)
    return MemorySignal(
        **most,
        window_peak_bytes=fullest.window_peak_bytes,
        limit_bytes=min(signal.limit_bytes for signal in signals),
        idle_bytes=fullest.idle_bytes,
        free_bytes=None if is_unknown else max(attainable - most["used_bytes"], 0),
    )


def _merged_faults(faults_of: Sequence[Sequence[Fault]]) -> tuple[Fault, ...]:
    """Returns the faults of all ranks, each once; the detail of one that rank 0 does not have names its rank."""
    found: dict[tuple[Fault, int], Fault] = {}
    for rank, faults in enumerate(faults_of):
        num_alike = Counter[Fault]()
        for fault in faults:
            alike = replace(fault, detail="")
            named = fault if rank == 0 else replace(fault, detail=f"rank {rank}: {fault.detail}")
            found.setdefault((alike, num_alike[alike]), named)
            num_alike[alike] += 1
    return tuple(sorted(found.values(), key=lambda fault: fault.step))
