"""Finds CIFAR's files in the user's folder, or in a cache that is filled by one download."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

from triaccel_ray.trainables.cifar_files import HOMEPAGE, CifarFolder, CifarSet, candidate_folders, find_complete

_logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 10.0
"""Time without data from the server after which a download is aborted."""
_OWN_PREFIX = ".triaccel-"
"""Prefix of the lock and the staging folder; a data folder with only these counts as empty."""


def default_data_dir() -> Path:
    """Returns the per-user cache, `$XDG_CACHE_HOME/triaccel/data` or `~/.cache/triaccel/data`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG base directory specification: a relative path there is invalid and ignored
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "triaccel" / "data"


def find_or_download(cifar: CifarSet, data_dir: Path | None, *, with_test: bool) -> CifarFolder:
    """Returns a folder with every needed file; downloads if no `data_dir` is given or the given one is empty.

    Raises:
        FileNotFoundError: files are missing; the message lists what was looked for, and where to get it.
    """
    root = default_data_dir() if data_dir is None else data_dir.expanduser()
    if found := find_complete(cifar, root, with_test=with_test):
        return found
    if data_dir is not None and not root.is_dir():
        reason = f"{root} is not an existing folder"
    elif data_dir is not None and any(not entry.name.startswith(_OWN_PREFIX) for entry in root.iterdir()):
        if found := find_complete(cifar, root, with_test=with_test):  # another process has just put it there
            return found
        reason = f"{root} is not empty, so nothing was downloaded into it"
    else:
        try:
            download(cifar, root)
        except (OSError, http.client.HTTPException, tarfile.TarError, ValueError) as error:
            reason = f"downloading {cifar.url} failed: {type(error).__name__}: {error}"
        else:
            if found := find_complete(cifar, root, with_test=with_test):
                return found
            reason = f"{cifar.url} does not hold all of them"
    raise FileNotFoundError(_explanation(cifar, root, reason, with_test=with_test))


def download(cifar: CifarSet, data_dir: Path) -> None:
    """Downloads the Python version's files to `data_dir`, once even if several processes call this at the same time.

    Raises:
        OSError: no connection, no space, no permission.
        ValueError: the archive is not the published one.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(data_dir / f"{_OWN_PREFIX}download.lock"):
        goal = CifarFolder(cifar=cifar, layout=cifar.python, path=data_dir / cifar.python.folder)
        if not goal.missing(with_test=True):
            return
        _logger.warning("%s is not in %s: downloading %s", cifar.title, data_dir, cifar.url)
        with TemporaryDirectory(prefix=_OWN_PREFIX, dir=data_dir) as staging:
            archive = Path(staging) / "archive"
            _fetch(cifar.url, cifar.url_md5, archive)
            _unpack(archive, goal, Path(staging))


def _fetch(url: str, md5: str, target: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response, target.open("wb") as file:
        while chunk := response.read(1 << 20):
            digest.update(chunk)
            file.write(chunk)
    if digest.hexdigest() != md5:
        raise ValueError(f"the archive received has the md5 checksum {digest.hexdigest()}: must have {md5}")


def _unpack(archive: Path, goal: CifarFolder, staging: Path) -> None:
    """Extracts the needed files of `archive` to `goal`: atomically as a folder, or one by one if that exists.

    File names come from this module, so that no path inside an archive decides where a file is written.
    """
    wanted = {f"{goal.layout.folder}/{name}": name for name in goal.needed(with_test=True)}
    unpacked = staging / "unpacked"
    unpacked.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            name = wanted.get(member.name)
            content = tar.extractfile(member) if name is not None and member.isfile() else None
            if name is not None and content is not None:
                with content, (unpacked / name).open("wb") as file:
                    shutil.copyfileobj(content, file)
    if not goal.path.exists():
        unpacked.rename(goal.path)
        return
    for file_path in unpacked.iterdir():
        file_path.replace(goal.path / file_path.name)


def _explanation(cifar: CifarSet, root: Path, reason: str, *, with_test: bool) -> str:
    lines = [f"{cifar.title}: no complete set of files, and {reason}. Looked for all files of one of these lines:"]
    for place in candidate_folders(cifar, root):
        missing, names = place.missing(with_test), place.needed(with_test)
        if place.path == root and missing == names and root.name != place.layout.folder:
            continue  # searched as well, but nothing suggests that the user meant it
        state = "none found" if missing == names else f"not found: {', '.join(missing)}"
        lines.append(f"  {place.path}: {', '.join(names)} ({state})")
    lines.append(f"Get them from {HOMEPAGE} (Python or binary version), unpack them, and name the folder: --data-dir")
    return "\n".join(lines)
