"""Saves, compares and restores the random states of torch, Python, NumPy and CUDA."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def random_states(*, cuda: bool = True) -> dict[str, Any]:
    """Returns the states of torch's, Python's and (when in use) NumPy's and CUDA's global generators."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(internal), gauss],
        "cuda": torch.cuda.get_rng_state_all() if cuda and torch.cuda.is_available() else [],
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state(legacy=True)
        states["numpy"] = [name, keys.tolist(), *rest]
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restores what `random_states` returned, perhaps in a process that sees fewer GPUs."""
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(tuple(states["numpy"]))


def default_generator(device: torch.device) -> torch.Generator | None:
    """Returns the generator that PyTorch draws from on a GPU that is in use; None on a CPU."""
    if device.type != "cuda":
        return None
    generator: torch.Generator = torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]
    return generator


def restoring_random_states(generator: torch.Generator) -> Callable[[], None]:
    """Returns a function that restores this generator, and the global ones of its device and the host, as they are now.

    Quicker than `random_states`, whose states can be stored in a file.
    """
    own = default_generator(generator.device)
    generators = [generator, torch.default_generator, *([] if own is None else [own])]
    states = [each.get_state() for each in generators]
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)

    return restore


@contextlib.contextmanager
def preserved_random_states(*, cuda: bool = True) -> Iterator[None]:
    """Returns a context that restores the random states when it ends."""
    states = random_states(cuda=cuda)
    try:
        yield
    finally:
        set_random_states(states)


def host_random_state() -> tuple[Any, ...]:
    """Returns a value that changes with each draw from Python's, torch's or NumPy's generators on the host."""
    states = random_states(cuda=False)
    return states["python"], states["torch"].tolist(), states.get("numpy")
