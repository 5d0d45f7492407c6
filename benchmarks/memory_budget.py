"""`python -m benchmarks.memory_budget` trains models under memory budgets: what is kept, and what it costs.

Each budget has its own process, because NVML reports memory per process. A line says which plan the loop found, the
milliseconds and the peak that it predicted, and those measured over the last intervals. Budgets are MiB, shares of the
peak without a budget (below 1.5), or `all`. Models, samples and optimizer are those of `any_model`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch

from benchmarks.any_model import Samples, optimizer_of
from benchmarks.jobs import SIZES, job_of
from triaccel_ray import (
    BatchConfig,
    ControlConfig,
    ControlLoop,
    CurvatureConfig,
    ExecutionConfig,
    Precision,
    PrecisionConfig,
    use_lean_memory,
)

MIB = 2**20
EVERY_STEPS = 20


def run(args: argparse.Namespace, budget_mib: int | None) -> dict[str, Any]:
    """Trains one model under a budget in MiB, None for the whole device, and returns the measurements."""
    use_lean_memory(torch.device("cuda"))
    job = job_of(args.model)
    size = args.batch_size or job.batch_size
    data = Samples(job) if isinstance(job.inputs, dict) else (job.inputs, job.targets)
    config = ControlConfig(
        every_steps=EVERY_STEPS,
        batch=BatchConfig(enabled=False, minimum=size, start=size, maximum=max(size, 512)),
        precision=PrecisionConfig(enabled=False, initial=Precision(args.precision)),
        curvature=CurvatureConfig(enabled=False),
        execution=ExecutionConfig(activations=args.activations),
        weights=args.weights,
        step_in_backward=args.step_in_backward,
    )
    ticks: deque[Any] = deque(maxlen=6)
    reasons: list[str] = []
    faults: Counter[str] = Counter()

    def note(tick: Any) -> None:
        ticks.append(tick)
        reasons.extend(f"{tick.observation.step}: {reason.text}" for reason in tick.decision.reasons)
        faults.update(str(fault.kind) for fault in tick.observation.faults)

    began = time.perf_counter()
    loop = ControlLoop(
        job.model,
        optimizer_of(job),
        job.loss,
        data,
        config=config,
        memory_budget=None if budget_mib is None else budget_mib * MIB,
        epochs=args.epochs,
        on_tick=note,
    )
    for _ in range(args.steps):
        loop.step()
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
        "predicted_ms": memory.predicted_ms and round(memory.predicted_ms, 2),
        "predicted_mib": memory.predicted_bytes and memory.predicted_bytes >> 20,
        "seconds": round(seconds, 1), "faults": dict(faults),
        "reasons": reasons if args.reasons else [],
    }  # fmt: skip


def main() -> int:
    """Prints a line for each budget; returns 1 if a run failed or exceeded its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet152", choices=SIZES)
    parser.add_argument("--budgets", nargs="+", default=["all", "0.75", "0.5", "0.4"])
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--activations", default="auto", choices=("auto", "keep", "recompute", "offload"))
    parser.add_argument("--weights", default="fp32", choices=("fp32", "split"))
    parser.add_argument("--step-in-backward", action="store_true")
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--epochs", type=float, default=10_000.0, help="length of the run that plans must pay for")
    parser.add_argument("--parallel", type=int, default=1, help="processes at once: for peaks, not for times")
    parser.add_argument("--reasons", action="store_true", help="print every decision")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    if args.one:
        budget = args.budgets[0]
        print(json.dumps(run(args, None if budget == "all" else int(budget))))
        return 0
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {args.steps} steps", flush=True)
    whole = _run_apart("all") if any(each != "all" for each in args.budgets) else None
    if whole:
        print(json.dumps(whole), flush=True)
    peak = whole.get("peak_mib", 0) if whole else 0
    budgets = [each if each == "all" or float(each) >= 1.5 else str(round(float(each) * peak)) for each in args.budgets]
    failed = whole is not None and "error" in whole
    with ThreadPoolExecutor(args.parallel) as pool:
        for budget, found in zip(budgets, pool.map(_run_apart, budgets), strict=True):
            is_over = budget != "all" and found.get("peak_mib", 0) > int(budget)
            failed |= "error" in found or is_over
            print(json.dumps(found) + (" OVER BUDGET" if is_over else ""), flush=True)
    return int(failed)


def _run_apart(budget: str) -> dict[str, Any]:
    """Returns what a run in a process of its own printed; its error if it failed."""
    words = [word for word in sys.argv[1:] if word != "--one"]
    command = [sys.executable, "-m", "benchmarks.memory_budget", *words, "--one", "--budgets", budget]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"budget_mib": budget, "error": f"status {done.returncode}: {done.stderr.strip()[-900:]}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
