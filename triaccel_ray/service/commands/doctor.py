"""Checks whether this machine is ready: one line per check, with a remedy if it fails. Leaves no files behind."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

import pynvml
import ray
import torch

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.cluster.cluster import cluster, environment_variables
from triaccel_ray.service.console import out
from triaccel_ray.service.locations import tracker_of
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store

PACKAGES = ("torch", "torchvision", "triton", "ray", "mlflow", "optuna", "nvidia-ml-py", "scikit-learn", "rich")
Verdict: TypeAlias = Literal["ok", "note", "problem"]
"""Outcome of a check; `note`: it works, with limitations."""
Finding: TypeAlias = tuple[Verdict, str]
"""Verdict of one check, and what it found."""
_STYLES: Mapping[Verdict, str] = {"ok": "green", "note": "yellow", "problem": "red"}


def show_findings(where: Locations) -> int:
    """Prints the findings as they come, and returns the exit status: 1 if one is a problem."""
    status = 0
    for subject, verdict, text in examine(where):
        out.print(f"{verdict:8}", style=_STYLES[verdict], end="")
        out.print(f" {subject:22} {text}", soft_wrap=True)
        if verdict == "problem":
            status = 1
    return status


def examine(where: Locations) -> Iterator[tuple[str, Verdict, str]]:
    """Yields subject, verdict and finding of each check; an exception becomes a finding."""
    storage = where.storage_path
    checks: dict[str, Callable[[], Finding]] = {
        "python": lambda: ("ok", f"{platform.python_version()} at {sys.executable}"),
        **{name: partial(_package, name) for name in PACKAGES},
        "gpu": _gpu,
        "nvml": _nvml,
        "ray starts": partial(_ray, where.address),
        "mlflow store": partial(_tracking, where),
        "disk": partial(_disk, storage.folder),
    }
    if storage.uri is not None:
        checks["storage"] = partial(_store, storage)
    for subject, check in checks.items():
        try:
            yield subject, *check()
        except ValueError as error:  # its message has the way out
            yield subject, "problem", str(error)
        except Exception as error:  # a check that breaks must not stop the others
            yield subject, "problem", f"{type(error).__name__}: {first_line(error)}"


def _package(name: str) -> Finding:
    try:
        return "ok", version(name)
    except PackageNotFoundError:
        return "problem", f"not installed; `pip install {name}`, or install this package anew"


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        return "note", "none visible to PyTorch: everything runs on the CPU, where FP16 is emulated and slow"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    bf16 = "BF16 in hardware" if torch.cuda.is_bf16_supported(including_emulation=False) else "no BF16: FP16 and FP32"
    return "ok", f"{', '.join(names)}; {bf16}; CUDA {torch.version.cuda}"


def _nvml() -> Finding:
    try:
        pynvml.nvmlInit()
        free = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free
        return "ok", f"driver {pynvml.nvmlSystemGetDriverVersion()}, {free / 2**30:.1f} GiB free"
    except pynvml.NVMLError as error:
        return "problem" if torch.cuda.is_available() else "note", (
            f"{first_line(error)}; a run on a GPU needs it to measure memory: install the driver's libnvidia-ml, let a "
            "container have it (NVIDIA_DRIVER_CAPABILITIES=compute,utility), or use --device cpu"
        )


def _ray(address: str | None) -> Finding:
    with contextlib.ExitStack() as stack:
        if address is None:  # keeps its files in a temporary folder, and its token out of ~/.ray
            folder = TemporaryDirectory(prefix="d", dir=os.environ.get("RAY_TMPDIR"), ignore_cleanup_errors=True)
            token = os.environ.get("RAY_AUTH_TOKEN", token_hex(32))
            variables = {"RAY_TMPDIR": stack.enter_context(folder), "RAY_AUTH_TOKEN": token}
            stack.enter_context(environment_variables(variables))
        stack.enter_context(cluster(address))
        resources = ray.cluster_resources()
        return "ok", f"{ray.__version__}, {resources.get('CPU', 0):.0f} CPUs, {resources.get('GPU', 0):.0f} GPUs"


def _tracking(where: Locations) -> Finding:
    tracker = tracker_of(where)
    tracker.check()
    return "ok", tracker.uri


def _store(storage: StoragePath) -> Finding:
    Store(storage).check(writable=False)
    return "ok", f"{storage.uri} can be listed and read; writing was not tried"


def _disk(storage: Path) -> Finding:
    existing = next(path for path in (storage, *storage.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return "ok" if free > 2 * 2**30 else "note", f"{free / 2**30:.0f} GiB free at {existing}"
