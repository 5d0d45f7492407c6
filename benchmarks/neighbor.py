"""`python -m benchmarks.neighbor` trains beside a process that takes the GPU's memory and returns it, at random times.

    loop      the control loop, which adapts the batch alone and starts at that of the worst case
    engine-N  the control loop with a fixed batch of N, nothing adapted
    amp-N     autocast to BF16 as in PyTorch's tutorial, with a batch of N

The neighbor holds its memory when a run begins and leaves it `--leave` MiB, the worst case. What a run gives up while
the neighbor wants more goes to the neighbor; the last `SPARED_BYTES` nobody takes. Models, samples and optimizer are
those of `any_model`; a tenth of the samples is held out. Each run includes its captures and compilation.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.any_model import optimizer_of
from benchmarks.elastic import fixed_batch, loop_of, repeated
from benchmarks.processes import has_gpus, parser_of, print_all, run_apart
from benchmarks.workloads import WITH_TENSORS, workload_of
from triaccel_ray import BatchConfig, ControlLoop, use_lean_memory
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.measure.score import BYTES_PER_GB, TIMED_EPOCHS, efficiency_score

MIB = 2**20
CHUNK_BYTES, SPARED_BYTES = 64 * MIB, 64 * MIB
HOLDS_S, RETURNS_S = (1.0, 3.0), (1.0, 4.0)
"""Shortest and longest times for which the neighbor holds its memory, and leaves it to the run."""


def take_and_return(leave_bytes: int, seed: int, ready: Any, stop: Any) -> None:
    """Takes all free memory but `leave_bytes`, sets `ready`, and returns and takes it again until `stop` is set."""
    torch.zeros(1, device="cuda")
    times = random.Random(seed)
    num_wanted = (torch.cuda.mem_get_info()[0] - leave_bytes) // CHUNK_BYTES
    held: list[torch.Tensor] = []
    while not stop.is_set():
        until = time.monotonic() + times.uniform(*HOLDS_S)
        while time.monotonic() < until and not stop.is_set():
            if len(held) < num_wanted and torch.cuda.mem_get_info()[0] >= CHUNK_BYTES + SPARED_BYTES:
                held.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cuda"))
                continue
            ready.set()
            time.sleep(0.002)
        held.clear()
        torch.cuda.empty_cache()
        stop.wait(times.uniform(*RETURNS_S))


def run(name: str, method: str, start: int, num_epochs: int, num_samples: int) -> dict[str, Any]:
    """Trains one model and returns what it took; `start` is the first batch size of method `loop`."""
    began = time.perf_counter()
    if not method.startswith("amp-"):
        use_lean_memory(torch.device("cuda"))
    workload = workload_of(name)
    num_held_out = len(workload.targets) // 10
    data = tuple(repeated(each[num_held_out:], num_samples) for each in (workload.inputs, workload.targets))
    held_out = workload.inputs[:num_held_out], workload.targets[:num_held_out]
    ticks: list[Any] = []
    loop: ControlLoop | BaselineLoop
    if method.startswith("amp-"):
        options: dict[str, Any] = {"method": "amp", "amp": "bf16", "batch_size": int(method[4:])}
        loop = BaselineLoop(workload.model, optimizer_of(workload), workload.loss, data, **options)
    else:
        batch = BatchConfig().around(start) if method == "loop" else fixed_batch(int(method.removeprefix("engine-")))
        loop = loop_of(workload, data, batch, ticks, num_epochs)
    seconds = [loop.train_epoch().seconds for _ in range(num_epochs)]
    last = fmean(seconds[-TIMED_EPOCHS:])
    accuracy = loop.evaluate(held_out).metrics["accuracy"]
    loop.memory.refresh_peaks()
    loop.close()
    gb = loop.memory.peak_bytes / BYTES_PER_GB
    faults = Counter(str(fault.kind) for tick in ticks for fault in tick.observation.faults)
    sizes = [size for size, _ in itertools.groupby(tick.decision.plan.batch_size for tick in ticks)]
    return {
        "model": name, "method": method, "accuracy": round(accuracy, 2), "training_s": round(sum(seconds), 2),
        "s/epoch": round(last, 3), "peak_mib": loop.memory.peak_bytes >> 20,
        "whole_s": round(time.perf_counter() - began, 2), "sizes": sizes, "faults": dict(faults),
        "score": round(efficiency_score(accuracy, last, gb), 2),
        "score_whole": round(efficiency_score(accuracy, sum(seconds), gb), 3),
    }  # fmt: skip


def beside_neighbor(leave_bytes: int, seed: int, *args: Any) -> dict[str, Any]:
    """Returns what `run(*args)` returns beside a neighbor, or its error: the run has died."""
    processes = multiprocessing.get_context("spawn")
    ready, stop = processes.Event(), processes.Event()
    neighbor = processes.Process(target=take_and_return, args=(leave_bytes, seed, ready, stop))
    neighbor.start()
    try:
        if not ready.wait(60):
            raise RuntimeError("the neighbor took no memory within 60 s")
        return {"seed": seed, **run_apart(run, *args)}
    finally:
        stop.set()
        neighbor.join()


def main() -> int:
    """Prints a line for each run and a summary for each method; returns 1 if a run of method `loop` died."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet18", choices=WITH_TENSORS)
    parser.add_argument("--methods", nargs="+", default=["loop", "engine-96", "amp-96", "amp-512"])
    parser.add_argument("--leave", type=int, default=1750, help="MiB that the neighbor leaves")
    parser.add_argument("--start", type=int, default=96, help="first batch size of method `loop`")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=20, help="of `loop`; other methods make three")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    if not has_gpus():
        return 1
    found: list[dict[str, Any]] = []

    def measured() -> Iterator[dict[str, Any]]:
        for method in args.methods:
            for seed in range(args.first_seed, args.first_seed + (args.runs if method == "loop" else 3)):
                done = beside_neighbor(
                    args.leave * MIB, seed, args.model, method, args.start, args.epochs, args.samples
                )
                found.append({"method": method, **done})
                yield found[-1]

    print_all(measured())
    for method in args.methods:
        runs = [each for each in found if each["method"] == method]
        lived = [each for each in runs if "error" not in each]
        figures = ("score", "score_whole", "training_s", "accuracy", "peak_mib")
        medians = {figure: median(each[figure] for each in lived) for figure in figures if lived}
        print(f"{method}: {len(runs)} runs, {len(runs) - len(lived)} died, medians {medians}")
    return int(any("error" in each for each in found if each["method"] == "loop"))


if __name__ == "__main__":
    sys.exit(main())
