"""The process of a run and its device: watchdog, preloading, memory share, and their entry in the first record."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import platform
import subprocess
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from triaccel_ray.config import ControlConfig, require
from triaccel_ray.measure.memory import MIB, MemoryMeter, memory_meter, mib
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import Start
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.units import format_bytes

CUDA_CONTEXT_BYTES = 100 * 2**20
"""Least GPU memory that a process holds before its first tensor; 200 to 500 MiB on most GPUs."""
RESERVE_BYTES = 512 * MIB
"""Memory that each process sharing a device leaves free. CUDA modules may load between two updates of the memory cap.
A driver that hides processes also hides their CUDA contexts."""
COMMIT = "commit"
"""Key in a run's first record for the git commit of the user's working directory."""
COMMIT_VARIABLE = "TRIACCEL_COMMIT"
"""Environment variable that tells workers, possibly on other machines, this commit."""
_PARENT_INTERVAL_S = 2.0


def require_budget(spec: RunSpec) -> None:
    """Raises ValueError if a run's memory budget cannot suffice on this machine, before Ray starts.

    On a CPU this process, with PyTorch and Ray loaded, holds less than a worker will. No CUDA context is created here.
    """
    budget = spec.memory_budget_bytes
    if budget is None:
        return
    if spec.device != "cpu" and torch.cuda.is_available():
        floor, holder = CUDA_CONTEXT_BYTES, "a CUDA context"
    else:
        floor, holder = memory_meter(torch.device("cpu"), budget).sample(), "a process with PyTorch and Ray"
    if budget <= floor:
        raise ValueError(
            f"memory budget = {format_bytes(budget)}: {holder} alone takes {format_bytes(floor)}; give more, or "
            "--memory-headroom 500MiB for memory on top of that"
        )


def part_of_device(total_bytes: int, num_sharing: int, budget_bytes: int | None = None) -> int:
    """Returns the bytes each of `num_sharing` processes may hold on a device: an equal part less `RESERVE_BYTES`.

    If `budget_bytes` is given it is returned instead, unless it is larger, which raises ValueError.
    """
    part = total_bytes // num_sharing - RESERVE_BYTES
    left = f"of {mib(total_bytes)} nothing is left to each but the {mib(RESERVE_BYTES)} that it must leave free"
    require(part > 0, "trials-per-gpu", num_sharing, f"{left}; let fewer share the device")
    if budget_bytes is not None and budget_bytes > part:
        raise ValueError(
            f"memory budget = {mib(budget_bytes)}: must be at most {mib(part)}, the part of each of {num_sharing} "
            f"processes that share {mib(total_bytes)}; leave it out, or let fewer share the device"
        )
    return part if budget_bytes is None else budget_bytes


def cap_memory_share(device: torch.device, num_sharing: int, budget_bytes: int | None = None) -> int | None:
    """Returns the memory budget of a process that shares a GPU with others, and caps its memory there.

    The cap ends when the process's loop is closed. A process on a CPU, or with a GPU of its own, is not capped and gets
    `budget_bytes` back. Raises as `part_of_device`.
    """
    if num_sharing == 1 or device.type != "cuda":
        return budget_bytes
    part = part_of_device(torch.cuda.get_device_properties(device).total_memory, num_sharing, budget_bytes)
    memory_meter(device, part)
    return part


def start_record(spec: RunSpec, control: ControlConfig, memory: MemoryMeter, world_size: int) -> Start:
    """Returns the first record of a run: its settings, the hardware and versions, and the limit of `memory`."""
    info = {"task": spec.task, "method": spec.method, "seed": str(spec.seed), "purpose": spec.purpose.value}
    if spec.trials_per_gpu > 1:
        info["trials_per_gpu"] = str(spec.trials_per_gpu)
    return Start(
        control=control,
        goal=spec.goal,
        info={**info, "memory_source": memory.source, **environment(spec.torch_device)},
        parameters={
            **{f"recipe.{name}": value for name, value in encode(spec.recipe).items()},
            "memory_limit_bytes": memory.limit_bytes,
            **({"gpus": spec.gpus, "world_size": world_size} if spec.is_distributed else {}),
        },
    )


def environment(device: torch.device) -> dict[str, str]:
    """Returns the hardware and versions for a run's first record."""
    cpu = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    info = {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "device": device.type,
        "python": platform.python_version(),
        "host": platform.node(),
    }
    for package in ("torch", "triton", "triaccel-ray"):
        try:
            info[package] = version(package)
        except PackageNotFoundError:
            info[package] = "not installed"
    if commit := os.environ.get(COMMIT_VARIABLE):
        info[COMMIT] = commit
    return info


def commit_of(folder: Path) -> str:
    """Returns the git commit checked out in `folder`, with `-dirty` if files differ from it; empty if unknown."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def end_with_parent() -> None:
    """Starts a watchdog that ends this process soon after its parent, the machine's raylet.

    Ray 2.60 leaves an actor running when its raylet is lost. The run resumes in another process, which may be on this
    machine and need its GPU.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_INTERVAL_S)
        os._exit(1)  # skips cleanup, which could block: checkpoints and records are always whole

    threading.Thread(target=watch, name="parent-watchdog", daemon=True).start()


def preload() -> None:
    """Imports what the first trial would import, and exempts all loaded objects from garbage collection.

    A trial collects garbage when it begins and ends, so that the next one's memory is measured from zero. Scanning the
    libraries' 440,000 objects takes 0.3 s each time, scanning a trial's own a millisecond.
    """
    importlib.import_module("torch._dynamo")  # which a fused optimizer imports
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else modules that count leaked objects would report them all
