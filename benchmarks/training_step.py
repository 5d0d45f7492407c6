"""`python -m benchmarks.training_step`: a training step under the control loop, beside PyTorch's AMP.

Every contender trains the same network on the same images (on the GPU, cropped and mirrored at random), each in a
process of its own, because memory is what the driver sees of a process. A round runs all contenders once, rounds are
repeated, so that a drifting clock meets them all. Only contenders that learn get a row: their loss over the first
hundred steps must fall as that of the tutorial's AMP does. Everything that happens once (compilation, capture,
what the first refreshes of curvature build) is over before the clock starts, and stands in the column `warm s`.

    tutorial-fp16, tutorial-bf16   autocast as PyTorch's tutorial writes it: NCHW, eager, GradScaler for FP16
    tutorial-fp32                  the same without autocast; convolutions in TF32 (PyTorch's default), as in all FP32
    compiled, max-autotune         channels_last, torch.compile with reduce-overhead or max-autotune, fused SGD, FP16
    compiled-bf16                  the first of these in BF16, without loss scaling
    compiled-graph                 channels_last, the whole step captured by hand in one CUDA graph: input path,
                                   passes through torch.compile, GradScaler, fused SGD; FP16
    compiled-graph-bf16, -fp32     the same in BF16 or FP32, without loss scaling
    max-autotune-graph             the same with torch.compile's max-autotune-no-cudagraphs
    plain                          this engine's captured step alone: no statistics, no loss scaling, no tick
    loop, loop-bf16, loop-mixed    the full loop: statistics every step, tick every 50, curvature top-5 every 200
    loop-fp32                      the same with every layer in FP32
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
from pathlib import Path
from typing import Any

import pynvml
import torch

from benchmarks.step_contenders import Job, Made, amp, graphed, images_and_targets, network

CONTENDERS = (
    "tutorial-fp16",
    "tutorial-bf16",
    "tutorial-fp32",
    "compiled",
    "compiled-bf16",
    "max-autotune",
    "compiled-graph",
    "compiled-graph-bf16",
    "compiled-graph-fp32",
    "max-autotune-graph",
    "plain",
    "loop",
    "loop-bf16",
    "loop-mixed",
    "loop-fp32",
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
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender, in turn")
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
        return float(statistics.median(result[key] for result in results))

    def all_ms(results: list[Result]) -> list[float]:
        return [ms for result in results for ms in result["ms"]]

    base_ms, base_peak = statistics.median(all_ms(reference)), median(reference, "peak_mib")
    print(f"{'':20}{'ms a step':>26}{'speed':>8}{'peak MiB':>10}{'ratio':>7}{'pool':>7}{'warm s':>8}{'epoch':>8}")
    for name, results in found.items():
        ms = all_ms(results)
        spread = f"{statistics.median(ms):8.3f} [{min(ms):.3f}, {max(ms):.3f}]"
        print(
            f"{name:20}{spread:>26}{base_ms / statistics.median(ms):8.2f}{median(results, 'peak_mib'):10.0f}"
            f"{median(results, 'peak_mib') / base_peak:7.2f}{median(results, 'pool_mib'):7.0f}"
            f"{max(result['warm_s'] for result in results):8.1f}{median(results, 'epoch_ratio'):8.3f}"
        )
    print(
        "speed and ratio: images/s and memory against the first row; pool: of the peak, what PyTorch's allocator held;"
    )
    print("warm s: of the slowest process, for later ones find compiled code in PyTorch's caches;")
    print("epoch: an epoch's time over steps x step time")
    if "plain" in found and "loop" in found:
        pairs = [
            statistics.median(loop["ms"]) / statistics.median(plain["ms"])
            for loop, plain in zip(found["loop"], found["plain"], strict=True)
        ]
        overhead = f"{statistics.median(pairs):.3f} [{min(pairs):.3f}, {max(pairs):.3f}]"
        print(f"full loop / same step without control, medians of each round: {overhead}, n = {len(pairs)} rounds")


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
    images, targets = images_and_targets(num_images, size)
    started = time.perf_counter()
    model = network(args.model).to(memory_format=_memory_format(name))
    job = Job(
        model=model,
        images=images,
        targets=targets,
        batch_size=batch_size,
        autotune=args.autotune,
        fuse=not args.unfused,
        recompute=not args.keep,
    )
    made = _made(name, job)
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


def _made(name: str, job: Job) -> Made:
    if _kind(name) != "engine":
        return graphed(name, job) if "-graph" in name else amp(name, job)
    from benchmarks.step_engine import full_loop, plain

    return plain(job) if name == "plain" else full_loop(name, job)


def _kind(name: str) -> str:
    if name.startswith("tutorial"):
        return "tutorial"
    return "compiled" if name.startswith(("compiled", "max-autotune")) else "engine"


def _memory_format(name: str) -> torch.memory_format:
    return torch.contiguous_format if _kind(name) == "tutorial" else torch.channels_last


def _process_mib() -> float:
    """Returns the driver's figure for this process now, the allocator's largest pool in place of its present one."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    own = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    used = float(own[0]) if own and own[0] else float(torch.cuda.memory_reserved())
    return (used - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
