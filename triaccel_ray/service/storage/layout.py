"""What lies in the folder of a run, and how its files are written: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import LogError

T = TypeVar("T")

CHECKPOINT = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
"""The checkpoint before, for the case that the newest cannot be read."""
MODEL = "model.pt"
"""The trained model: the `state_dict` of the model that the task returns, on the CPU."""
EVENTS = "events.jsonl"
DAMAGED = "events.damaged.jsonl"
"""A log that could not be read to its end, set aside when its run went on."""
REPLACED = "events.replaced.jsonl"
"""The log of a run that began again because no checkpoint could be read."""
SPEC = "spec.json"
SETTINGS = "config.toml"
"""The options of a run, for --config."""
ERROR = "error.txt"
"""The traceback of what a run failed by."""
BASELINES = "baselines"
"""Folder of a search's runs that trials are judged by."""
FIGURES = "figures"
"""Folder of pictures."""


def require_new(folder: Path) -> None:
    """Returns if nothing is at `folder` yet.

    Raises:
        ValueError: something is; it is left as it is.
    """
    if folder.exists():
        raise _in_use(folder)


def begin(folder: Path, file: str, spec: Any) -> None:
    """Makes the folder of something new, with what was asked for in `file`; raises as `require_new`."""
    require_new(folder)
    folder.mkdir(parents=True)
    write_value(folder / file, spec)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Makes `folder`, for nobody else to begin something of its name, and removes it where nothing was put into it.

    Raises:
        ValueError: something is there, or another process was first.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise _in_use(folder) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _in_use(folder: Path) -> ValueError:
    """Returns what to raise where something is at `folder`: an empty one is of a command that has only begun."""
    if folder.is_dir() and not any(folder.iterdir()):
        rule = "is empty: a command has just begun there, or was lost before it trained; delete it then"
        return ValueError(f"name = {folder.name!r}: {folder} {rule}, or choose another --name")
    return name_in_use(folder.name, str(folder))


def name_in_use(name: str, where: str) -> ValueError:
    """Returns what to raise where `name` is asked for, and something is there."""
    return ValueError(
        f"name = {name!r}: {where} exists already and is left as it is; choose another --name, or go on with "
        f"`triaccel resume {name}`"
    )


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path`, which holds either the old text or all of the new."""
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial_path.write_text(text)
    partial_path.replace(path)


def write_value(path: Path, value: Any) -> None:
    """Writes a dataclass to `path` as JSON, as a whole; `read_value` reads it."""
    write_atomically(path, json.dumps(encode(value), indent=2) + "\n")


def read_value(cls: type[T], path: Path, way_out: str) -> T:
    """Returns the value of class `cls` that the file at `path` holds.

    Raises:
        LogError: it cannot be read, or holds something else; the message ends with `way_out`.
    """
    try:
        return decode(cls, json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise LogError(f"{path} cannot be read ({error}): {way_out}") from error
