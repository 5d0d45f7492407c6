"""`python -m benchmarks.memory_budget` trains models under memory budgets: what is kept, and what it costs.

A line says which plan the loop found, the milliseconds and the peak that it predicted, and those measured over the last
intervals. Budgets are MiB, or shares of the peak without a budget (below 1.5). `--sweep 10` tries ten, evenly
spaced from 1.1 times the least to that peak. The least is what the error says under one that is too small. Models,
samples and optimizer are those of `any_model`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from benchmarks.any_model import Samples, optimizer_of
from benchmarks.processes import has_gpus, parser_of, print_all, run_apart
from benchmarks.workloads import NUM_SAMPLES, SIZES, TIMM_BATCH_SIZE, model_name, workload_of
from triaccel_ray import (
    BatchConfig,
    ControlConfig,
    ControlLoop,
    CurvatureConfig,
    Precision,
    PrecisionConfig,
    use_lean_memory,
)
from triaccel_ray.records.codec import encode

MIB = 2**20
EVERY_STEPS = 20
TOO_SMALL_MIB = 130
"""MiB beyond the idle process: room for libraries, none for a batch."""
LONG_EPOCHS = 10_000.0
"""Length of the run that plans must pay for."""


def run(args: argparse.Namespace, budget_mib: int | None) -> dict[str, Any]:
    """Trains one model under a budget in MiB, None for the whole device, and returns the measurements."""
    use_lean_memory(torch.device("cuda"))
    size = args.batch_size or SIZES.get(args.model, TIMM_BATCH_SIZE)
    workload = workload_of(
        args.model, num_samples=size * -(-NUM_SAMPLES.get(args.model, 4096) // size)
    )  # whole batches
    data = Samples(workload) if isinstance(workload.inputs, dict) else (workload.inputs, workload.targets)
    config = ControlConfig(
        every_steps=EVERY_STEPS,
        weights="auto",
        step_in_backward="auto",
        optimizer_state=args.optimizer_state,
        batch=BatchConfig(enabled=False, minimum=size, start=size, maximum=max(size, 512)),
        precision=PrecisionConfig(enabled=False, initial=Precision(args.precision)),
        curvature=CurvatureConfig(enabled=False),
    )
    ticks: deque[Any] = deque(maxlen=3)
    faults: Counter[str] = Counter()

    def note(tick: Any) -> None:
        ticks.append(tick)
        faults.update(str(fault.kind) for fault in tick.observation.faults)

    began = time.perf_counter()
    loop = ControlLoop(
        workload.model,
        optimizer_of(workload),
        workload.loss,
        data,
        config=config,
        memory_budget=None if budget_mib is None else budget_mib * MIB,
        epochs=LONG_EPOCHS,
        on_tick=note,
    )
    try:
        for _ in range(args.steps):
            loop.step()
    except torch.OutOfMemoryError as error:
        if (found := re.search(r"budget of (\d+) MiB or more", str(error))) is None:
            raise
        return {
            "model": args.model,
            "batch": size,
            "budget_mib": budget_mib,
            "least_mib": int(found[1]),
            "is_over": False,
        }
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
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
        "form": [] if loop.state.form is None else [name for name, is_on in encode(loop.state.form).items() if is_on],
        "predicted_ms": memory.predicted_ms and round(memory.predicted_ms, 2),
        "predicted_mib": memory.predicted_bytes and memory.predicted_bytes >> 20,
        "faults": dict(faults), "seconds": round(seconds, 1),
        "is_over": budget_mib is not None and loop.memory.peak_bytes > budget_mib * MIB,
    }  # fmt: skip


def main() -> int:
    """Prints a line for each budget; returns 1 if a run failed or exceeded its budget."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet152", type=model_name, help="of any_model, or timm:NAME")
    parser.add_argument("--batch-size", type=int, help="samples in a batch (default: that of any_model)")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.75, 0.5, 0.4])
    parser.add_argument("--sweep", type=int, default=0, help="number of budgets in place of --budgets")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--optimizer-state", default="fp32", choices=("fp32", "8bit"))
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []

    def measured() -> Iterator[dict[str, Any]]:
        found.append(run_apart(run, args, None))
        yield found[0]
        peak = found[0].get("peak_mib", 0)
        budgets = [budget if budget >= 1.5 else budget * peak for budget in args.budgets]
        if args.sweep:
            found.append(run_apart(run, args, found[0].get("idle_mib", 0) + TOO_SMALL_MIB))
            yield found[-1]
            if "error" in found[-1]:
                return
            min_mib = 1.1 * found[-1].get("least_mib", found[-1]["budget_mib"])
            budgets = [min_mib + (peak - min_mib) * index / max(args.sweep - 1, 1) for index in range(args.sweep)]
        for budget in budgets:
            found.append(run_apart(run, args, round(budget)))
            yield found[-1]

    return int(not has_gpus() or print_all(measured()) or any(each.get("is_over") for each in found))


if __name__ == "__main__":
    sys.exit(main())
