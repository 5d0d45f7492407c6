"""Samples per second on several GPUs relative to one: the control loop, and DDP with `torch.compile`.

    python -m benchmarks.many_gpus --gpus 2 --models resnet18 gpt_350m

Methods:
    ddp     BF16 `torch.autocast`, `DistributedDataParallel` with `gradient_as_bucket_view`, `torch.compile` around it
    loop    the control loop with a batch of fixed size
    bare    loop, without ticks, curvature and changes of precision

By default each GPU has the batch of `benchmarks.jobs.SIZES` (weak scaling); with `--strong` all GPUs share it. Each
figure is the mean of 5 stretches of steps, with the slowest and the fastest. If weights differ at the end, it fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from benchmarks.any_model import optimizer_of, ours
from benchmarks.jobs import NEEDS, SIZES, Job, job_of
from triaccel_ray.data.sampler import epoch_order
from triaccel_ray.model.pytree import map_tensors

METHODS = ("ddp", "loop", "bare", "sharded")
WARM_STEPS, STRETCHES = 60, 5


def ddp(job: Job, batch_size: int, rank: int, num_gpus: int) -> Callable[[], Any]:
    """Returns a function that makes a step with `DistributedDataParallel`."""
    if job.is_image:
        job.model.to(memory_format=torch.channels_last)
    optimizer, model = optimizer_of(job), job.model.train()
    if num_gpus > 1:
        wrap = torch.nn.parallel.DistributedDataParallel
        model = wrap(model, device_ids=[rank], gradient_as_bucket_view=True)
    forward = torch.compile(model, dynamic=False)
    drawn = _shares(job, batch_size, rank, num_gpus)

    def step() -> None:
        part = next(drawn)
        inputs = map_tensors(lambda tensor: tensor[part], job.inputs)
        if job.is_image:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            outputs = forward(**inputs) if isinstance(inputs, dict) else forward(inputs)
            loss = job.loss(outputs, job.targets[part])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _shares(job: Job, batch_size: int, rank: int, num_gpus: int) -> Iterator[torch.Tensor]:
    """Yields the indices of this GPU's samples in whole batches."""
    for epoch in itertools.count():
        order = epoch_order(len(job.targets), seed=0, epoch=epoch).cuda()
        for part in order.split(batch_size):
            if len(part) == batch_size:
                yield part[rank::num_gpus]


def measure(rank: int, name: str, method: str, num_gpus: int, batch_size: int, num_steps: int, folder: str) -> None:
    """Trains on one of the GPUs; rank 0 writes the figures to a file in `folder`."""
    torch.cuda.set_device(rank)
    if num_gpus > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("nccl", init_method=store, rank=rank, world_size=num_gpus)
    job = job_of(name)
    loop: Any = None
    if method == "ddp":
        step = ddp(job, batch_size, rank, num_gpus)
    else:
        step, _, (loop, _) = ours(replace(job, batch_size=batch_size), method)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "vit_small", "gpt", "gpt_350m"], choices=SIZES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--steps", type=int, default=500, help="steps that are timed")
    parser.add_argument("--strong", action="store_true", help="one batch for all GPUs, not one for each")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.gpus or args.gpus < 2:
        print(f"needs at least two NVIDIA GPUs; --gpus {args.gpus}, {torch.cuda.device_count()} found")
        return 1
    print(f"{args.gpus} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, n = {args.steps} steps")
    failed = 0
    models = [name for name in args.models if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    for name, method in itertools.product(models, args.methods):
        alone, together = (_figures(name, method, num_gpus, args) for num_gpus in (1, args.gpus))
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


def _figures(name: str, method: str, num_gpus: int, args: argparse.Namespace) -> dict[str, Any]:
    batch_size = SIZES[name] * (1 if args.strong else num_gpus)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (name, method, num_gpus, batch_size, args.steps, folder)
        spawn(measure, arguments, num_gpus)
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
