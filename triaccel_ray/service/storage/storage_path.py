"""Storage locations: a folder, or a store that has a URI and a working copy on every machine."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

from triaccel_ray.config import require

STORE_RULE: Final = (
    "must be a folder, or a URI that pyarrow's file systems know, such as s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, "
    "hdfs://HOST:PORT/FOLDER or file:///FOLDER"
)
SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""URI schemes that pyarrow's file systems support."""
_SECRET_NAME = re.compile(r"[?&;][^=&;]*(secret|password|passwd|token|signature|sas|key)[^=&;]*=", re.IGNORECASE)


@dataclass(frozen=True)
class StoragePath:
    """A folder below the storage path, as a value that means the same on every machine.

    Runs need a POSIX folder: they append to logs, truncate them, and replace files atomically. A store cannot do this,
    so each machine works on local copies, which `mirror` keeps in sync.
    """

    storage: str
    """A folder, or the URI of a store: s3://BUCKET/FOLDER, gs://, abfs://, hdfs://, file:///, ..."""
    name: str = ""
    """Folder below `storage`, its parts separated by slashes."""

    def __post_init__(self) -> None:
        rule = "must name a folder or the URI of a store; leave it out for the folder triaccel-runs"
        require(self.storage.strip() != "", "storage path", self.storage, rule)
        if self.uri is None:
            scheme, _, rest = self.storage.partition(":/")
            is_mistyped = self.storage != scheme and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme) is not None
            rule = f"must be a folder, or a URI such as {scheme}://{rest}"
            require(not is_mistyped, "storage path", self.storage, rule)
            expanded(self.storage)
        else:
            _require_no_secret(self.uri)
            require(self.uri.partition("://")[0] in SCHEMES, "storage path", self.uri, STORE_RULE)

    @classmethod
    def of(cls, folder: Path) -> StoragePath:
        """Returns the storage path of a local folder."""
        return cls(str(folder.absolute().parent), folder.name)

    @property
    def uri(self) -> str | None:
        """The store's URI; None if the storage is a folder."""
        return self.storage if "://" in self.storage else None

    @property
    def folder(self) -> Path:
        """The absolute path on this machine: of the folder, or of its working copy."""
        root = expanded(self.storage).absolute() if self.uri is None else working_copy(self.uri)
        return root / self.name

    @property
    def training_folder(self) -> Path:
        """The folder in which this run trains on this machine; with a store, not the commands' working copy."""
        return self.folder if self.uri is None else working_copy(self.uri) / ".training" / self.name

    @property
    def base_name(self) -> str:
        """The last part of the name."""
        return self.folder.name

    @property
    def parent(self) -> StoragePath:
        """The storage path one level up."""
        return StoragePath(self.storage, self.name.rpartition("/")[0])

    def __truediv__(self, relative: str | PurePath) -> StoragePath:
        return StoragePath(self.storage, str(PurePosixPath(self.name, relative)))

    def __str__(self) -> str:
        if self.uri is None:
            return str(self.folder)
        return f"{self.uri.partition('?')[0].rstrip('/')}/{self.name}".rstrip("/")


def expanded(path: str | Path) -> Path:
    """Returns the path with ~ expanded to the home directory; raises ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"path = {str(path)!r}: names a user whom this machine does not know") from None


def is_plain_name(name: str) -> bool:
    """Returns whether `name` is a valid name of a single folder on every file system and in every store."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) is not None


def working_copy(uri: str) -> Path:
    """Returns this user's local working copy of the store at `uri`, below XDG_CACHE_HOME or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    readable = re.sub(r"[^A-Za-z0-9._]+", "-", uri.partition("?")[0])[:60].strip("-.")
    return cache / "triaccel-ray" / f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:10]}"


def _require_no_secret(uri: str) -> None:
    """Raises ValueError if the URI, which is shown and stored, holds a password or key; the message does not."""
    signed_in = re.search(r"://.*:.*@", uri, re.DOTALL) or (uri.startswith("s3") and "@" in uri)
    if signed_in or _SECRET_NAME.search(uri):
        shown = re.sub(r"://.*@", "://***@", uri, flags=re.DOTALL).partition("?")[0]
        raise ValueError(
            f"storage path = {shown!r}: must not hold a key or password, for it is shown, stored and handed to other "
            "machines; leave it out, and have every machine find it in its environment (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or its credential files (~/.aws/credentials); an @ "
            "in a folder's name is written %40"
        )
