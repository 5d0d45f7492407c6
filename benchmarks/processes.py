"""Runs each measurement in a process of its own, because NVML reports memory per process."""

from __future__ import annotations

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from traceback import format_exception
from typing import Any

import torch

Measurement = dict[str, Any]


def parser_of(description: str | None) -> ArgumentParser:
    """Returns a parser of a benchmark's options whose help keeps the lines of its docstring."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


def has_gpus(number: int = 1) -> bool:
    """Returns whether this machine has so many GPUs, and prints them, or that they are missing."""
    found = torch.cuda.device_count()
    if found < number:
        print(f"needs {number} NVIDIA GPUs; {found} found")
        return False
    print(f"{number} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    return True


def run_apart(measure: Callable[..., Measurement], *args: Any) -> Measurement:
    """Returns what `measure(*args)` returns in a new process, or its `error` and the arguments."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        future = pool.submit(measure, *args)
        if (error := future.exception()) is not None:
            return {"args": list(map(str, args)), "error": "".join(format_exception(error)).strip()[-900:]}
        return future.result()


def print_all(found: Iterable[Measurement]) -> int:
    """Prints each measurement as a line of JSON as soon as it is there; returns 1 if one failed, else 0."""
    failed = 0
    for each in found:
        print(json.dumps(each), flush=True)
        failed |= "error" in each
    return failed
