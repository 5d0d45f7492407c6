"""Checkpoints: whole or not there, loaded without running code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.records.durable import whole_file

FORMAT = 3


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file, what is wrong and the way out."""


class OtherFormatError(CheckpointError):
    """A checkpoint is whole, and written by a version that this one cannot follow."""


def save_checkpoint(
    path: Path,
    state: dict[str, Any],
    *,
    previous: Path | None = None,
    confirm: Callable[[], None] | None = None,
) -> None:
    """Writes `state` (tensors, numbers, strings, lists and dicts of them) to `path`, as `save_durably` does."""
    save_durably(path, {"format": FORMAT, "state": state}, previous=previous, confirm=confirm)


def save_durably(
    path: Path, content: Any, *, previous: Path | None = None, confirm: Callable[[], None] | None = None
) -> None:
    """Writes `content` to `path` for `torch.load`, atomically.

    The file appears under its name only when it is whole on the disk, so a crash leaves the one before. That one is
    kept as `previous`, where a name is given. `confirm` is called just before: if it raises, all stays as it was.
    """

    def ready() -> None:
        if confirm is not None:
            confirm()
        if previous is not None and path.exists():
            path.replace(previous)

    with whole_file(path, ready) as file:
        torch.save(content, file)
    file.close()


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Returns the state saved at `path`, all tensors on the CPU; `load_state_dict` moves them where they belong.

    Raises:
        CheckpointError: the file is missing or damaged.
        OtherFormatError: another version has written it.
    """
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist: name the folder of a run that has saved one")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
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
