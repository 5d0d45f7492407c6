"""`python -m benchmarks.training_step`: a training step under the control loop, beside PyTorch's AMP.

Every contender trains the same network on the same images (on the GPU, cropped and mirrored at random), each in a
process of its own, because memory is what the driver sees of a process. A round runs all contenders once, rounds are
repeated, so that a drifting clock meets them all. Only contenders that learn get a row: their loss over the first
hundred steps must fall as that of the tutorial's AMP does. Everything that happens once (compilation, capture,
what the first refreshes of curvature build) is over before the clock starts, and stands in the column `warm s`.

    tutorial-fp16, tutorial-bf16   autocast as PyTorch's tutorial writes it: NCHW, eager, GradScaler for FP16
    compiled, max-autotune         channels_last, torch.compile with reduce-overhead or max-autotune, fused SGD, FP16
    compiled-bf16                  the first of these in BF16, without loss scaling
    plain                          this engine's captured step alone: no statistics, no loss scaling, no tick
    loop, loop-bf16, loop-mixed    the full loop: statistics every step, tick every 50, curvature top-5 every 200
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEVICE = torch.device("cuda")
CONTENDERS = (
    "tutorial-fp16",
    "tutorial-bf16",
    "compiled",
    "compiled-bf16",
    "max-autotune",
    "plain",
    "loop",
    "loop-bf16",
    "loop-mixed",
)
Result = dict[str, Any]
_LEARNING_STEPS = range(20, 90)
"""Over which losses are compared, before the clock starts."""
_LEARNING_TOLERANCE = 0.25
"""Largest difference between how far the mean loss of a contender and that of the tutorial's AMP have fallen below that
of guessing, relative: the first steps of FP16 are skipped until the loss scale fits."""
_WARM_STEPS = {"tutorial": 100, "compiled": 100, "engine": 640}
"""The engine's with three refreshes of curvature, of which the third is captured, and what has to be captured anew."""


def main() -> int:
    """Runs the contenders and prints their figures; returns 1 if one of them did not learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["resnet18", "efficientnet-b0"], default="resnet18")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[96, 512])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="timed stretches in a process")
    parser.add_argument("--steps", type=int, default=200, help="steps in a stretch")
    parser.add_argument("--autotune", action="store_true", help="cuDNN benchmark mode for this engine")
    parser.add_argument("--unfused", action="store_true", help="this engine with its norms unfused")
    parser.add_argument("--keep", action="store_true", help="this engine keeping what it could recompute")
    parser.add_argument("--json", type=Path, help="file to which all raw figures are appended, refused ones included")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU")
        return 1
    if args.child:
        print(json.dumps(_measure(args.child, args)))
        return 0
    return max(_compare(args, batch_size) for batch_size in args.batch_size)


def _compare(args: argparse.Namespace, batch_size: int) -> int:
    found: dict[str, list[Result]] = {name: [] for name in args.contenders}
    for _ in range(args.rounds):
        for name in [name for name in args.contenders if name in found]:
            result = _run_child(args, name, batch_size)
            if result is None:
                del found[name]
            else:
                found[name].append(result)
                _keep(args, {"model": args.model, "batch_size": batch_size, "contender": name, **result})
    if not found:
        return 1
    reference = found.get("tutorial-fp16") or next(iter(found.values()))
    guessing = math.log(10)
    expected = statistics.median(result["loss"] for result in reference)
    wrong = [
        name
        for name, results in found.items()
        if not all(abs((guessing - r["loss"]) / (guessing - expected) - 1) <= _LEARNING_TOLERANCE for r in results)
    ]
    properties = torch.cuda.get_device_properties(0)
    print(f"\n{args.model}, batch {batch_size}, {properties.name}, PyTorch {torch.__version__}, SGD momentum")
    settings = [name for name in ("autotune", "unfused", "keep") if getattr(args, name)]
    print(f"this engine: {', '.join(settings) or 'norms fused, their outputs recomputed, no autotuning'}")
    print(f"n = {args.rounds} processes x {args.repeats} stretches of {args.steps} steps; median [least, most]\n")
    right = {name: results for name, results in found.items() if name not in wrong}
    if right:
        _print_table(right, reference)
    for name in wrong:
        losses = [round(result["loss"], 3) for result in found[name]]
        print(f"{name} gets no row: it did not learn as the first did; losses {losses}, not about {expected:.3f}")
    return int(len(right) < len(args.contenders))


def _keep(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(figures) + "\n")


def _print_table(found: dict[str, list[Result]], reference: list[Result]) -> None:
    def median(results: list[Result], key: str) -> float:
        return statistics.median(result[key] for result in results)

    def all_ms(results: list[Result]) -> list[float]:
        return [ms for result in results for ms in result["ms"]]

    base_ms, base_peak = statistics.median(all_ms(reference)), median(reference, "peak_mib")
    print(f"{'':16}{'ms a step':>26}{'speed':>8}{'peak MiB':>10}{'ratio':>7}{'pool':>7}{'warm s':>8}{'epoch':>8}")
    for name, results in found.items():
        ms = all_ms(results)
        spread = f"{statistics.median(ms):8.3f} [{min(ms):.3f}, {max(ms):.3f}]"
        print(
            f"{name:16}{spread:>26}{base_ms / statistics.median(ms):8.2f}{median(results, 'peak_mib'):10.0f}"
            f"{median(results, 'peak_mib') / base_peak:7.2f}{median(results, 'pool_mib'):7.0f}"
            f"{median(results, 'warm_s'):8.1f}{median(results, 'epoch_ratio'):8.3f}"
        )
    print(
        "speed and ratio: images/s and memory against the first row; pool: of the peak, what PyTorch's allocator held;"
    )
    print("epoch: an epoch's time over steps x step time")
    if "plain" in found and "loop" in found:
        pairs = [a / b for a, b in zip(all_ms(found["loop"]), all_ms(found["plain"]), strict=True)]
        overhead = f"{statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]"
        print(f"full loop / same step without control: {overhead}")


def _run_child(args: argparse.Namespace, name: str, batch_size: int) -> Result | None:
    """Returns the figures of one contender's process; None if it failed, and then prints why."""
    command = [sys.executable, "-m", "benchmarks.training_step", "--child", name, "--model", args.model]
    command += [
        "--batch-size",
        str(batch_size),
        "--steps",
        str(args.steps),
        "--repeats",
        str(args.repeats),
        *(f"--{name}" for name in ("autotune", "unfused", "keep") if getattr(args, name)),
    ]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        print(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return None
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "process_s": time.perf_counter() - started}


def _measure(name: str, args: argparse.Namespace) -> Result:
    batch_size = args.batch_size[0]
    size, num_images = (224, 4096) if args.model == "efficientnet-b0" else (32, 50_000)
    torch.manual_seed(0)
    images, targets = _images(num_images, size)
    started = time.perf_counter()
    make = _loop if name.startswith("loop") else _plain if name == "plain" else _amp
    model = _network(args.model).to(memory_format=_memory_format(name))
    made = make(name, model, images, targets, batch_size, args)
    losses = []
    for number in range(_WARM_STEPS[_kind(name)]):
        made.step()
        if number in _LEARNING_STEPS:
            losses.append(made.loss())
    torch.cuda.synchronize()
    warm_s = time.perf_counter() - started
    ms = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        for _ in range(args.steps):
            made.step()
        torch.cuda.synchronize()
        ms.append(1e3 * (time.perf_counter() - start) / args.steps)
    found: Result = {
        "ms": ms,
        "warm_s": warm_s,
        "peak_mib": made.peak_bytes() / 2**20 if made.peak_bytes else _process_mib(),
    }
    found["pool_mib"] = torch.cuda.max_memory_reserved() / 2**20
    found["loss"] = statistics.fmean(losses)
    per_step = statistics.median(ms) / 1e3
    num_steps = -(-num_images // batch_size)
    found["epoch_ratio"] = made.epoch() / (num_steps * per_step) if made.epoch else float("nan")
    return found


def _kind(name: str) -> str:
    if name.startswith("tutorial"):
        return "tutorial"
    return "compiled" if name in ("compiled", "compiled-bf16", "max-autotune") else "engine"


def _memory_format(name: str) -> torch.memory_format:
    return torch.contiguous_format if _kind(name) == "tutorial" else torch.channels_last


def _images(num_images: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns noise whose amount of red tells the class: learnable within a few dozen steps."""
    targets = torch.randint(0, 10, (num_images,), device=DEVICE)
    images = torch.randint(0, 128, (num_images, 3, size, size), dtype=torch.uint8, device=DEVICE)
    images[:, 0] += (targets * 12).to(torch.uint8).view(-1, 1, 1)
    return images, targets


def _network(name: str) -> nn.Module:
    from torchvision.models import efficientnet_b0, resnet18

    if name == "efficientnet-b0":
        return efficientnet_b0(num_classes=10).to(DEVICE)
    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model.to(DEVICE)


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def _crop_flip_normalise(images: Tensor, offsets: Tensor, mirrored: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Returns the augmented batch [b, 3, h, w] in channels_last memory, as one writes it with PyTorch's operations."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored == 1, columns.flip(0), columns) + offsets[0]
    rows = torch.arange(height, device=images.device) + offsets[1]
    samples = torch.arange(batch, device=images.device)
    cropped = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return cropped.float() * scale + shift


def _scale_and_shift() -> tuple[Tensor, Tensor]:
    """Returns what normalises raw images by multiplication and addition, [1, 3, 1, 1] each."""
    scale = torch.tensor([1 / (255 * std) for std in STD], device=DEVICE)
    shift = torch.tensor([-mean / std for mean, std in zip(MEAN, STD, strict=True)], device=DEVICE)
    return scale.view(1, 3, 1, 1), shift.view(1, 3, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A contender, ready to train."""

    step: Callable[[], None]
    loss: Callable[[], float]
    """Returns the last step's loss; waits for the device."""
    epoch: Callable[[], float] | None = None
    """Trains an epoch and returns its seconds."""
    peak_bytes: Callable[[], float] | None = None
    """The process's peak on the device, where the contender keeps count of it."""


def _amp(name: str, model: nn.Module, images: Tensor, targets: Tensor, batch_size: int, args: Any) -> Made:
    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float16
    is_tuned = not name.startswith("tutorial")
    optimizer = _sgd(model, fused=is_tuned or None)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)
    compute: Any = model
    prepare: Any = _crop_flip_normalise
    if is_tuned:
        compute = torch.compile(model, mode="max-autotune" if name == "max-autotune" else "reduce-overhead")
        prepare = torch.compile(_crop_flip_normalise)
    scale, shift = _scale_and_shift()
    generator = torch.Generator(DEVICE).manual_seed(0)
    state: dict[str, Any] = {"loss": torch.zeros(()), "cursor": 0, "order": torch.randperm(len(images), device=DEVICE)}
    model.train()

    def step() -> None:
        start = state["cursor"]
        if start + batch_size > len(images):
            start, state["order"] = 0, torch.randperm(len(images), device=DEVICE)
        state["cursor"] = start + batch_size
        indices = state["order"][start : start + batch_size]
        offsets = torch.randint(0, 9, (2, batch_size, 1), generator=generator, device=DEVICE)
        mirrored = torch.randint(0, 2, (batch_size, 1), generator=generator, device=DEVICE)
        inputs = prepare(images[indices], offsets, mirrored, scale, shift)
        inputs = inputs.contiguous(memory_format=torch.channels_last if is_tuned else torch.contiguous_format)
        with torch.autocast(DEVICE.type, dtype=dtype):
            loss = F.cross_entropy(compute(inputs), targets[indices])
        state["loss"] = loss.detach()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Made(step=step, loss=lambda: float(state["loss"]))


def _source(images: Tensor, targets: Tensor) -> Any:
    from trainables.images import ImageSource, Preparation

    return ImageSource(images, targets, Preparation(mean=MEAN, std=STD, augment=True))


def _config(name: str, batch_size: int, args: Any) -> Any:
    from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
    from triaccel_ray.plan import Precision

    # Thresholds that end with every layer in FP16, or in BF16; `mixed` has deep layers in FP16 and the first in BF16.
    low = {"loop": 1e9, "plain": 1e9, "loop-bf16": 0.0, "loop-mixed": 3e-6}[name]
    initial = Precision.BF16 if name in ("loop-bf16", "loop-mixed") else Precision.FP16
    return ControlConfig(
        every_steps=50,
        precision=PrecisionConfig(tau_low=low, tau_high=1e10, initial=initial, dwell_ticks=0, patience_ticks=1),
        curvature=CurvatureConfig(every_steps=200, num_samples=32, top_k=5, alpha=0.001),
        batch=BatchConfig(start=batch_size, minimum=batch_size, maximum=batch_size, granularity=1),
        execution=ExecutionConfig(autotune=args.autotune, fuse=not args.unfused, recompute=not args.keep),
    )


def _sgd(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4, fused=fused)


def _loop(name: str, model: nn.Module, images: Tensor, targets: Tensor, batch_size: int, args: Any) -> Made:
    import tempfile

    from triaccel_ray.events import EventLog
    from triaccel_ray.loop import ControlLoop

    log = EventLog(Path(tempfile.mkdtemp()) / "events.jsonl")
    config = _config(name, batch_size, args)
    loop = ControlLoop(model, _sgd(model), F.cross_entropy, _source(images, targets), config=config, log=log)

    def epoch() -> float:
        loop.train_epoch()
        return statistics.median(loop.train_epoch().seconds for _ in range(2))

    def peak_bytes() -> float:
        loop.memory.refresh_peaks()
        return loop.memory.peak_bytes

    return Made(step=loop.step, loss=_LastLoss(loop._epoch_loss), epoch=epoch, peak_bytes=peak_bytes)


def _plain(name: str, model: nn.Module, images: Tensor, targets: Tensor, batch_size: int, args: Any) -> Made:
    """The captured step that a user would write: fixed loss scale, no statistics, nothing decided."""
    from triaccel_ray.apply.capture import StepCache
    from triaccel_ray.apply.copies import ComputeCopies
    from triaccel_ray.apply.feed import Feed
    from triaccel_ray.apply.fuse import Fusion, fuse
    from triaccel_ray.apply.optimizer import LayerwiseOptimizer
    from triaccel_ray.apply.precision import LayerPrecision
    from triaccel_ray.apply.step import Step
    from triaccel_ray.gradients import Gradients
    from triaccel_ray.graphs import GraphPool
    from triaccel_ray.layers import find_layers
    from triaccel_ray.plan import Precision

    model.train()
    layers, device = find_layers(model), DEVICE
    optimizer = LayerwiseOptimizer(_sgd(model), layers)
    copies = ComputeCopies(layers, optimizer.parameters)
    modules = [module for layer in layers for module in layer.modules]
    fused = None if args.unfused else fuse(model, modules, recompute=not args.keep)
    fusion = fused if isinstance(fused, Fusion) else None
    precision = LayerPrecision(model, layers, copies=copies, norms=() if fusion is None else fusion.norms)
    precision.set({layer.name: Precision.FP16 for layer in layers})
    feed = Feed(_source(images, targets), seed=0, device=device)

    def nothing() -> None:
        """Memory is neither checked nor given back."""

    step = Step(model, F.cross_entropy, feed, precision, check_memory=nothing, release_memory=nothing, fusion=fusion)
    scale, finite = torch.tensor(1024.0, device=device), torch.zeros((), device=device)
    total = torch.zeros(2, dtype=torch.float64, device=device)

    class Update:
        is_capturable = True

        def run(self, loss_sum: Tensor, num_samples: int, gradients: Gradients) -> None:
            optimizer.update(gradients, loss_scale=scale, found_nonfinite=finite)
            total.add_(torch.stack([loss_sum, torch.full_like(loss_sum, num_samples)]))

    execution = _config(name, batch_size, args).execution
    cache = StepCache(step, Update(), lambda: Gradients(optimizer.watched), GraphPool(device), execution)
    made = {"steps": 0}
    scales: dict[str, float] = {}

    def run() -> None:
        precision.refresh_copies()
        optimizer.set_rates(1.0, scales, copies.in_force)
        cache.run(feed.take(batch_size), scale, step=made["steps"])
        made["steps"] += 1

    return Made(step=run, loss=_LastLoss(total))


class _LastLoss:
    """The mean loss of the step just made, from sums over an epoch."""

    def __init__(self, sums: Tensor) -> None:
        """Takes sum over the samples and their number, fp64 [2]; asked after every step."""
        self._sums, self._last = sums, (0.0, 0.0)

    def __call__(self) -> float:
        loss_sum, number = self._sums.tolist()
        if number <= self._last[1]:  # a new epoch
            self._last = 0.0, 0.0
        loss = (loss_sum - self._last[0]) / (number - self._last[1])
        self._last = loss_sum, number
        return float(loss)


def _process_mib() -> float:
    """Returns the driver's figure for this process now, the allocator's largest pool in place of its present one."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    own = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    used = float(own[0]) if own and own[0] else float(torch.cuda.memory_reserved())
    return (used - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
