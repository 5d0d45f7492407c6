"""What a name or a storage path on the command line means."""

from __future__ import annotations

import os
from pathlib import Path

from triaccel_ray.config import require
from triaccel_ray.records.events import LogError
from triaccel_ray.service.cli.options import Where
from triaccel_ray.service.compare.comparison import COMPARISON
from triaccel_ray.service.search.search import SEARCH
from triaccel_ray.service.session import checked_name, is_inside, links_out_of, require_storage, tracking_uri_of
from triaccel_ray.service.storage.layout import EVENTS, SPEC
from triaccel_ray.service.storage.mirror import pull_all
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store


def storage_of(where: Where) -> StoragePath:
    """Returns the storage for something new: an absolute path, for workers are elsewhere; or a store, and it answers.

    Raises:
        ValueError: the store cannot be used, or no tracking store is named beside it.
    """
    tracking_uri_of(where.storage_path, where.tracking_uri)  # what is written is recorded
    return _reached(where.storage_path, writable=True)


def _reached(place: StoragePath, *, writable: bool) -> StoragePath:
    if place.uri is None:
        if writable:
            require_storage(place.folder)
        return StoragePath(str(place.folder))
    Store(place.uri).check(writable=writable)
    return place


def find(name: str, where: Where, *, writable: bool = False) -> StoragePath:
    """Returns the storage path of `name`: a path, also of an event log, or a name in the storage folder.

    From a remote store it first copies all but checkpoints and models. No link leads out of the storage folder.

    Raises:
        ValueError: there is none, the name is none, or a link leads out of it.
    """
    if os.path.basename(name) == EVENTS and os.path.isfile(name):
        name = os.path.dirname(os.path.abspath(name))
    require("://" not in name, "name", name, "is a URI; the URI of a store is given as --storage-path, beside a name")
    if os.sep in name and os.path.isdir(name):
        place = StoragePath.of(Path(name).absolute())
    else:
        storage = _reached(where.storage_path, writable=writable)
        if os.sep not in name:
            checked_name(name)
        elif storage.uri is not None:
            for part in name.split("/"):
                checked_name(part)
        place = storage / name
        pull_all(place)
        if not os.path.isdir(place.folder):
            raise LogError(f"name = {name!r}: there is no folder {place}; names are the folders in {storage}")
        if not os.listdir(place.folder):
            raise LogError(
                f"name = {name!r}: {place.folder} is empty: a command has just begun there, or was lost before it "
                "trained; delete it then, and begin again"
            )
        rule = f"leads out of the storage folder {storage}; if you trust what is there, name it by its path"
        require(is_inside(place.folder, storage.folder), "name", name, rule)
    _require_no_link_out_of(place.folder)
    return place


def find_run(name: str, where: Where) -> Path:
    """Returns the folder of the single run that `name` means.

    Raises:
        ValueError: as `find`; or it is a search or comparison, and the message names a run in it.
    """
    folder = find(name, where).folder
    if (folder / SEARCH).exists() or (folder / COMPARISON).exists():
        logs = sorted(folder.glob(f"*/**/{EVENTS}"))
        names = ", ".join(str(path.parent.relative_to(folder.parent)) for path in logs[:3])
        raise LogError(f"name = {name!r}: holds many runs; name one of them, such as {names or 'none yet'}")
    return folder


def _require_no_link_out_of(folder: Path) -> None:
    """Returns if nothing is read through a link; in a folder that is none of ours nothing is read at all.

    Raises:
        LogError: a link leads out of the folder.
    """
    if not any(os.path.lexists(folder / name) for name in (SPEC, EVENTS, SEARCH, COMPARISON)):
        return
    for link in links_out_of(folder):
        raise LogError(
            f"{link} is a link that leads out of {folder}, to {os.path.realpath(link)}: no command follows or makes "
            "such links; name a copy of the folder without it"
        )
