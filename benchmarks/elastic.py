"""`python -m benchmarks.elastic` compares the elastic batch with fixed ones: seconds of whole runs.

    elastic  the batch grows where step times say that it pays, knowing the run's length
    unknown  the same without knowing it
    steps    the batch grows by one step at every tick, as in the paper
    N        the batch stays at N

Curvature and changes of precision are off. Each run includes compilation, from a warm cache.
Models, samples and optimizer are those of `any_model`.
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.any_model import optimizer_of
from benchmarks.processes import has_gpus, parser_of, print_all, run_apart
from benchmarks.workloads import WITH_TENSORS, Workload, workload_of
from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig, PrecisionConfig, use_lean_memory

MODES = ("elastic", "unknown", "steps")


def run(name: str, mode: str, num_epochs: int, num_samples: int) -> dict[str, Any]:
    """Trains one model and returns what it took."""
    use_lean_memory(torch.device("cuda"))
    workload = workload_of(name)
    data = repeated(workload.inputs, num_samples), repeated(workload.targets, num_samples)
    began = time.perf_counter()
    ticks: list[Any] = []
    batch = batch_from(workload.batch_size) if mode in MODES else fixed_batch(int(mode))
    loop = loop_of(
        workload, data, batch, ticks, None if mode == "unknown" else num_epochs, revert_slowdowns=mode != "steps"
    )
    seconds = [loop.train_epoch().seconds for _ in range(num_epochs)]
    total = time.perf_counter() - began
    loop.memory.refresh_peaks()
    loop.close()
    planned = (tick.decision.plan.batch_size for tick in ticks)
    sizes = [size for size, _ in itertools.groupby([loop.config.batch.start, *planned])]
    return {
        "model": name, "batch": mode, "total_s": round(total, 2),
        "last_epoch_s": round(seconds[-1], 3), "peak_mib": loop.memory.peak_bytes >> 20, "sizes": sizes,
        "new_plans_s": round(sum(tick.applied.adapt_ms for tick in ticks) / 1e3, 2),
    }  # fmt: skip


def loop_of(
    workload: Workload, data: Any, batch: BatchConfig, ticks: list[Any], epochs: float | None, **settings: Any
) -> ControlLoop:
    """Returns a loop that adapts the batch alone, and adds its ticks to `ticks`."""
    off: dict[str, Any] = {"curvature": CurvatureConfig(enabled=False), "precision": PrecisionConfig(enabled=False)}
    config, optimizer = ControlConfig(batch=batch, **off, **settings), optimizer_of(workload)
    return ControlLoop(
        workload.model, optimizer, workload.loss, data, config=config, epochs=epochs, on_tick=ticks.append
    )


def fixed_batch(size: int) -> BatchConfig:
    """Returns the configuration of a batch that stays at `size`."""
    return BatchConfig(enabled=False, start=size, minimum=size, maximum=size)


def batch_from(start: int) -> BatchConfig:
    """Returns the configuration of a batch that begins with `start`."""
    return BatchConfig() if start == BatchConfig().start else BatchConfig().around(start)


def repeated(samples: Tensor, number: int) -> Tensor:
    """Returns `number` samples along dimension 0: those given, again and again."""
    times = -(-number // len(samples))
    return samples.repeat(times, *[1] * (samples.dim() - 1))[:number]


def main() -> int:
    """Prints a line for each run; returns 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="resnet18", choices=WITH_TENSORS)
    parser.add_argument("--batches", nargs="+", default=[*MODES, "96", "256", "512"])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=50_000)
    args = parser.parse_args()
    if not has_gpus():
        return 1
    for batch in args.batches:  # fills the compiler's cache
        run_apart(run, args.model, batch, args.epochs if batch in MODES else 1, args.samples)
    return print_all(run_apart(run, args.model, batch, args.epochs, args.samples) for batch in args.batches)


if __name__ == "__main__":
    sys.exit(main())
