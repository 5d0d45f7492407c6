"""Resolves the storage path, the tracking store and the names of results for a command."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from triaccel_ray.config import require
from triaccel_ray.records.events import LogError
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.service.storage.layout import EVENTS, TRIALS, is_set_of_runs
from triaccel_ray.service.storage.mirror import pull_all
from triaccel_ray.service.storage.storage_path import StoragePath, is_plain_name
from triaccel_ray.service.storage.store import Store
from triaccel_ray.service.tracking.tracker import Tracker, TrackingUnavailableError, sqlite_path
from triaccel_ray.trainables.registry import suggestion


def tracking_uri_of(where: Locations) -> str:
    """Returns the tracking store's URI: the one given, else MLFLOW_TRACKING_URI, else a file in the storage folder.

    Raises:
        ValueError: the store is of another kind, or its URI holds a password.
        TrackingUnavailableError: none is given, and the storage is a URI.
    """
    storage, named = where.storage_path, named_store(where.tracking_uri)
    if named is None and storage.uri is not None:
        raise TrackingUnavailableError(
            f"tracking uri = None: with storage path {str(storage)!r} there is no folder for the SQLite file that is "
            "the default; give --tracking-uri http://HOST:PORT of an MLflow server, or sqlite:////FOLDER/mlflow.db of "
            "this machine"
        )
    return named or f"sqlite:///{storage.folder / 'mlflow.db'}"


def named_store(given: str | None) -> str | None:
    """Returns the URI of the tracking store given, else that of MLFLOW_TRACKING_URI; None if neither is set.

    Raises:
        ValueError: the store is of a kind that is not supported, or its URI holds a password, which would be shown.
    """
    name, uri = "tracking uri", given
    if uri is None:
        name = "MLFLOW_TRACKING_URI"
        uri = os.environ.get(name, "").strip() or None
    if uri is None:
        return None
    path, shown = sqlite_path(uri), without_passwords(uri)
    is_supported = uri.startswith(("http://", "https://")) or path is not None
    rule = "must be http://HOST:PORT of a server or sqlite:///FILE; leave it out for mlflow.db in the storage folder"
    require(is_supported, name, shown, rule)
    rule = "must not hold a password, for it is shown and stored; set MLFLOW_TRACKING_USERNAME and"
    require(shown == uri, name, shown, f"{rule} MLFLOW_TRACKING_PASSWORD, or use ~/.mlflow/credentials")
    return uri if path is None else f"sqlite:///{path}"


def tracker_of(where: Locations) -> Tracker:
    """Returns the tracker of `tracking_uri_of`, which raises; opens nothing."""
    storage, uri = where.storage_path, tracking_uri_of(where)
    home = storage.folder if storage.uri is None else Path(uri.removeprefix("sqlite:///")).absolute().parent
    return Tracker(uri, home / "artifacts")


def storage_of(where: Locations, *, writable: bool) -> StoragePath:
    """Returns the storage: a folder as an absolute path, as workers need it, or a store that answers.

    Raises:
        ValueError: it cannot be used, or is to be `writable` and is not.
    """
    place = where.storage_path
    if place.uri is not None:
        Store(place).check(writable=writable)
        return place
    if writable:
        require_storage(place.folder)
    return StoragePath(str(place.folder))


def require_storage(folder: Path, *, create: bool = False) -> None:
    """Raises ValueError unless the storage folder is writable, or could be created; `create` creates it."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    problem = "" if nearest.is_dir() else f"{nearest} is not a folder"
    if not problem and not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"no permission to write in {nearest}"
    if create and not problem:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = str(error.strerror)
    rule = f"cannot be used ({problem}); give --storage-path a folder that you may write"
    require(not problem, "storage path", str(folder), rule)


def new_name(given: str | None, *parts: str) -> str:
    """Returns the given name, checked by `checked_name`, or one made of `parts` and the time."""
    if given is not None:
        return checked_name(given)
    text = "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


_RESERVED = ("artifacts", "mlflow.db")
"""Names in the storage folder that are no runs."""


def checked_name(name: str) -> str:
    """Returns `name`; raises ValueError if file systems and MLflow would not treat it as the name of one folder."""
    rule = "must begin with a letter or digit and hold letters, digits, '.', '_' and '-' alone, 100 at most"
    require(is_plain_name(name), "name", name, rule)
    require(name not in _RESERVED, "name", name, "is where MLflow's records lie; choose another")
    return name


def require_experiment(experiment: str) -> None:
    """Raises ValueError unless MLflow accepts this name of an experiment."""
    rule = "must name an MLflow experiment in 1 to 200 printable characters; leave it out for the default"
    is_name = experiment.strip() != "" and experiment.isprintable() and len(experiment) <= 200
    require(is_name, "experiment", experiment, rule)


def find(name: str, where: Locations, *, writable: bool = False) -> StoragePath:
    """Returns the storage path of `name`: a path, also that of an event log, or a name in the storage folder.

    `SEARCH/trial-007` stands for `SEARCH/trials/trial-007`.

    From a remote store it first copies all but checkpoints and models.

    Raises:
        ValueError: nothing has this name, or the name is invalid.
    """
    if os.path.basename(name) == EVENTS and os.path.isfile(name):
        name = os.path.dirname(os.path.abspath(name))
    require("://" not in name, "name", name, "is a URI; the URI of a store is given as --storage-path, beside a name")
    if os.sep in name and os.path.isdir(name):
        place = StoragePath.of(Path(name).absolute())
    else:
        storage = storage_of(where, writable=writable)
        if os.sep not in name or storage.uri is not None:
            for part in name.split("/"):
                checked_name(part)
        place = storage / re.sub(r"^([^/]+)/(trial-\d+)$", rf"\1/{TRIALS}/\2", name.rstrip("/"))
        pull_all(place)
        if not os.path.isdir(place.folder):
            require(not os.path.isfile(name), "name", name, f"is a file: an event log must be called {EVENTS}")
            stored: list[str] = []
            with contextlib.suppress(OSError):  # such as a name that is too long
                stored = [(place.parent / log.parent.name).name for log in place.parent.folder.glob(f"*/{EVENTS}")]
            meant = suggestion(place.name, stored) or ";"
            raise LogError(f"name = {name!r}: there is no folder {place}{meant} names are the folders in {storage}")
        if not os.listdir(place.folder):
            raise LogError(
                f"name = {name!r}: {place.folder} is empty: a command has just begun there, or was lost before it "
                "trained; delete it then, and begin again"
            )
        rule = f"leads out of the storage folder {storage}; if you trust what is there, name it by its path"
        require(".." not in name.split("/"), "name", name, rule)
    return place


def find_run(name: str, where: Locations) -> Path:
    """Returns the folder of the single run called `name`.

    Raises:
        ValueError: as `find`; or `name` is a search or comparison, and the message names some of its runs.
    """
    folder = find(name, where).folder
    if is_set_of_runs(folder):
        logs = sorted(folder.glob(f"*/**/{EVENTS}"))
        names = ", ".join(str(path.parent.relative_to(folder.parent)) for path in logs[:3])
        raise LogError(f"name = {name!r}: holds many runs; name one of them, such as {names or 'none yet'}")
    return folder
