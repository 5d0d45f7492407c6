"""Samples per second on several GPUs relative to one: the control loop, and DDP with `torch.compile`.

    python -m benchmarks.many_gpus --gpus 2 --models resnet18 gpt_350m

Methods:
    ddp     BF16 `torch.autocast`, `DistributedDataParallel` with `gradient_as_bucket_view`, `torch.compile` around it
    loop    the control loop with a batch of fixed size
    bare    loop, without ticks, curvature and changes of precision

Each GPU has the batch of `benchmarks.jobs.SIZES`. Each figure is the mean of 5 stretches of steps, with the slowest and
the fastest. If weights differ at the end, it fails.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from benchmarks.any_model import batches, loss_of, optimizer_of, ours
from benchmarks.jobs import SIZES, Job, installed, job_of
from benchmarks.processes import has_gpus, parser_of

METHODS = ("ddp", "loop", "bare", "sharded")
WARM_STEPS, STRETCHES = 60, 5


def ddp(job: Job, rank: int, num_gpus: int) -> Callable[[], Any]:
    """Returns a function that makes a step with `DistributedDataParallel`."""
    if job.is_image:
        job.model.to(memory_format=torch.channels_last)
    optimizer, model = optimizer_of(job), job.model.train()
    if num_gpus > 1:
        wrap = torch.nn.parallel.DistributedDataParallel
        model = wrap(model, device_ids=[rank], gradient_as_bucket_view=True)
    forward = torch.compile(model, dynamic=False)
    drawn = batches(job, slice(rank, None, num_gpus))

    def step() -> None:
        inputs, targets = next(drawn)
        if job.is_image:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss_of(job, forward, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rank: int, name: str, method: str, num_gpus: int, batch_size: int, num_steps: int, folder: str) -> None:
    """Trains on one of the GPUs; rank 0 writes the figures to a file in `folder`."""
    torch.cuda.set_device(rank)
    if num_gpus > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("nccl", init_method=store, rank=rank, world_size=num_gpus)
    job = replace(job_of(name), batch_size=batch_size)
    loop: Any = None
    if method == "ddp":
        step = ddp(job, rank, num_gpus)
    else:
        step, _, (loop, _) = ours(job, method)
    for _ in range(WARM_STEPS):
        step()
    rates = []
    for _ in range(STRETCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps // STRETCHES):
            step()
        torch.cuda.synchronize()
        rates.append(batch_size * (num_steps // STRETCHES) / (time.perf_counter() - began))
    sums = torch.stack([parameter.detach().double().sum() for parameter in job.model.parameters()]).cpu().tolist()
    every: list[Any] = [sums] * num_gpus
    if num_gpus > 1:
        distributed.all_gather_object(every, sums)
    found = {"rate": sum(rates) / STRETCHES, "range": [min(rates), max(rates)], "equal": every.count(sums) == num_gpus}
    found["peak"] = torch.cuda.max_memory_allocated() / 2**30
    if loop is not None:
        found["captured"] = loop._training.steps.num_captured
        loop.close()  # its graphs hold the communicator
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(found))
    if num_gpus > 1:
        distributed.destroy_process_group()


def main() -> int:
    """Prints a line for each model and method; returns 1 if ranks ended with unequal weights."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "vit_small", "gpt", "gpt_350m"], choices=SIZES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500, help="steps that are timed")
    args = parser.parse_args()
    if not has_gpus(args.gpus):
        return 1
    failed = 0
    for name, method in itertools.product(installed(args.models), args.methods):
        alone, together = (_figures(name, method, num_gpus, args.steps) for num_gpus in (1, args.gpus))
        failed |= not together["equal"]
        print(
            f"{name:16} {method:5} 1 GPU {alone['rate']:9.0f}/s, {args.gpus} GPUs {together['rate']:9.0f}/s "
            f"({together['range'][0]:.0f} to {together['range'][1]:.0f}): x {together['rate'] / alone['rate']:.2f}, "
            f"allocator {alone['peak']:.2f} and {together['peak']:.2f} GiB"
            + (f", {together['captured']} graphs" if "captured" in together else "")
            + ("" if together["equal"] else "  WEIGHTS DIFFER"),
            flush=True,
        )
    return failed


def _figures(name: str, method: str, num_gpus: int, num_steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (name, method, num_gpus, SIZES[name] * num_gpus, num_steps, folder), num_gpus)
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
