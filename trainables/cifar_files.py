"""Finds, downloads and reads CIFAR-10 and CIFAR-100: torchvision's files, or those of the binary version."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import shutil
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

_BINARY = {10: ("cifar-10-batches-bin", 1), 100: ("cifar-100-binary", 2)}
"""Number of classes -> folder of the binary version, and label bytes of a record, of which the last is the class."""
_NUM_TRAIN, _NUM_TEST = 50_000, 10_000
_IMAGE_SHAPE = (3, 32, 32)
_TIMEOUT_SECONDS = 10.0
"""Time without data from the server after which a download is aborted."""
_OWN_PREFIX = ".triaccel-"
"""Prefix of the lock and the staging folder; a data folder with only these counts as empty."""

_logger = logging.getLogger(__name__)

Samples = tuple[Tensor, Tensor]
"""Images, uint8 [n, 3, 32, 32], and their classes, int64 [n]."""


def read_cifar(num_classes: Literal[10, 100], data_dir: Path | None, *, with_test: bool) -> list[Samples]:
    """Returns the training samples, and the test samples if asked.

    They are in the folder of one version below `data_dir`, or in `data_dir` itself. torchvision's version is
    downloaded if no `data_dir` is given or the given one is empty.

    Raises:
        FileNotFoundError: files are missing, or not the published ones; the message names them and their source.
        ValueError: a file of the binary version is damaged.
    """
    files = _CifarFiles(num_classes, _cache() if data_dir is None else data_dir.expanduser(), with_test)
    reason = ""
    if data_dir is not None and not files.root.is_dir():
        reason = f"{files.root} is not an existing folder"
    elif data_dir is not None and any(not entry.name.startswith(_OWN_PREFIX) for entry in files.root.iterdir()):
        reason = f"{files.root} is not empty, so nothing was downloaded into it"
    found = files.read()  # after the look at the folder: another process may just have filled it
    if found is None and not reason:
        try:
            found = files.download()
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = f"downloading {files.kind.url} failed: {type(error).__name__}: {error}"
    if found is None:
        raise FileNotFoundError(files.explanation(reason))
    return found


def _cache() -> Path:
    """Returns the per-user cache, `$XDG_CACHE_HOME/triaccel/data` or `~/.cache/triaccel/data`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG base directory specification: a relative path there is invalid and ignored.
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "triaccel" / "data"


@dataclass(frozen=True)
class _CifarFiles:
    """Where the files of a data set may lie, in either version."""

    num_classes: Literal[10, 100]
    root: Path
    with_test: bool

    @property
    def kind(self) -> Any:
        """Torchvision's class, which has the names of the files, their checksums and their address."""
        from torchvision import datasets  # here: it takes seconds, and other tasks do not need it

        return {10: datasets.CIFAR10, 100: datasets.CIFAR100}[self.num_classes]

    def _places(self) -> Iterator[tuple[Path, bool, list[str]]]:
        """Yields where files may lie, whether those of the binary version, and the names of missing or damaged ones."""
        from torchvision.datasets.utils import check_integrity

        kind = self.kind
        pickles = kind.train_list + kind.test_list * self.with_test
        binary = [(f"{name}.bin", None) for name, _ in pickles]
        for folder, files in ((kind.base_folder, pickles), (_BINARY[self.num_classes][0], binary)):
            for place in [self.root] if self.root.name == folder else [self.root / folder, self.root]:
                yield place, files is binary, [name for name, md5 in files if not check_integrity(place / name, md5)]

    def read(self) -> list[Samples] | None:
        """Returns the samples in the first place that has all files; None if there is none."""
        for place, is_binary, missing in self._places():
            if not missing:
                return self._read_binary(place) if is_binary else self._read_torchvisions(place)
        return None

    def _read_torchvisions(self, place: Path) -> list[Samples]:
        own = {  # names of classes are not needed, and the files have been checked
            "base_folder": place.name,
            "_load_meta": lambda self: None,
            "_check_integrity": lambda self: True,
        }
        data_set = type(self.kind.__name__, (self.kind,), own)
        with warnings.catch_warnings():
            # numpy 2.4.0 to 2.4.4 object to how Python 2 wrote dtypes into these files
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            parts = [data_set(place.parent, train=is_train) for is_train in (True, False)[: 1 + self.with_test]]
        images = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in parts)
        return [(each, torch.tensor(part.targets)) for each, part in zip(images, parts, strict=True)]

    def _read_binary(self, place: Path) -> list[Samples]:
        names = [f"{name}.bin" for name, _ in self.kind.train_list]
        parts = [_read_records(place / name, self.num_classes, _NUM_TRAIN // len(names)) for name in names]
        images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        tests = [f"{name}.bin" for name, _ in self.kind.test_list * self.with_test]
        return [(images, labels), *(_read_records(place / name, self.num_classes, _NUM_TEST) for name in tests)]

    def download(self) -> list[Samples] | None:
        """Returns the samples; downloads them once, even if several processes call this at the same time.

        Raises:
            OSError: no connection, no space, no permission.
            ValueError: the archive is not the published one.
        """
        from torchvision.datasets.utils import extract_archive

        kind, root = self.kind, self.root
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{_OWN_PREFIX}download.lock"):
            if found := self.read():
                return found
            _logger.warning("%s is not in %s: downloading %s", self, root, kind.url)
            with TemporaryDirectory(prefix=_OWN_PREFIX, dir=root) as staging:
                archive = Path(staging) / kind.filename
                with urllib.request.urlopen(kind.url, timeout=_TIMEOUT_SECONDS) as response, archive.open("wb") as file:
                    shutil.copyfileobj(response, file)
                with archive.open("rb") as file:
                    md5 = hashlib.file_digest(file, "md5").hexdigest()
                if md5 != kind.tgz_md5:
                    raise ValueError(f"the archive received has the md5 checksum {md5}: must have {kind.tgz_md5}")
                extract_archive(str(archive), staging)
                shutil.rmtree(root / kind.base_folder, ignore_errors=True)  # an incomplete one in the cache
                (Path(staging) / kind.base_folder).rename(root / kind.base_folder)
        return self.read()

    def __str__(self) -> str:
        return f"CIFAR-{self.num_classes}"

    def explanation(self, reason: str) -> str:
        """Returns the message about files that were not found because of `reason`."""
        places = [f"  {place}: {', '.join(missing)}" for place, _, missing in self._places()]
        return "\n".join(
            [
                f"{self}: no complete set of files, and {reason}. Missing or damaged in each place:",
                *places,
                f"Get them from {HOMEPAGE} (Python or binary version), unpack them, and name the folder: --data-dir",
            ]
        )


def _read_records(path: Path, num_classes: int, num_records: int) -> Samples:
    """Returns images and classes of records made of label bytes and one byte per pixel, red, green, blue planes."""
    num_label_bytes = _BINARY[num_classes][1]
    record_bytes = num_label_bytes + int(np.prod(_IMAGE_SHAPE))
    if (found := path.stat().st_size) != num_records * record_bytes:
        raise ValueError(
            f"{path} has {found} bytes: must have {num_records * record_bytes}, {num_records} records of "
            f"{record_bytes}; get the binary version of CIFAR-{num_classes} again from {HOMEPAGE}"
        )
    records = torch.from_numpy(np.fromfile(path, dtype=np.uint8).reshape(num_records, record_bytes))
    labels = records[:, num_label_bytes - 1].long()
    if labels.max() >= num_classes:
        raise ValueError(
            f"{path} holds class {labels.max()}: classes of CIFAR-{num_classes} must lie in [0, {num_classes - 1}]; "
            f"get its binary version again from {HOMEPAGE}"
        )
    return records[:, num_label_bytes:].reshape(-1, *_IMAGE_SHAPE), labels
