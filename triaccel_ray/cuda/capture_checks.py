"""Detects, while a pass runs eagerly, what a captured CUDA graph of it could not repeat.

A check beforehand is cheap, while a capture that CUDA aborts costs every graph that exists (`graphs`). And random
numbers drawn on the host abort nothing: a replay would silently use the same ones again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from triaccel_ray.cuda.random_states import host_random_state

_WAITS = "called a synchronizing CUDA operation"
_HOST_WAITS = "the host waits for the device"
_ON_ANOTHER_STREAM = "AccumulateGrad node's stream does not match"


@contextlib.contextmanager
def watched(obstacles: list[str], device: torch.device) -> Iterator[None]:
    """Appends to `obstacles`, once each, what the pass inside does that a replay would not repeat."""
    before = host_random_state()
    with contextlib.ExitStack() as stack:
        caught: list[warnings.WarningMessage] = []
        if device.type == "cuda":
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(_warned_of_waiting())
        yield
    found = [reason for warning in caught if (reason := _reason(warning)) is not None]
    if host_random_state() != before:
        found.append("the model draws random numbers on the host, which a replay would not draw anew")
    obstacles.extend(reason for reason in dict.fromkeys(found) if reason not in obstacles)


def is_certain(obstacle: str) -> bool:
    """Returns whether a capture is bound to fail or mislead.

    A pass that waits may not do so while it is captured: models of transformers then look at no values of their masks.
    """
    return not obstacle.startswith(_HOST_WAITS)


def _reason(warning: warnings.WarningMessage) -> str | None:
    """Returns the obstacle to capture that this warning reports; issues any other warning again."""
    text = str(warning.message)
    if _WAITS in text:
        return f"{_HOST_WAITS} ({warning.filename}:{warning.lineno})"
    if _ON_ANOTHER_STREAM in text:
        return "outputs or losses of an earlier pass are still held, and with them the stream of their gradients"
    warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return None


@contextlib.contextmanager
def _warned_of_waiting() -> Iterator[None]:
    """Makes PyTorch warn when the host waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("warn")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
