"""Copies of what a store holds: each file has one writer, who brings it there as a whole; all others take it.

A run is written in its training folder, on the machine where it trains (`training_folder`). A command writes into its
working copy, on the machine where it was typed, and takes the logs of runs there (`mirror`). A copy has the size
and time of its original, and what has the same is not copied again. What reads or writes a store raises StoreError
while that is out of reach.

A checkpoint counts records of its log. So that whoever takes both finds at least as many in the log, a log is brought
to the store before the checkpoint, but opened after it, and taken from the store after the checkpoint. The trained
model is brought before the log and opened after it: a log that says how the run ended has the model beside it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from triaccel_ray.service.failures import StoreError, needing_room
from triaccel_ray.service.storage.layout import CHECKPOINT, DAMAGED, ERROR, EVENTS, MODEL, REPLACED, SETTINGS, SPEC
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store

LOG = (SPEC, ERROR, DAMAGED, REPLACED, EVENTS)
"""What is needed to look at a run, not to go on with it; the log last, which says what the others hold."""
RUN = (MODEL, *LOG, CHECKPOINT)
"""What a run writes, in the order in which it is brought to the store. Everything else stays on its machine."""
PAGES = (SETTINGS, "found.json", "comparison.md", "report.html")
WRITER = ".writer"
"""Names the training folder that a run goes on in."""
SETS = ("search.json", "comparison.json")
COMMAND = (*SETS, "prepared.json", "choices.json", "trials.jsonl", "mlflow.json", *PAGES)
"""What a command writes: what was asked for, found, suggested, recorded and reported; of one of SETS also its log."""


def push(
    place: StoragePath,
    folder: Path,
    files: Sequence[str],
    there: Mapping[str, Stamp],
    *,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Brings those files of `folder` to the store, in this order, of which it has another version, or none.

    `there` is what the store has at `place`. A traceback that is gone is empty there: nothing is deleted in a store.
    `before` is called once before the first file is brought, and not at all where there is none.
    """
    with contextlib.ExitStack() as open_files:
        news: dict[str, tuple[BinaryIO, int]] = {}
        for file in reversed(files):  # a checkpoint first: what the log then holds is enough for it
            try:
                source = open_files.enter_context((folder / file).open("rb"))
            except FileNotFoundError:
                if file == ERROR and file in there and there[file].size:
                    news[file] = io.BytesIO(), 0
                continue
            here = Stamp.of(os.fstat(source.fileno()))
            if here != there.get(file):
                news[file] = source, here.size  # what a log gets from here on comes later
        if news:
            before()
        for file, (content, num_bytes) in reversed(news.items()):
            stamp = store_of(place).write(f"{place.name}/{file}", content, num_bytes)
            if not isinstance(content, io.BytesIO):
                os.utime(content.fileno(), ns=(stamp.mtime_ns, stamp.mtime_ns))


def pull(place: StoragePath, folder: Path, files: Sequence[str], there: Mapping[str, Stamp]) -> None:
    """Takes those files from the store of which `folder` has another version, or none; an empty one stands for none.

    What a command has written here stays where it is newer: the command was killed, perhaps, before it could bring it.

    Raises:
        DiskFullError: there is no room for them.
    """
    for file in reversed(files):
        path, stamp = folder / file, there.get(file)
        if stamp is None:
            continue
        here = Stamp.of(path.stat()) if path.exists() else None
        if here == stamp or (here is not None and file in COMMAND and here.mtime_ns > stamp.mtime_ns):
            continue
        if stamp.size == 0:
            path.unlink(missing_ok=True)
            continue
        with needing_room(folder):
            folder.mkdir(parents=True, exist_ok=True)
            store_of(place).read(f"{place.name}/{file}", path)
        os.utime(path, ns=(stamp.mtime_ns, stamp.mtime_ns))


def store_of(place: StoragePath) -> Store:
    """Returns the store of a place that is in one."""
    assert place.uri is not None
    return Store(place.uri)


@contextlib.contextmanager
def saying_where(place: StoragePath, folder: Path) -> Iterator[None]:
    """Has a StoreError say that everything is in `folder`, and how to bring it to the store."""
    try:
        yield
    except StoreError as error:
        whole = place.name.partition("/")[0]  # of a search's trial, the search
        words = shlex.join(["triaccel", "resume", whole, "--storage-path", place.storage])
        raise StoreError(
            f"not everything of {place} is in the store ({error}). Nothing is lost: it is in {folder} on this "
            f"machine, and `{words}` typed here brings it there once the store answers"
        ) from error
