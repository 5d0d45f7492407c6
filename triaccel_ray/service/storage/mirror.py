"""Working copies of what a store holds: what is taken from it, what is brought to it, and in which order.

A folder's files come in parts, each written by one process at a time, which holds the part's lock on its machine.
Beside them stands what store and copy held when they were last the same. If the store's files have changed since, the
run went on somewhere else, and the copy becomes what the store holds; if not, the copy is newer, and is brought there.

A checkpoint counts records of its log. So that whoever takes both finds at least as many in the log, a log is brought
to the store before the checkpoint, but opened after it, and taken from the store after the checkpoint. The trained
model is brought before the log and opened after it: a log that says how the run ended has the model beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from triaccel_ray.records.codec import decode
from triaccel_ray.service.storage.layout import (
    CHECKPOINT,
    DAMAGED,
    ERROR,
    EVENTS,
    MODEL,
    PREVIOUS,
    REPLACED,
    SETTINGS,
    SPEC,
    name_in_use,
    require_new,
    write_value,
)
from triaccel_ray.service.storage.storage_path import StoragePath, is_plain_name
from triaccel_ray.service.storage.store import Stamp, Store


@dataclass(frozen=True, kw_only=True)
class Part:
    """Files of a folder that one process writes."""

    name: str
    files: tuple[str, ...]
    """In the order in which they are brought to the store. Everything else stays on its machine."""
    bound: tuple[str, ...] = ()
    """Files that fit the others of their own run alone: once those come from the store, only the store's will do."""
    passing: tuple[str, ...] = ()
    """Files that may be deleted again; an empty one stands for that in the store, where nothing is deleted."""


LOG = (SPEC, ERROR, DAMAGED, REPLACED, EVENTS)
"""What is needed to look at a run, not to go on with it; the log last, which says what the others hold."""
RUN = Part(name="run", files=(MODEL, *LOG, CHECKPOINT), bound=(MODEL, CHECKPOINT, PREVIOUS), passing=(ERROR,))
"""Written where a run is trained; of a search or comparison, its own log, written by the command."""
COMMAND = Part(
    name="command",
    files=(
        *("search.json", "comparison.json", "prepared.json", "choices.json", "trials.jsonl", "mlflow.json"),
        *(SETTINGS, "found.json", "comparison.md", "report.html"),
    ),
)
"""Written by the command that was typed: what was asked for, found, suggested, recorded and reported."""


@dataclass(frozen=True)
class _Local:
    """What tells one content of a local file from another."""

    inode: int
    size: int
    mtime_ns: int


_NONE = _Local(0, 0, 0)
"""There is no file."""


@dataclass(frozen=True, kw_only=True)
class _Same:
    """File and copy, when they were last the same."""

    local: _Local
    remote: Stamp


@dataclass(frozen=True, kw_only=True)
class _Known:
    """Content of the file that stands beside a part."""

    files: Mapping[str, _Same] = field(default_factory=dict)


@dataclass(frozen=True)
class Mirror:
    """A part of one folder's working copy, and what it is a copy of. The caller holds the lock."""

    place: StoragePath
    part: Part

    @property
    def folder(self) -> Path:
        """The working copy."""
        return self.place.folder

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """Holds the part's lock; yields whether it was free in time."""
        lock = self.lock()
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def lock(self) -> FileLock:
        """Returns the lock that whoever touches the files holds: given back by the system if its process is lost."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / f".mirror-{self.part.name}.lock", thread_local=False)

    def has_changed(self, files: Sequence[str], remote: Mapping[str, Stamp]) -> bool:
        """Returns whether the store has any of `files`, and not all as they were when file and copy were the same."""
        known = self._known().files
        pairs = [(remote.get(file), known[file].remote if file in known else None) for file in files]
        return any(there for there, _ in pairs) and any(there != then for there, then in pairs)

    def pull(self, files: Sequence[str], remote: Mapping[str, Stamp] | None = None) -> bool:
        """Makes `files` what the store holds if that has changed, and returns whether it has.

        Args:
            files: names, all or some of the part's.
            remote: what the store's folder holds; asked for when None.

        Raises:
            StoreError: the store cannot be reached.
        """
        remote = self._store.files(self.place.name, recursive=False) if remote is None else remote
        if not self.has_changed(files, remote):
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        known = dict(self._known().files)
        for file in sorted(files, key=lambda file: file not in self.part.bound):  # a checkpoint first
            path = self.folder / file
            if file in self.part.passing and file in remote and not remote[file].size:
                path.unlink(missing_ok=True)
                known[file] = _Same(local=_NONE, remote=remote[file])
                self._keep(known)
            elif file in remote and not _is_same(path, remote[file], known.get(file)):
                self._store.read(f"{self.place.name}/{file}", path)
                known[file] = _Same(local=_of(path.stat()), remote=remote[file])
                self._keep(known)
        for file in self.part.bound:
            if not _is_same(self.folder / file, remote.get(file), known.get(file)):
                (self.folder / file).unlink(missing_ok=True)
        return True

    def push(self) -> bool:
        """Brings what has changed here to the store, and returns whether anything has.

        Raises:
            StoreError: the store cannot be reached; what it has got is noted.
        """
        known, changed = dict(self._known().files), False
        with contextlib.ExitStack() as open_files:
            opened = {}
            for file in reversed(self.part.files):  # a checkpoint first: what the log then holds is enough for it
                with contextlib.suppress(FileNotFoundError):
                    stream = open_files.enter_context((self.folder / file).open("rb"))
                    opened[file] = stream, _of(os.fstat(stream.fileno()))  # what a log gets from here on comes later
            gone = [file for file in self.part.passing if file in known and file not in opened]
            opened |= {file: (open_files.enter_context(open(os.devnull, "rb")), _NONE) for file in gone}
            for file in (file for file in self.part.files if file in opened):
                stream, here = opened[file]
                if file in known and known[file].local == here:
                    continue
                remote = self._store.write(f"{self.place.name}/{file}", stream, here.size)
                known[file] = _Same(local=here, remote=remote)
                self._keep(known)
                changed = True
        return changed

    @property
    def _store(self) -> Store:
        assert self.place.uri is not None
        return Store(self.place.uri)

    @property
    def _note(self) -> Path:
        return self.folder / f".mirror-{self.part.name}.json"

    def _known(self) -> _Known:
        try:
            return decode(_Known, json.loads(self._note.read_text()))
        except (OSError, ValueError):  # none yet, or torn: the store's files then count as changed
            return _Known()

    def _keep(self, files: Mapping[str, _Same]) -> None:
        write_value(self._note, _Known(files=files))


def pull_logs(place: StoragePath, *, but: Sequence[StoragePath] = ()) -> None:
    """Takes the logs of all runs at and below `place` that have changed in the store; not those of `but`.

    A run that is trained on this machine is left alone: nothing is newer than its own log.

    Raises:
        StoreError: the store cannot be reached.
    """
    for folder, stamps in _folders(place):
        if folder not in but and EVENTS in stamps:
            _pull(Mirror(folder, RUN), LOG, stamps)


def pull_all(place: StoragePath) -> None:
    """Takes everything at and below `place` but checkpoints and models, unless a command works on it here.

    Raises:
        StoreError: the store cannot be reached.
    """
    if place.uri is None:
        return
    for folder, stamps in _folders(place):
        if any(file in stamps for file in COMMAND.files):
            with Mirror(place, RUN).locked(0.0) as is_ours:
                if is_ours:
                    _pull(Mirror(folder, COMMAND), COMMAND.files, stamps)
        if EVENTS in stamps or SPEC in stamps:
            _pull(Mirror(folder, RUN), LOG, stamps)


def push_commands(place: StoragePath) -> None:
    """Brings what a command has written at and below `place` to the store.

    Raises:
        StoreError: the store cannot be reached.
    """
    if place.uri is None:
        return
    for folder in _copied_folders(place):
        mirror = Mirror(folder, COMMAND)
        with mirror.locked(10.0) as is_ours:
            if is_ours:
                mirror.push()


def sync_runs(place: StoragePath, *, but: Sequence[StoragePath] = ()) -> None:
    """Takes the logs at and below `place` that have changed in the store, and brings all other runs there; not `but`.

    For a time at which none of them is trained.

    Raises:
        StoreError: the store cannot be reached.
    """
    remote = dict(_folders(place))
    for folder in {**remote, **dict.fromkeys(_copied_folders(place))}:
        mirror, stamps = Mirror(folder, RUN), remote.get(folder, {})
        if folder in but or not (EVENTS in stamps or (folder.folder / EVENTS).exists()):
            continue
        with mirror.locked(0.0) as is_ours:
            if is_ours and mirror.has_changed(RUN.files, stamps):
                mirror.pull(LOG, stamps)
            elif is_ours:
                mirror.push()


def require_unused(place: StoragePath) -> None:
    """Returns if nothing is at `place` yet, neither here nor in the store.

    Raises:
        ValueError: something is; it is left as it is.
        StoreError: the store cannot be reached.
    """
    if place.uri is None:
        require_new(place.folder)
    elif _copied_folders(place) or Store(place.uri).files(place.name, recursive=True):
        raise name_in_use(place.base_name, str(place))


def _folders(place: StoragePath) -> list[tuple[StoragePath, dict[str, Stamp]]]:
    """Returns the folders at and below `place` in the store, and the files in each."""
    assert place.uri is not None
    found: dict[str, dict[str, Stamp]] = {}
    for path, stamp in Store(place.uri).files(place.name, recursive=True).items():
        folder, _, file = path.rpartition("/")
        if all(map(is_plain_name, folder.split("/") if folder else [])):  # a key may be ../../anything
            found.setdefault(folder, {})[file] = stamp
    return [(place / folder if folder else place, stamps) for folder, stamps in sorted(found.items())]


def _copied_folders(place: StoragePath) -> list[StoragePath]:
    """Returns the folders at and below `place` on this machine that hold files of a part."""
    root = place.folder
    names = {*RUN.files, *COMMAND.files}
    found = {path.parent for path in root.rglob("*.json*") if path.name in names}
    relative = sorted(path.relative_to(root).as_posix() for path in found)
    return [place if name == "." else place / name for name in relative]


def _pull(mirror: Mirror, files: Sequence[str], stamps: Mapping[str, Stamp]) -> None:
    with mirror.locked(0.0) as is_ours:
        if is_ours:
            mirror.pull(files, stamps)


def _of(status: os.stat_result) -> _Local:
    return _Local(status.st_ino, status.st_size, status.st_mtime_ns)


def _is_same(path: Path, remote: Stamp | None, same: _Same | None) -> bool:
    return same is not None and path.exists() and same == _Same(local=_of(path.stat()), remote=remote or Stamp(-1, -1))
