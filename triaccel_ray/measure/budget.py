"""How many samples a measurement passes at once within a memory budget, and how long it takes, from probes of a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_MIN_BUDGET = 32 * 2**20
"""Smallest budget in bytes. Below it chunks cost more than they save: the allocator's segments are as large."""
_MIN_BLOCK = 8 * 2**20
"""Smallest block of per-sample gradients in bytes; smaller ones cost more time than they save memory."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Cost of measuring a few samples."""

    num_samples: int
    """Samples that pass through the model at once."""
    num_bytes: int
    """Peak bytes of the tensors."""
    seconds: float = 0.0
    """Time on a GPU."""
    num_passes: int = 1
    """Passes of the model in that time."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory limits of a measurement; results are the same under any limits, up to rounding."""

    chunk_samples: int | None = None
    """Samples that pass through the model at once; None: all."""
    kept_bytes: int = 512 * 2**20
    """Most bytes kept from chunk to chunk; if more are needed, the chunks pass again."""
    block_bytes: int = 128 * 2**20
    """Most bytes of one block of per-sample gradients; larger ones are formed and consumed in pieces."""


def limits_within(
    budget_bytes: int | None,
    probe: Callable[[int, Limits], Probe],
    *,
    bytes_of_two: int,
    num_samples: int,
    most_samples: int,
    kept_bytes: int | None,
) -> tuple[Limits, list[Probe]]:
    """Returns the limits under which a measurement fits a budget, and probes to predict its time, empty if not needed.

    Probes two samples and four. If four would exceed the budget, one sample gives the memory, and two, passed one by
    one, give the time. Peaks are extrapolated linearly.

    Args:
        budget_bytes: what the tensors may take at their peak; None: no bound.
        probe: measures so many samples under such limits.
        bytes_of_two: what two samples have taken before.
        num_samples: of the measurement.
        most_samples: at once, for other reasons.
        kept_bytes: what the method keeps from chunk to chunk; None if it adapts to a limit.
    """
    if budget_bytes is None or num_samples <= 4:
        return Limits(chunk_samples=most_samples if most_samples < num_samples else None), []
    budget = max(budget_bytes, _MIN_BUDGET)
    at_once = Limits()
    probes = [probe(size, at_once) for size in ((2, 4) if 2 * bytes_of_two <= budget else (1,))]
    block = min(max(budget // 8, _MIN_BLOCK), Limits.block_bytes)
    per_sample = max(_slope(probes, [float(each.num_bytes) for each in probes]), 1.0)
    fixed = max(probes[0].num_bytes - probes[0].num_samples * per_sample, 0.0)
    if fixed + num_samples * per_sample <= budget and most_samples >= num_samples:
        return Limits(block_bytes=block), probes
    kept = kept_bytes or budget // 3
    fitting = max(1, min(most_samples, int((budget - kept - fixed) / per_sample)))
    num_chunks = -(-num_samples // fitting)
    limits = Limits(chunk_samples=-(-num_samples // num_chunks), kept_bytes=max(kept, block), block_bytes=block)
    if len(probes) == 1:
        probes = [probe(2, replace(limits, chunk_samples=1))]
    return limits, probes


def predicted_seconds(probes: Sequence[Probe], *, samples_at_once: int, num_passes: int) -> float:
    """Returns the time of `num_passes` passes of so many samples, extrapolated linearly from one or two probes."""
    last = probes[-1]
    per_sample = max(_slope(probes, [probe.seconds for probe in probes]), 0.0)
    seconds = last.seconds + per_sample * max(samples_at_once - last.num_samples, 0)
    return seconds / max(last.num_passes, 1) * num_passes


def _slope(probes: Sequence[Probe], costs: Sequence[float]) -> float:
    """Returns the increase of a cost per sample; a single probe's is proportional to its samples."""
    if len(probes) == 1:
        return costs[0] / probes[0].num_samples
    return (costs[1] - costs[0]) / (probes[1].num_samples - probes[0].num_samples)
