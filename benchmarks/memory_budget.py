"""`python -m benchmarks.memory_budget` trains models under memory budgets: what is kept, and what it costs.

A line says which plan the loop found, the milliseconds and the peak that it predicted, and those measured over the last
intervals. Budgets are MiB, or shares of the peak without a budget (below 1.5). Models, samples and optimizer are those
of `any_model`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.any_model import Samples, optimizer_of
from benchmarks.jobs import SIZES, job_of
from benchmarks.processes import has_gpus, parser_of, print_all, run_apart
from triaccel_ray import (
    BatchConfig,
    ControlConfig,
    ControlLoop,
    CurvatureConfig,
    Precision,
    PrecisionConfig,
    use_lean_memory,
)

MIB = 2**20
EVERY_STEPS = 20
LONG_EPOCHS = 10_000.0
"""Length of the run that plans must pay for."""


def run(args: argparse.Namespace, budget_mib: int | None) -> dict[str, Any]:
    """Trains one model under a budget in MiB, None for the whole device, and returns the measurements."""
    use_lean_memory(torch.device("cuda"))
    job = job_of(args.model)
    size = job.batch_size
    data = Samples(job) if isinstance(job.inputs, dict) else (job.inputs, job.targets)
    config = ControlConfig(
        every_steps=EVERY_STEPS,
        weights="auto",
        step_in_backward="auto",
        batch=BatchConfig(enabled=False, minimum=size, start=size, maximum=max(size, 512)),
        precision=PrecisionConfig(enabled=False, initial=Precision(args.precision)),
        curvature=CurvatureConfig(enabled=False),
    )
    ticks: deque[Any] = deque(maxlen=6)
    faults: Counter[str] = Counter()

    def note(tick: Any) -> None:
        ticks.append(tick)
        faults.update(str(fault.kind) for fault in tick.observation.faults)

    loop = ControlLoop(
        job.model,
        optimizer_of(job),
        job.loss,
        data,
        config=config,
        memory_budget=None if budget_mib is None else budget_mib * MIB,
        epochs=LONG_EPOCHS,
        on_tick=note,
    )
    for _ in range(args.steps):
        loop.step()
    torch.cuda.synchronize()
    loop.memory.refresh_peaks()
    loop.close()
    times = [tick.observation.step_ms for tick in ticks if tick.observation.step_ms]
    peaks = [tick.observation.memory.window_peak_bytes for tick in ticks]
    memory = loop.state.memory
    return {
        "model": args.model, "precision": args.precision, "batch": size, "budget_mib": budget_mib,
        "ms": round(median(times), 2) if times else None, "last_peak_mib": max(peaks) >> 20,
        "peak_mib": loop.memory.peak_bytes >> 20, "idle_mib": loop.memory.idle_bytes >> 20,
        "parts": loop.plan.num_micro_batches, "storage": dict(Counter(map(str, loop.plan.storage.values()))),
        "predicted_ms": memory.predicted_ms and round(memory.predicted_ms, 2),
        "predicted_mib": memory.predicted_bytes and memory.predicted_bytes >> 20,
        "faults": dict(faults), "is_over": budget_mib is not None and loop.memory.peak_bytes > budget_mib * MIB,
    }  # fmt: skip


def main() -> int:
    """Prints a line for each budget; returns 1 if a run failed or exceeded its budget."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet152", choices=SIZES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.75, 0.5, 0.4])
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []

    def measured() -> Iterator[dict[str, Any]]:
        found.append(run_apart(run, args, None))
        yield found[0]
        for budget in args.budgets:
            mib = budget if budget >= 1.5 else budget * found[0].get("peak_mib", 0)
            found.append(run_apart(run, args, round(mib)))
            yield found[-1]

    return int(not has_gpus() or print_all(measured()) or any(each["is_over"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
