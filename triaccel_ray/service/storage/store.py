"""Copies whole files to and from an object store or remote file system, through pyarrow's file systems.

Each file has one writer, which uploads it; all others download it. A run writes to its training folder, on the machine
where it trains (`training_folder`). A command writes to its working copy, on the machine where it was started, and
downloads the logs of runs to it (`mirror`). A copy has the size and modification time of its original; files that agree
in both are not copied again.

A checkpoint counts the records of its log. Whoever downloads both must find at least as many in the log. So a log is
uploaded before its checkpoint, but opened after it, and downloaded after it. The trained model is uploaded before the
log and opened after it. So if a log says how the run ended, the model is in the store.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.records.durable import atomic_write
from triaccel_ray.service.failures import DiskFullError, StoreError, reporting_full_disk
from triaccel_ray.service.storage.layout import COMMAND_FILES, ERROR
from triaccel_ray.service.storage.storage_path import STORE_RULE, StoragePath

BLOCK_BYTES = 4 * 2**20
OBJECT_STORES = ("s3", "gcs", "abfs")
"""pyarrow's names of object stores, which have no folders and replace a file atomically when its stream closes."""

_PROBE = ".triaccel-write-test"
_WAY_OUT = (
    "see that bucket or folder exist, that this machine reaches them, and that its credentials (AWS_ACCESS_KEY_ID, "
    "~/.aws/credentials or your provider's) allow listing, reading and writing; or name a folder"
)


@dataclass(frozen=True)
class Stamp:
    """Size and modification time of a file, which identify its version."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Returns the stamp of a local file."""
        return cls(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Store:
    """The folder in a remote store that a storage path names; cheap to create, because connections are cached.

    An operation that fails raises StoreError, with the reason and what to do; a download for which this machine's disk
    has no room raises DiskFullError.
    """

    place: StoragePath

    def check(self, *, writable: bool) -> None:
        """Checks that the store can be used; with `writable`, creates the folder and writes a small test file."""
        with self._opened(must_exist=not writable) as (filesystem, folder):
            if writable and not _exists(filesystem, folder):
                filesystem.create_dir(folder, recursive=False)  # not its parents: a mount may be missing
        if writable:
            self.write(_PROBE, io.BytesIO())
            with contextlib.suppress(Exception):  # deleting need not be permitted: nothing else is deleted
                filesystem.delete_file(f"{folder}/{_PROBE}")

    def files(self, *, recursive: bool) -> dict[str, Stamp]:
        """Returns the stamps of the files in the folder, by relative path; the folder need not exist."""
        from pyarrow import fs

        with self._opened() as (filesystem, folder):
            infos = filesystem.get_file_info(fs.FileSelector(folder, recursive=recursive, allow_not_found=True))
            files = [info for info in infos if info.type is fs.FileType.File]
            return {info.path[len(folder) :].lstrip("/"): _stamp(info) for info in files}

    def read_text(self, name: str) -> str:
        """Returns the text of a small file."""
        with self._opened() as (filesystem, folder), filesystem.open_input_stream(f"{folder}/{name}") as source:
            return str(source.read().decode())

    def read(self, name: str, target: Path) -> None:
        """Downloads a file to `target`, which is replaced atomically."""
        with (
            self._opened() as (filesystem, folder),
            reporting_full_disk(target.parent),
            filesystem.open_input_stream(f"{folder}/{name}", compression=None) as source,
            atomic_write(target) as file,
        ):
            shutil.copyfileobj(source, file, BLOCK_BYTES)
        file.close()

    def write(self, name: str, source: BinaryIO, num_bytes: int = 0) -> Stamp:
        """Replaces the file `name` by the next `num_bytes` of `source`, and returns its new stamp.

        Readers see the old file or the new one. Object stores replace a file atomically; elsewhere it is written under
        another name and renamed. Only on HDFS the file is missing for a moment, between deletion and renaming.
        """
        with self._opened() as (filesystem, folder):
            path = target = f"{folder}/{name}"
            is_object_store = filesystem.type_name in OBJECT_STORES
            if not is_object_store:
                filesystem.create_dir(folder, recursive=True)
                target = f"{folder}/.{name}.partial"
            with filesystem.open_output_stream(target, compression=None) as stream:
                _copy(source, stream, num_bytes)
            if filesystem.type_name == "local":
                _date_uniquely(Path(target))
            if not is_object_store:
                filesystem.move(target, path)
            return _stamp(filesystem.get_file_info(path))

    def push(
        self,
        folder: Path,
        files: Sequence[str],
        remote: Mapping[str, Stamp],
        *,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Uploads those `files` of `folder`, in this order, that the store lacks or has in another version.

        `remote` lists the store's files. Nothing is deleted in a store: a traceback that is gone here becomes an
        empty file there. `before` is called once before the first upload, and not at all if there is none.
        """
        with contextlib.ExitStack() as open_files:
            changed: dict[str, tuple[BinaryIO, int]] = {}
            for file in reversed(files):  # a checkpoint first: the log then holds all records it counts
                try:
                    source = open_files.enter_context((folder / file).open("rb"))
                except FileNotFoundError:
                    if file == ERROR and file in remote and remote[file].size:
                        changed[file] = io.BytesIO(), 0
                    continue
                local = Stamp.of(os.fstat(source.fileno()))
                if local != remote.get(file):
                    changed[file] = source, local.size  # records appended from here on are uploaded later
            if changed:
                before()
            for file, (content, num_bytes) in reversed(changed.items()):
                stamp = self.write(file, content, num_bytes)
                if not isinstance(content, io.BytesIO):
                    os.utime(content.fileno(), ns=(stamp.mtime_ns, stamp.mtime_ns))

    def pull(self, folder: Path, files: Sequence[str], remote: Mapping[str, Stamp]) -> None:
        """Downloads those `files` that `folder` lacks or has in another version; an empty one deletes the local file.

        A command's file that is newer here is kept: the command may have been killed before it could upload it.
        """
        for file in reversed(files):
            path, stamp = folder / file, remote.get(file)
            if stamp is None:
                continue
            local = Stamp.of(path.stat()) if path.exists() else None
            if local == stamp:
                continue
            if local is not None and file in COMMAND_FILES and local.mtime_ns > stamp.mtime_ns:
                continue
            if stamp.size == 0:
                path.unlink(missing_ok=True)
                continue
            self.read(file, path)
            os.utime(path, ns=(stamp.mtime_ns, stamp.mtime_ns))

    @contextlib.contextmanager
    def _opened(self, *, must_exist: bool = True) -> Iterator[tuple[Any, str]]:
        """Yields the file system and the folder's path in it; turns errors of the body into StoreError.

        Without the storage's own folder it is an error: this must not be taken for empty, nor be created in place of a
        missing mount.
        """
        uri = self.place.uri
        assert uri is not None
        filesystem, root = _open(uri)
        with _explained(uri, _WAY_OUT):
            if must_exist and not _exists(filesystem, root):
                raise FileNotFoundError(f"there is no {root}")
            yield filesystem, f"{root}/{self.place.name}".rstrip("/")


def _exists(filesystem: Any, root: str) -> bool:
    """Returns whether the folder exists; object stores have no folders, and `_open` has checked the bucket."""
    from pyarrow import fs

    return filesystem.type_name in OBJECT_STORES or filesystem.get_file_info(root).type is not fs.FileType.NotFound


@functools.cache
def _open(uri: str) -> tuple[Any, str]:
    """Returns the file system, and the path in it without a trailing slash."""
    from pyarrow import fs

    with _explained(uri, STORE_RULE):
        filesystem, path = fs.FileSystem.from_uri(_in_one_request(uri))
        path = path.rstrip("/")
        if not path:
            raise ValueError("names no folder")
    if filesystem.type_name in OBJECT_STORES:
        with _explained(uri, _WAY_OUT):
            bucket = path.partition("/")[0]
            if filesystem.get_file_info(bucket).type is fs.FileType.NotFound:
                raise FileNotFoundError(f"there is no bucket {bucket!r}")
    return filesystem, path


@contextlib.contextmanager
def _explained(uri: str, way_out: str) -> Iterator[None]:
    """Turns any exception into a StoreError that ends with `way_out`, unless this machine's disk is full."""
    try:
        yield
    except (StoreError, DiskFullError):
        raise
    except Exception as error:  # each file system, fsspec's included, raises errors of its own
        raise StoreError(f"storage path = {uri!r}: {first_line(error)[:300]}; {way_out}") from error


def _in_one_request(uri: str) -> str:
    """Returns the URI with the option that writes small files to S3 in one request; a multipart upload takes three."""
    if not uri.startswith("s3://") or "allow_delayed_open=" in uri:
        return uri
    return f"{uri}{'&' if '?' in uri else '?'}allow_delayed_open=true"


def _copy(source: BinaryIO, stream: Any, num_bytes: int) -> None:
    while num_bytes:
        block = source.read(min(BLOCK_BYTES, num_bytes))
        if not block:
            raise OSError(f"the file was cut while it was copied: {num_bytes} bytes are missing")
        stream.write(block)
        num_bytes -= len(block)


def _date_uniquely(path: Path) -> None:
    """Dates a file up to a millisecond back, so that no other file of the same size has its stamp.

    A kernel's times advance in steps of milliseconds: what is written twice within one would look unchanged.
    """
    mtime_ns = path.stat().st_mtime_ns - 1 - time.time_ns() % 10**6
    os.utime(path, ns=(mtime_ns, mtime_ns))


def _stamp(info: Any) -> Stamp:
    return Stamp(info.size, info.mtime_ns or 0)
