"""Finds, while a pass runs eagerly, what a captured CUDA graph of it may not repeat.

Random numbers drawn on the host do not abort a capture, but replays would silently repeat them. A synchronization of
the host aborts it, and a failed capture costs all graphs of the pool (`GraphPool`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from triaccel_ray.cuda.random_states import host_random_state

_WAITS = "called a synchronizing CUDA operation"
_ON_ANOTHER_STREAM = "AccumulateGrad node's stream does not match"
_CAPTURE_QUERY = "is_cuda_stream_capturing"
"""What models of transformers call; a test notices if it is renamed."""


class Obstacle(NamedTuple):
    """What a captured graph may not repeat."""

    text: str
    is_certain: bool = True
    """Whether a capture is sure to fail or to mislead. A synchronization is not: some models, such as those of
    transformers, which read their masks, synchronize only while they are not captured."""


@contextlib.contextmanager
def watched(obstacles: list[Obstacle], device: torch.device) -> Iterator[None]:
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
        found.append(Obstacle("the model draws random numbers on the host, which a replay would not draw anew"))
    obstacles.extend(reason for reason in dict.fromkeys(found) if reason not in obstacles)


def has_capture_query() -> bool:
    """Returns whether code may run that is different while it is captured: that of models of transformers."""
    return hasattr(_transformers(), _CAPTURE_QUERY)


@contextlib.contextmanager
def overriding_capture_query(is_capturing: bool) -> Iterator[None]:
    """Makes models of transformers run their code for captured steps, or that for others, in the whole process.

    While they are captured, they build attention masks that they otherwise leave out after a look at the data, for
    which the host waits. Compiled code differs with a mask, and cannot be compiled during a capture. So all steps of a
    run need the same answer.
    """
    module, original = _transformers(), getattr(_transformers(), _CAPTURE_QUERY, None)
    if original is None:
        yield
        return
    setattr(module, _CAPTURE_QUERY, _yes if is_capturing else _no)
    try:
        yield
    finally:
        setattr(module, _CAPTURE_QUERY, original)


def _transformers() -> ModuleType | None:
    return sys.modules.get("transformers.utils.import_utils")


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _reason(warning: warnings.WarningMessage) -> Obstacle | None:
    """Returns the obstacle to capture that this warning reports; issues any other warning again."""
    text = str(warning.message)
    if _WAITS in text:
        return Obstacle(f"the host waits for the device ({warning.filename}:{warning.lineno})", is_certain=False)
    if _ON_ANOTHER_STREAM in text:
        return Obstacle("outputs or losses of an earlier pass are still held, and with them their gradients' stream")
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
