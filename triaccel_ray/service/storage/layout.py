"""Names of the files in the folders of runs, searches and comparisons, and atomic writes of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.durable import partial_path
from triaccel_ray.records.events import LogError

T = TypeVar("T")

CHECKPOINT = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
"""The second newest checkpoint, used if the newest cannot be read."""
MODEL = "model.pt"
"""The trained model: the `state_dict` of the model that the task returns, on the CPU."""
EVENTS = "events.jsonl"
DAMAGED = "events.damaged.jsonl"
"""A log that could not be read to its end, set aside when its run was resumed."""
REPLACED = "events.replaced.jsonl"
"""The old log of a run that started over because no checkpoint could be read."""
SPEC = "spec.json"
ERROR = "error.txt"
"""The traceback of the error that ended a run."""
SEARCH = "search.json"
"""Spec of a search, beside its runs."""
COMPARISON = "comparison.json"
"""Spec of a comparison, beside its runs."""
PREPARED = "prepared.json"
"""What a search's baselines and probe say."""
JOURNAL = "trials.jsonl"
"""Samples of a search, each written before its trial begins."""
TUNED_THRESHOLDS = "found.json"
"""Best thresholds of a search."""
FIXED_SETTING = "fixed.json"
"""Fixed setting that a comparison chose."""
BASELINES = "baselines"
"""Folder of the baseline runs by which a search judges its trials."""
TRIALS = "trials"
"""Folder of the trials of a search, or of a comparison's fixed settings."""
REPEATS = "repeats"
"""Folder of the repeats of a search's best trial and baselines."""
SHIPPED = "mlflow.json"
"""How much of the event log beside it has arrived in MLflow."""
SETTINGS = "config.toml"
"""The options of a finished run, for --config."""
REPORT = "report.html"
FIGURES = "figures"
"""Folder of pictures."""
LOG_FILES = (SPEC, ERROR, DAMAGED, REPLACED, EVENTS)
"""Files to view a run, though not to resume it; the log is last because it says what the others hold."""
RUN_FILES = (MODEL, *LOG_FILES, CHECKPOINT)
"""Files that a run uploads, in this order. Everything else stays on its machine."""
PAGE_FILES = (SETTINGS, TUNED_THRESHOLDS, REPORT)
WRITER = ".writer"
"""File in the store that names the training folder in which a run continues."""
COMMAND_FILES = (SEARCH, COMPARISON, PREPARED, FIXED_SETTING, JOURNAL, SHIPPED, *PAGE_FILES)
"""Files that a command writes: request, results, suggestions, MLflow state, reports. With a spec also its log."""


def is_set_of_runs(folder: Path) -> bool:
    """Returns whether a folder is that of a search or comparison."""
    return any((folder / name).exists() for name in (SEARCH, COMPARISON))


def create_with_spec(folder: Path, file: str, spec: Any) -> None:
    """Creates a new folder and writes `spec` to `file` in it; raises as `claiming_name`."""
    with claiming_name(folder):
        write_value(folder / file, spec)


@contextlib.contextmanager
def claiming_name(folder: Path) -> Iterator[None]:
    """Creates `folder` to reserve its name, and removes it if it is still empty; raises ValueError if it exists."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise folder_in_use(folder) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def folder_in_use(folder: Path) -> ValueError:
    """Returns the error for an existing `folder`; an empty one belongs to a command that has only begun."""
    if folder.is_dir() and not any(folder.iterdir()):
        rule = "is empty: a command has just begun there, or was lost before it trained; delete it then"
        return ValueError(f"name = {folder.name!r}: {folder} {rule}, or choose another --name")
    return name_in_use(folder.name, str(folder))


def name_in_use(name: str, where: str) -> ValueError:
    """Returns the error for a requested `name` that is taken already, at `where`."""
    return ValueError(
        f"name = {name!r}: {where} exists already and is left as it is; choose another --name, or, if nothing trains "
        f"there any more, go on with `triaccel resume {name}`"
    )


def write_atomically(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically: the file holds either the old text or all of the new."""
    partial = partial_path(path)
    partial.write_text(text)
    partial.replace(path)


def write_value(path: Path, value: Any) -> None:
    """Writes a dataclass to `path` as JSON, atomically; `read_value` reads it."""
    write_atomically(path, json.dumps(encode(value), indent=2) + "\n")


def read_value(cls: type[T], path: Path, way_out: str) -> T:
    """Returns the `cls` that the file at `path` holds; if it cannot, raises a LogError that ends with `way_out`."""
    try:
        return decode(cls, json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError) as error:
        raise LogError(f"{path} cannot be read ({error}): {way_out}") from error
