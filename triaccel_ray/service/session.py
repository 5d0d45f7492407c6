"""Where a command keeps what it does: the storage folder, the tracking store, and names in both."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from triaccel_ray.config import require
from triaccel_ray.service.console import err
from triaccel_ray.service.storage.storage_path import StoragePath, is_plain_name
from triaccel_ray.service.tracking.tracking import Tracker, TrackingUnavailableError


def tracking_uri_of(storage: StoragePath, given: str | None) -> str:
    """Returns the tracking store's URI: the one given, else a SQLite file in the storage folder.

    Raises:
        ValueError: an empty one is given.
        TrackingUnavailableError: none is given, and the storage is no folder.
    """
    rule = "must be http://HOST:PORT of a server or sqlite:///FILE; leave it out for mlflow.db in the storage folder"
    require(given is None or given.strip() != "", "tracking uri", given, rule)
    if given is None and storage.uri is not None:
        raise TrackingUnavailableError(
            f"tracking uri = None: with storage path {str(storage)!r} there is no folder for the SQLite file that is "
            "the default; give --tracking-uri http://HOST:PORT of an MLflow server, or sqlite:////FOLDER/mlflow.db of "
            "this machine"
        )
    return given or f"sqlite:///{storage.folder / 'mlflow.db'}"


def open_tracker(storage: StoragePath, tracking_uri: str | None) -> Tracker:
    """Returns the tracker, its store reachable and in existence.

    Raises:
        ValueError: the storage folder cannot be written.
        TrackingUnavailableError: the store cannot be reached.
    """
    if tracking_uri is None and storage.uri is None:
        require_storage(storage.folder, create=True)  # the store lies there
    tracker = tracker_of(storage, tracking_uri)
    if tracker.display_uri != tracker.uri:
        err.print(
            "--tracking-uri holds a password, which `ps` shows to others while a command starts: leave it out, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            style="yellow",
            soft_wrap=True,
        )
    tracker.prepare()
    return tracker


def tracker_of(storage: StoragePath, tracking_uri: str | None) -> Tracker:
    """Returns the tracker of the store given, else of the SQLite file in the storage folder; opens nothing.

    Raises:
        TrackingUnavailableError: none is given, and the storage is no folder.
    """
    uri = tracking_uri_of(storage, tracking_uri)
    home = storage.folder if storage.uri is None else Path(uri.removeprefix("sqlite:///")).absolute().parent
    return Tracker(uri, home / "artifacts")


def require_storage(folder: Path, *, create: bool = False) -> None:
    """Returns if the storage folder can be written, or made where it is missing; with `create` it is there then.

    Raises:
        ValueError: it cannot.
    """
    try:
        nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"you may not write in {nearest}")
        if create:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be used ({error.strerror}); give --storage-path a folder that you may write"
        raise ValueError(f"storage path = {str(folder)!r}: {rule}") from error


def new_name(given: str | None, *parts: str) -> str:
    """Returns the name given, or one made of `parts` and the time.

    Raises:
        ValueError: the name given could not be a folder's of its own.
    """
    if given is not None:
        return checked_name(given)
    text = "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def checked_name(name: str) -> str:
    """Returns `name` if it stays inside the storage folder.

    Raises:
        ValueError: it does not, or holds characters that file systems and MLflow disagree on.
    """
    rule = "must begin with a letter or digit and hold letters, digits, '.', '_' and '-' alone, 100 at most"
    require(is_plain_name(name), "name", name, rule)
    return name


def require_experiment(experiment: str | None) -> None:
    """Returns if MLflow takes this for the name of an experiment, or none is given.

    Raises:
        ValueError: it is empty, too long, or holds what cannot be printed.
    """
    rule = "must name an MLflow experiment in 1 to 200 printable characters; leave it out for the default"
    if experiment is None:
        return
    is_name = bool(experiment.strip()) and experiment.isprintable() and len(experiment) <= 200
    require(is_name, "experiment", experiment, rule)


def is_inside(path: Path, folder: Path) -> bool:
    """Returns whether `path` lies in `folder`, all links followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def links_out_of(folder: Path) -> Iterator[Path]:
    """Yields the links in `folder` through which something outside it would be read, written or sent away."""
    yield from (path for path in folder.rglob("*") if path.is_symlink() and not is_inside(path, folder))
