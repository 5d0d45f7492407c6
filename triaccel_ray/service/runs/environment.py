"""Where a run trains, for its record: hardware, versions, the commit; and whether its memory budget can be enough."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.units import format_bytes

CUDA_CONTEXT_BYTES = 100 * 2**20
"""What a process holds of a GPU at least before its first tensor; 200 to 500 MiB on most."""
COMMIT = "commit"
"""Name, in a run's first record, of the git commit of the user's working directory."""
COMMIT_VARIABLE = "TRIACCEL_COMMIT"
"""Environment variable by which workers, which may be elsewhere, know it."""
_GIT_TIMEOUT_S = 5.0


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


def environment(device: torch.device) -> dict[str, str]:
    """Returns hardware and versions, for the record."""
    info = {
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
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
    """Returns the git commit checked out in `folder`, `-dirty` where files differ from it; empty where none is."""
    words = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu_name() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
