"""Samples per second on several GPUs relative to one: the control loop, and DDP with `torch.compile`.

    python -m benchmarks.many_gpus --gpus 2 4 8 --models resnet18 gpt_350m --prewarm

Methods:
    ddp            BF16 autocast, `DistributedDataParallel` with `gradient_as_bucket_view`, `torch.compile` around it
    ddp-bf16       ddp that sends gradients in BF16
    loop           the control loop with a batch of fixed size
    bare           loop, without ticks, curvature and changes of precision
    sharded        bare, with the optimizer's state shared by the GPUs
    sharded-split  sharded, with weights="split"
    sharded-8bit   sharded-split, with optimizer_state="8bit"

Each GPU has the batch of `benchmarks.workloads.SIZES`. Each figure is the mean of 5 stretches of steps, with the
slowest and the fastest. If weights differ at the end, it fails. Runs share the machine, each with GPUs of its own. With
`--prewarm`, `ddp`, `ddp-bf16` and `bare` of all models compile at once first.

It also measures latency and bandwidth of an all-reduce, and predicts from them how each model scales to more GPUs. With
step time t(N) on N GPUs, and c(N) the time of a ring all-reduce of all gradients:

    t(N) = t(1) + (t(n) - t(1)) c(N) / c(n)        c(N) = latency log2 N + 2 (N - 1) / N bytes / bandwidth

where n GPUs were measured. So the same share of the communication stays exposed. Beyond the 8 GPUs of a host, bandwidth
is at most that of the network, which is assumed, not measured.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.multiprocessing.spawn import spawn

from benchmarks.any_model import batches, loss_of, optimizer_of, ours
from benchmarks.processes import has_gpus, parser_of
from benchmarks.workloads import SIZES, Workload, installed, workload_of
from triaccel_ray.apply.reduce import MAX_RANKS_IN_16_BITS
from triaccel_ray.cuda.allocator import use_lean_memory
from triaccel_ray.measure.timing import synchronize

METHODS = ("ddp", "ddp-bf16", "loop", "bare", "sharded", "sharded-split", "sharded-8bit")
PREWARMED = "ddp", "ddp-bf16", "bare"
"""Methods that need code which the others use, too."""
WARM_STEPS, STRETCHES = 60, 5
MIN_BATCHES = 8
"""Number of batches in an epoch, at least."""
GPUS_PER_HOST = 8
PREDICTED = (4, 8, 64, 512)
LARGE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model that is trained with one method on so many GPUs."""

    model: str
    method: str
    num_gpus: int
    num_steps: int
    gpus: tuple[int, ...] = ()
    """The GPUs of its ranks."""


def ddp(workload: Workload, rank: int, num_gpus: int, *, in_bf16: bool) -> Callable[[], Any]:
    """Returns a function that makes a step with `DistributedDataParallel`."""
    if workload.is_image:
        workload.model.to(memory_format=torch.channels_last)
    optimizer, model = optimizer_of(workload), workload.model.train()
    if num_gpus > 1:
        wrap = torch.nn.parallel.DistributedDataParallel
        model = wrap(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
        if in_bf16:
            model.register_comm_hook(None, bf16_compress_hook)
    forward = torch.compile(model, dynamic=False)
    drawn = batches(workload, slice(rank, None, num_gpus))

    def step() -> None:
        inputs, targets = next(drawn)
        if workload.is_image:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss_of(workload, forward, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(rank: int, run: Run, folder: str) -> None:
    """Trains on one of the GPUs; rank 0 writes the figures to a file in `folder`."""
    num_gpus, batch_size = run.num_gpus, SIZES[run.model] * run.num_gpus
    torch.cuda.set_device(run.gpus[rank])
    use_lean_memory(torch.device("cuda"))
    if num_gpus > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group("nccl", init_method=store, rank=rank, world_size=num_gpus)
    workload = replace(workload_of(run.model, num_samples=MIN_BATCHES * batch_size), batch_size=batch_size)
    loop: Any = None
    if run.method.startswith("ddp"):
        step = ddp(workload, rank, num_gpus, in_bf16=run.method == "ddp-bf16")
    else:
        step, _, (loop, _) = ours(workload, run.method)
    for _ in range(WARM_STEPS):
        step()
    rates = []
    for _ in range(STRETCHES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(run.num_steps // STRETCHES):
            step()
        torch.cuda.synchronize()
        rates.append(batch_size * (run.num_steps // STRETCHES) / (time.perf_counter() - began))
    sums = torch.stack([parameter.detach().double().sum() for parameter in workload.model.parameters()]).cpu().tolist()
    every: list[Any] = [sums] * num_gpus
    if num_gpus > 1:
        distributed.all_gather_object(every, sums)
    found = {"rate": sum(rates) / STRETCHES, "range": [min(rates), max(rates)], "equal": every.count(sums) == num_gpus}
    found["elements"] = sum(parameter.numel() for parameter in workload.model.parameters())
    found["peak"] = torch.cuda.max_memory_allocated() / 2**30
    if loop is not None:
        found["captured"] = loop._training.steps.num_captured
        loop.close()  # its graphs hold the communicator
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(found))
    if num_gpus > 1:
        distributed.destroy_process_group()


def measure_link(rank: int, num_gpus: int, folder: str) -> None:
    """Measures an all-reduce; rank 0 writes milliseconds of latency and bytes per millisecond to a file in `folder`."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    backend, store = ("nccl" if on_gpu else "gloo"), f"file://{folder}/store"
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=num_gpus)
    latency_ms, large_ms = (_all_reduce_ms(num_bytes, device) for num_bytes in (2**10, LARGE_BYTES))
    if rank == 0:
        moved = 2 * (num_gpus - 1) / num_gpus * LARGE_BYTES
        found = {"latency_ms": latency_ms, "bytes_per_ms": moved / (large_ms - latency_ms)}
        (Path(folder) / "figures.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def _all_reduce_ms(num_bytes: int, device: torch.device) -> float:
    tensor = torch.zeros(num_bytes // 4, device=device)
    times = []
    for _ in range(25):
        distributed.barrier()
        synchronize(device)
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[5:])


def predicted_ratio(
    link: dict[str, float],
    num_bytes: Sequence[int],
    steps_ms: tuple[float, float],
    num_gpus: tuple[int, int],
    network: float,
) -> float:
    """Returns samples per second over those of one GPU, from steps on one GPU and on several.

    Args:
        link: what `measure_link` has found.
        num_bytes: of all gradients as they are sent on the measured number, and on the one to predict.
        steps_ms: milliseconds of a step on one GPU, and on the measured number.
        num_gpus: the measured number, and the one to predict.
        network: bytes per millisecond between hosts.
    """

    def reduce_ms(number: int, num_bytes: int) -> float:
        rate = link["bytes_per_ms"] if number <= GPUS_PER_HOST else min(link["bytes_per_ms"], network)
        return link["latency_ms"] * math.log2(number) + 2 * (number - 1) / number * num_bytes / rate

    alone, together = steps_ms
    measured, wanted = map(reduce_ms, num_gpus, num_bytes)
    return num_gpus[1] * alone / (alone + max(together - alone, 0.0) * wanted / measured)


def sent_bytes(method: str, num_elements: int, num_gpus: int) -> int:
    """Returns bytes of all gradients: the loop sends those of layers in 16 bits, here all, in 16 bits; DDP in FP32."""
    return num_elements * (2 if method != "ddp" and num_gpus <= MAX_RANKS_IN_16_BITS else 4)


def main() -> int:
    """Prints a line for each model and method; returns 1 if ranks ended with unequal weights."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18", "vit_small", "gpt", "gpt_350m"], choices=SIZES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="numbers of GPUs, each compared with one")
    parser.add_argument("--steps", type=int, default=500, help="steps that are timed")
    parser.add_argument("--prewarm", action="store_true", help="compile all models at once first")
    parser.add_argument("--network", type=float, default=50.0, help="assumed GB/s of each GPU between hosts")
    args = parser.parse_args()
    max_gpus = max(args.gpus)
    if min(args.gpus) < 2:
        parser.error("--gpus: each number must be at least 2, to be compared with one GPU")
    if not has_gpus(max_gpus):
        return 1
    alone = [
        Run(model=model, method=method, num_gpus=1, num_steps=args.steps)
        for model, method in itertools.product(installed(args.models), args.methods)
    ]
    if args.prewarm:  # two GPUs need the code of any number
        short = [replace(run, num_steps=STRETCHES) for run in alone if run.method in PREWARMED]
        short += [replace(run, num_gpus=2) for run in short]
        with ThreadPoolExecutor(len(short) or 1) as pool:
            pairs = (index % (max_gpus // 2) * 2 for index in range(len(short)))
            placed = [replace(run, gpus=(first, first + 1)) for run, first in zip(short, pairs, strict=True)]
            list(pool.map(figures_of, placed))
    link = spawned(measure_link, max_gpus, max_gpus)
    print(
        f"all-reduce: {1e3 * link['latency_ms']:.0f} us of latency, {link['bytes_per_ms'] / 1e6:.0f} GB/s", flush=True
    )
    found = figures_on_free_gpus(
        max_gpus, [replace(run, num_gpus=number) for number in (1, *args.gpus) for run in alone]
    )
    for run, number in itertools.product(alone, args.gpus):
        print_row(replace(run, num_gpus=number), found[run], found[replace(run, num_gpus=number)], link, args.network)
    return int(not all(each["equal"] for each in found.values()))


def print_row(
    run: Run, alone: dict[str, Any], together: dict[str, Any], link: dict[str, float], network: float
) -> None:
    """Prints the figures of a run on several GPUs beside those of one GPU, and the prediction for more GPUs."""
    number = run.num_gpus
    print(
        f"{run.model:16} {run.method:13} 1 GPU {alone['rate']:9.0f}/s, {number} GPUs {together['rate']:9.0f}/s "
        f"({together['range'][0]:.0f} to {together['range'][1]:.0f}): x {together['rate'] / alone['rate']:.2f}, "
        f"allocator {alone['peak']:.2f} and {together['peak']:.2f} GiB"
        + (f", {together['captured']} graphs" if "captured" in together else "")
        + ("" if together["equal"] else "  WEIGHTS DIFFER"),
        flush=True,
    )
    steps_ms = 1e3 * SIZES[run.model] / alone["rate"], 1e3 * SIZES[run.model] * number / together["rate"]
    ratios = []
    for wanted in PREDICTED:
        num_bytes = [sent_bytes(run.method, alone["elements"], each) for each in (number, wanted)]
        ratio = predicted_ratio(link, num_bytes, steps_ms, (number, wanted), 1e6 * network)
        ratios.append(f"{wanted}: {ratio:.1f}")
    print(f"{'':16} {'':13} predicted: {', '.join(ratios)}", flush=True)


def figures_on_free_gpus(num_gpus: int, runs: Sequence[Run]) -> dict[Run, dict[str, Any]]:
    """Returns the figures of each run; as many train at once, in this order, as the machine has GPUs for."""
    free: Queue[int] = Queue()

    def give_back(gpus: Iterable[int]) -> None:
        for gpu in gpus:
            free.put(gpu)

    def train(run: Run) -> dict[str, Any]:
        try:
            found = figures_of(run)
        finally:
            give_back(run.gpus)
        print(f"{run.model:16} {run.method:13} {run.num_gpus} GPUs {found['rate']:9.0f}/s", flush=True)
        return found

    give_back(range(num_gpus))
    futures: dict[Run, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(num_gpus) as pool:
        for run in runs:
            gpus = tuple(free.get() for _ in range(run.num_gpus))  # waits until enough are free
            futures[run] = pool.submit(train, replace(run, gpus=gpus))
    return {run: future.result() for run, future in futures.items()}


def figures_of(run: Run) -> dict[str, Any]:
    """Returns what `measure` finds."""
    return spawned(measure, run.num_gpus, run)


def spawned(measurement: Callable[..., None], num_gpus: int, *args: Any) -> dict[str, Any]:
    """Returns what `measurement(rank, *args, folder)` on rank 0 of so many processes writes to its folder."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measurement, (*args, folder), num_gpus)
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
