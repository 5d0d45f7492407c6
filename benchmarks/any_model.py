"""`python -m benchmarks.any_model` compares the control loop with PyTorch's fastest setups on models not tuned for.

    amp              autocast to BF16 as in PyTorch's tutorial, eager, with a fused optimizer
    reduce-overhead  the same compiled with `torch.compile(mode="reduce-overhead")`, the loss too; images channels_last
    graph            model and loss compiled, the whole step in one CUDA graph captured by hand, with the optimizer
    loop             `ControlLoop` with its defaults at this batch size: a tick every 50 steps, curvature every 200
    fp8              loop, started in FP8, which layers with at least 2048 inputs and outputs get; only if asked for
    bare             loop, without ticks, curvature and changes of precision
    checkpointed     bare, with activations="recompute"
    lean             bare, with weights="split" and step_in_backward
    lean-8bit        lean, with optimizer_state="8bit"

Each runs in its own process. With `--parallel-compile` all compile at the same time, then each is timed alone. That
needs GPU memory for all of them, and starts take longer. Data are noise with a weak signal; a tenth of the labels is
random. All methods see the same batches in the same order, so that their losses can be compared.
Models of timm, torchvision and transformers are left out if these packages are not installed. `--models` also takes the
name of any image classifier of timm, such as timm:swin_tiny_patch4_window7_224.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import Manager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.processes import Measurement, has_gpus, parser_of, print_all, run_apart
from benchmarks.workloads import SIZES, Workload, installed, model_name, workload_of
from triaccel_ray.cuda.allocator import use_lean_memory
from triaccel_ray.data.sampler import epoch_order
from triaccel_ray.measure.memory import MemoryMeter, memory_meter
from triaccel_ray.model.pytree import map_tensors
from triaccel_ray.records.plan import Precision

OURS = ("loop", "fp8", "bare", "checkpointed", "lean", "lean-8bit")
METHODS = ("amp", "reduce-overhead", "graph", *OURS)
LOSS_STEPS = (180, 200)
"""Range of steps over which the training loss is averaged for comparison."""
_COMPILE_TIMEOUT_S = 1800.0
"""Seconds after which runs stop waiting for others to compile."""
Step = Callable[[], Any]


class Samples(torch.utils.data.Dataset[Any]):
    """A map-style data set of (mapping, target) pairs, as for tokenized text."""

    def __init__(self, workload: Workload) -> None:
        self._inputs, self._targets = map_tensors(Tensor.cpu, workload.inputs), workload.targets.cpu()

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> Any:
        return {name: tensor[index] for name, tensor in self._inputs.items()}, self._targets[index]


def optimizer_of(workload: Workload) -> torch.optim.Optimizer:
    """Returns the optimizer, which is the same for all methods."""
    return torch.optim.AdamW(workload.model.parameters(), lr=3e-4, weight_decay=0.01, fused=True, capturable=True)


def batches(workload: Workload, share: slice = slice(None)) -> Iterator[tuple[Any, Tensor]]:
    """Yields whole batches, or a share of each, from tensors on the GPU, in the control loop's order of each epoch."""
    for epoch in itertools.count():
        order = epoch_order(len(workload.targets), seed=0, epoch=epoch).cuda()
        for batch in order.split(workload.batch_size):
            if len(batch) == workload.batch_size:
                part = batch[share]
                yield map_tensors(functools.partial(_rows, part), workload.inputs), workload.targets[part]


def _rows(indices: Tensor, tensor: Tensor) -> Tensor:
    return tensor[indices]


def peer(workload: Workload, method: str) -> tuple[Step, Callable[[], Tensor]]:
    """Returns a PyTorch method as a function that makes a step and one that returns the last step's loss."""
    model, optimizer = workload.model.train(), optimizer_of(workload)
    if method != "amp" and workload.is_image:
        model.to(memory_format=torch.channels_last)
    mode = "reduce-overhead" if method == "reduce-overhead" else None

    def loss_at(inputs: Any, targets: Tensor) -> Tensor:
        return loss_of(workload, model, inputs, targets)

    compute = loss_at if method == "amp" else torch.compile(loss_at, mode=mode, dynamic=False)
    drawn = batches(workload)
    if method == "graph":
        return _graphed(workload, compute, optimizer, drawn)
    last: list[Tensor] = []

    def step() -> None:
        inputs, targets = next(drawn)
        if workload.is_image and method != "amp":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        loss = compute(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last[:] = [loss.detach()]

    return step, lambda: last[0]


def _graphed(
    workload: Workload,
    compute: Callable[[Any, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    drawn: Iterator[tuple[Any, Tensor]],
) -> tuple[Step, Callable[[], Tensor]]:
    stream = torch.cuda.Stream()
    before = copy.deepcopy(workload.model.state_dict())
    inputs, targets = map_tensors(torch.clone, next(batches(workload)))
    if workload.is_image:
        inputs = inputs.contiguous(memory_format=torch.channels_last)

    def work() -> Tensor:
        loss = compute(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            work()
    torch.cuda.synchronize()
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = work()
    workload.model.load_state_dict(before)  # undo the warm-up steps
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()

    def step() -> None:
        fresh, labels = next(drawn)
        for mine, theirs in zip(_tensors(inputs), _tensors(fresh), strict=True):
            mine.copy_(theirs)
        targets.copy_(labels)
        graph.replay()

    return step, lambda: loss


def _tensors(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, dict) else [value]


def loss_of(workload: Workload, forward: Any, inputs: Any, targets: Tensor) -> Tensor:
    """Returns the loss, computed under autocast to BF16."""
    with torch.autocast("cuda", torch.bfloat16):
        outputs = forward(**inputs) if isinstance(inputs, dict) else forward(inputs)
        return workload.loss(outputs, targets)


def ours(workload: Workload, method: str) -> tuple[Step, Callable[[], Tensor], Any]:
    """Returns a function that makes a step, one that returns the last step's loss, and the loop with its ticks."""
    from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig, ExecutionConfig, PrecisionConfig

    maximum = max(workload.batch_size, 512)
    config = ControlConfig(
        batch=BatchConfig(enabled=False, minimum=workload.batch_size, start=workload.batch_size, maximum=maximum)
    )
    if method == "fp8":
        config = replace(config, precision=PrecisionConfig(fp8=True, initial=Precision.FP8))
    elif method != "loop":
        config = ControlConfig(
            every_steps=10**9, batch=config.batch, precision=PrecisionConfig(enabled=False),
            curvature=CurvatureConfig(enabled=False),
            weights="split" if method.startswith("lean") or method.endswith(("split", "8bit")) else "fp32",
            step_in_backward=method.startswith("lean"), optimizer_state="8bit" if method.endswith("8bit") else "fp32",
            shard_optimizer=method.startswith("sharded"),
            execution=ExecutionConfig(activations="recompute" if method == "checkpointed" else "keep"),
        )  # fmt: skip
    data = Samples(workload) if isinstance(workload.inputs, dict) else (workload.inputs, workload.targets)
    ticks: list[Any] = []
    loop = ControlLoop(workload.model, optimizer_of(workload), workload.loss, data, config=config, on_tick=ticks.append)
    before = [torch.zeros((), device="cuda"), torch.zeros((), device="cuda")]

    def last() -> Tensor:
        total, number = loop.epoch_loss.unbind()
        fresh = bool(number <= before[1])
        loss = (total - (0 if fresh else before[0])) / (number - (0 if fresh else before[1]))
        before[:] = total.clone(), number.clone()
        return loss

    return loop.step, last, (loop, ticks)


class Started(NamedTuple):
    """A workload whose first steps have compiled and captured what the others run."""

    step: Step
    last_loss: Callable[[], Tensor]
    memory: MemoryMeter
    parts: Any
    """The loop and its ticks; None for methods of PyTorch."""
    found: Measurement
    """What has been measured so far."""


def start(name: str, method: str, seed: int) -> Started:
    """Makes the first six steps of one model with one method."""
    use_lean_memory(torch.device("cuda", 0))  # as the service's processes do; any program may call it
    began, memory = time.perf_counter(), memory_meter(torch.device("cuda", 0))
    workload = workload_of(name, seed)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    parts: Any = None
    if method in OURS:
        step, last, parts = ours(workload, method)
        memory = parts[0].memory
    else:
        step, last = peer(workload, method)
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    seconds = {"start_s": time.perf_counter() - ready, "setup_s": ready - began}
    return Started(step, last, memory, parts, {"model": name, "method": method, **seconds})


def measure(started: Started, num_steps: int) -> Measurement:
    """Makes the steps up to the last one of `LOSS_STEPS`, then times `num_steps`; returns the measurements."""
    step, losses = started.step, []
    for index in range(6, LOSS_STEPS[1]):
        step()
        if index >= LOSS_STEPS[0] - 1:
            losses.append(float(started.last_loss()))
    torch.cuda.synchronize()
    stretches = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(num_steps // 5):
            step()
        torch.cuda.synchronize()
        stretches.append(1e3 * (time.perf_counter() - begin) / (num_steps // 5))
    found = started.found | {
        "ms": sum(stretches) / 5, "stretches": [round(ms, 3) for ms in stretches],
        "loss": sum(losses[1:]) / len(losses[1:]),
    }  # fmt: skip
    started.memory.refresh_peaks()
    if started.parts is not None:
        loop, ticks = started.parts
        loop.close()
        faults = [fault for tick in ticks for fault in tick.observation.faults]
        found["faults"] = sorted({f"{fault.kind}@{fault.step}: {fault.detail}"[:220] for fault in faults})
    return found | {"peak_mib": started.memory.peak_bytes / 2**20}


def run(name: str, method: str, num_steps: int, seed: int) -> Measurement:
    """Trains one model with one method and returns the measurements."""
    return measure(start(name, method, seed), num_steps)


def run_after_all_compiled(
    name: str, method: str, num_steps: int, seed: int, barrier: threading.Barrier, gpu: threading.Lock
) -> Measurement:
    """Does what `run` does, but is timed alone, once all runs that share `barrier` and `gpu` have compiled.

    If the process of one of them dies before, the others fail after `_COMPILE_TIMEOUT_S`.
    """
    try:
        started = start(name, method, seed)
    finally:
        barrier.wait(_COMPILE_TIMEOUT_S)  # also after an error: the others would wait for this run
    with gpu:
        return measure(started, num_steps)


def main() -> int:
    """Prints a line for each run; returns 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SIZES), type=model_name)
    parser.add_argument("--methods", nargs="+", default=[each for each in METHODS if each != "fp8"], choices=METHODS)
    parser.add_argument("--steps", type=int, default=1000, help="steps that are timed, after the first 200")
    parser.add_argument("--seed", type=int, default=0, help="of samples, first weights and dropout")
    parser.add_argument("--parallel-compile", action="store_true", help="compile all at once, then time each alone")
    args = parser.parse_args()
    if not has_gpus():
        return 1
    runs = list(itertools.product(installed(args.models), args.methods))
    if not (args.parallel_compile and runs):
        return print_all(run_apart(run, *each, args.steps, args.seed) for each in runs)
    with Manager() as manager, ThreadPoolExecutor(len(runs)) as pool:
        shared = manager.Barrier(len(runs)), manager.Lock()
        measured = (
            pool.submit(run_apart, run_after_all_compiled, *each, args.steps, args.seed, *shared) for each in runs
        )
        return print_all(future.result() for future in as_completed(measured))


if __name__ == "__main__":
    sys.exit(main())
