"""The published files of CIFAR-10 and CIFAR-100: their names, where they are on this machine, and how to read them."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"

_NUM_TRAIN, _NUM_TEST = 50_000, 10_000
_IMAGE_SHAPE = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One of the two versions in which the files are published."""

    folder: str
    """Name of the folder in the published archive."""
    train: tuple[str, ...]
    """Files with training images, in order."""
    test: str
    """File with test images."""
    md5: Mapping[str, str] = field(default_factory=dict)
    """Published checksum of every file; empty for the binary version, where none are published."""


@dataclass(frozen=True, kw_only=True)
class CifarSet:
    """One of the two data sets."""

    title: str
    """Name as its authors write it."""
    num_classes: int
    label_bytes: int
    """Label bytes in front of every record of the binary version; the last of them is the class."""
    label_key: str
    """Key of the classes in the Python version."""
    python: Layout
    binary: Layout
    url: str
    """Archive of the Python version."""
    url_md5: str
    """Its checksum."""


@dataclass(frozen=True, kw_only=True)
class CifarFolder:
    """A folder that may hold the files of one layout."""

    cifar: CifarSet
    layout: Layout
    path: Path

    def needed(self, with_test: bool) -> tuple[str, ...]:
        """Returns the names of the files that hold the training images, and the test images if asked."""
        return (*self.layout.train, self.layout.test) if with_test else self.layout.train

    def missing(self, with_test: bool) -> tuple[str, ...]:
        """Returns the names of needed files that are not there."""
        return tuple(name for name in self.needed(with_test) if not (self.path / name).is_file())

    def read_train(self) -> tuple[Tensor, Tensor]:
        """Returns the training images, uint8 [50000, 3, 32, 32], and their classes, int64 [50000].

        Raises:
            ValueError: a file is not the published one.
        """
        return self._read(self.layout.train, _NUM_TRAIN)

    def read_test(self) -> tuple[Tensor, Tensor]:
        """Returns the test images, uint8 [10000, 3, 32, 32], and their classes, int64 [10000].

        Raises:
            ValueError: a file is not the published one.
        """
        return self._read((self.layout.test,), _NUM_TEST)

    def _read(self, names: tuple[str, ...], num_samples: int) -> tuple[Tensor, Tensor]:
        parts = []
        for name in names:
            if self.layout.md5:
                parts.append(_read_python(self.path / name, self.layout.md5[name], self.cifar.label_key))
            else:
                parts.append(_read_binary(self.path / name, num_samples // len(names), self.cifar))
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return torch.from_numpy(images), torch.from_numpy(labels)


def cifar_set(num_classes: Literal[10, 100]) -> CifarSet:
    """Returns the description of CIFAR-10 or CIFAR-100; file names, address and checksums are torchvision's."""
    from torchvision.datasets import CIFAR10, CIFAR100  # here: it takes seconds, and other tasks do not need it

    official: Any = {10: CIFAR10, 100: CIFAR100}[num_classes]
    train, test = tuple(name for name, _ in official.train_list), official.test_list[0][0]
    return CifarSet(
        title=f"CIFAR-{num_classes}",
        num_classes=num_classes,
        label_bytes={10: 1, 100: 2}[num_classes],
        label_key={10: "labels", 100: "fine_labels"}[num_classes],
        python=Layout(
            folder=official.base_folder, train=train, test=test, md5=dict(official.train_list + official.test_list)
        ),
        binary=Layout(
            folder={10: "cifar-10-batches-bin", 100: "cifar-100-binary"}[num_classes],
            train=tuple(f"{name}.bin" for name in train),
            test=f"{test}.bin",
        ),
        url=official.url,
        url_md5=official.tgz_md5,
    )


def candidate_folders(cifar: CifarSet, data_dir: Path) -> tuple[CifarFolder, ...]:
    """Returns where the files may lie: in the published folders under `data_dir`, or in `data_dir` itself."""
    return tuple(
        CifarFolder(cifar=cifar, layout=layout, path=path)
        for layout in (cifar.python, cifar.binary)
        for path in ([data_dir] if data_dir.name == layout.folder else [data_dir / layout.folder, data_dir])
    )


def find_complete(cifar: CifarSet, data_dir: Path, *, with_test: bool) -> CifarFolder | None:
    """Returns the first place that has every needed file, or None; opens none of them."""
    return next((place for place in candidate_folders(cifar, data_dir) if not place.missing(with_test)), None)


def _read_binary(path: Path, num_records: int, cifar: CifarSet) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns images and classes of records made of label bytes and one byte per pixel, red, green, blue planes."""
    record_bytes = cifar.label_bytes + _IMAGE_BYTES
    found, expected = path.stat().st_size, num_records * record_bytes
    if found != expected:
        raise ValueError(
            f"{path} has {found} bytes: must have {expected}, {num_records} records of {record_bytes}; get the binary "
            f"version of {cifar.title} again from {HOMEPAGE}"
        )
    records = np.fromfile(path, dtype=np.uint8).reshape(num_records, record_bytes)
    labels = records[:, cifar.label_bytes - 1].astype(np.int64)
    if labels.max() >= cifar.num_classes:
        raise ValueError(
            f"{path} holds class {labels.max()}: classes of {cifar.title} must lie in [0, {cifar.num_classes - 1}]; "
            f"get its binary version again from {HOMEPAGE}"
        )
    return records[:, cifar.label_bytes :].reshape(-1, *_IMAGE_SHAPE), labels


def _read_python(path: Path, md5: str, label_key: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns images and classes of a pickled dictionary, which is opened only if it is the published one.

    Unpickling can run any code in the file, so it takes exactly the bytes that were checked.
    """
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(
            f"{path} has the md5 checksum {found}: the published file has {md5}; not opened, because opening a pickle "
            f"runs what is in it; get the Python version again from {HOMEPAGE}"
        )
    with warnings.catch_warnings():
        # numpy 2.4.0 to 2.4.4 object to how Python 2 wrote dtypes into these files
        warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
        entry = pickle.loads(content, encoding="latin1")
    return entry["data"].reshape(-1, *_IMAGE_SHAPE), np.asarray(entry[label_key], dtype=np.int64)
