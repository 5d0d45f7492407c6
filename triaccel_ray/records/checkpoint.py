"""Checkpoints: written atomically, loaded without executing code."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.records.durable import atomic_write

FORMAT = 7
_PLAIN = (type(None), bool, int, float, complex, str, Tensor, nn.Parameter)
"""Types that `torch.load(weights_only=True)` reads, other than containers."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, the problem and what to do."""


class OtherFormatError(CheckpointError):
    """A checkpoint is intact but was written by an incompatible version."""


def save_checkpoint(
    path: str | Path, state: dict[str, Any], *, previous: Path | None = None, confirm: Callable[[], None] | None = None
) -> None:
    """Writes `state` (tensors, numbers, strings, lists and dicts of them) to `path`, as `save_durably` does."""
    save_durably(Path(path), {"format": FORMAT, "state": state}, previous=previous, confirm=confirm)


def save_durably(
    path: Path, content: Any, *, previous: Path | None = None, confirm: Callable[[], None] | None = None
) -> None:
    """Writes `content` to `path` for `torch.load(weights_only=True)`, atomically; NumPy numbers become Python numbers.

    The file gets its name only once it is complete on disk, so a crash leaves the old file. If given, `previous` is
    the name under which the old file is kept. `confirm` is called just before; if it raises, nothing changes.

    Raises:
        TypeError: `content` holds a value that could not be loaded; the message says where. Nothing is written.
    """
    content = _loadable(content, path.name)

    def prepare_to_replace() -> None:
        if confirm is not None:
            confirm()
        if previous is not None and path.exists():
            path.replace(previous)

    with atomic_write(path, prepare_to_replace) as file:
        torch.save(content, file)
    file.close()


def _loadable(value: Any, name: str) -> Any:
    """Returns `value` with NumPy numbers as Python numbers; copies its containers, but no tensor.

    Raises:
        TypeError: `torch.load(weights_only=True)` cannot read it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple, set):
        return kind(
            each if type(each) in _PLAIN else _loadable(each, f"{name}[{index}]") for index, each in enumerate(value)
        )
    if kind in (dict, OrderedDict, Counter):
        items = {_loadable(key, f"key of {name}"): _loadable(each, f"{name}[{key!r}]") for key, each in value.items()}
        same = copy.copy(value)  # keeps the versions of its modules, an attribute of a model's state
        same.clear()
        same.update(items)
        return same
    try:  # such as `torch.dtype`, or a class given to `torch.serialization.add_safe_globals`
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{name} is a {kind.__name__}, which a checkpoint cannot hold: must be a tensor, number or string, or a "
            "list, tuple or dict of them; convert it in the state_dict() it comes from"
        ) from error
    return value


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Returns the state saved at `path`, all tensors on the CPU; `load_state_dict` moves them to their devices.

    Raises:
        CheckpointError: the file is missing or damaged.
        OtherFormatError: another version wrote it.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist: name the folder of a run that has saved one")
    return read_checkpoint(path, path)


def read_checkpoint(source: Path | BinaryIO, path: Path) -> dict[str, Any]:
    """Returns the state in a file or its content, as `load_checkpoint`; messages name `path`."""
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the damaged bytes provoke
        raise CheckpointError(
            f"checkpoint {path} is damaged ({first_line(error)[:120]}): delete it to start over, or restore an older "
            "copy"
        ) from error
    found = content.get("format") if isinstance(content, dict) else type(content).__name__
    if isinstance(found, int) and found != FORMAT:
        raise OtherFormatError(
            f"checkpoint {path} has format {found}, this version reads format {FORMAT}: go on with the version that "
            "began the run, or begin a new one"
        )
    if found != FORMAT or "state" not in content:
        raise CheckpointError(f"checkpoint {path} has format {found!r}: this version reads format {FORMAT}")
    state: dict[str, Any] = content["state"]
    return state
