"""A run's first record: what was asked for, hardware, versions, the commit; and whether a budget can be enough."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from triaccel_ray.config import ControlConfig
from triaccel_ray.measure.memory import MemoryMeter, memory_meter
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import Start
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.units import format_bytes

CUDA_CONTEXT_BYTES = 100 * 2**20
"""What a process holds of a GPU at least before its first tensor; 200 to 500 MiB on most."""
COMMIT = "commit"
"""Name, in a run's first record, of the git commit of the user's working directory."""
COMMIT_VARIABLE = "TRIACCEL_COMMIT"
"""Environment variable by which workers, which may be elsewhere, know it."""


def require_budget(spec: RunSpec) -> None:
    """Returns if the memory budget of a run on this machine may be enough: before Ray starts, which takes seconds.

    On a CPU this process, with PyTorch and Ray loaded, holds less than a worker will. A CUDA context is not made here.

    Raises:
        ValueError: the budget is smaller; on a CPU also if it is larger than the machine's memory.
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


def start_record(spec: RunSpec, control: ControlConfig, device: torch.device, memory: MemoryMeter) -> Start:
    """Returns what was asked for, and where the run trains: on `device`, by `control`, within the limit of `memory`."""
    info = {"task": spec.task, "method": spec.method, "seed": str(spec.seed), "purpose": spec.purpose.value}
    if spec.trials_per_gpu > 1:
        info["trials_per_gpu"] = str(spec.trials_per_gpu)
    return Start(
        control=control,
        goal=spec.goal,
        info={**info, "memory_source": memory.source, **environment(device)},
        parameters={
            **{f"recipe.{name}": value for name, value in encode(spec.recipe).items()},
            "memory_limit_bytes": memory.limit_bytes,
        },
    )


def environment(device: torch.device) -> dict[str, str]:
    """Returns hardware and versions, for the record."""
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
    return info | ({COMMIT: commit} if (commit := os.environ.get(COMMIT_VARIABLE)) else {})


def commit_of(folder: Path) -> str:
    """Returns the git commit checked out in `folder`, `-dirty` where files differ from it; empty where none is."""
    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
