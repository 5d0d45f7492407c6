import dataclasses
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.build import Trap
from triaccel_ray.trainables.cifar_files import CifarFolder, CifarSet, Layout, cifar_set, find_complete

CIFAR10, CIFAR100 = cifar_set(10), cifar_set(100)


def _write_binary(path: Path, num_records: int, label_bytes: int, marker: int) -> None:
    """Writes records whose class is their index modulo 10, whose planes hold `marker`, `marker` + 1, `marker` + 2."""
    records = np.zeros((num_records, label_bytes + 3072), dtype=np.uint8)
    records[:, label_bytes - 1] = np.arange(num_records) % 10
    records[:, label_bytes:] = np.repeat(np.arange(marker, marker + 3, dtype=np.uint8), 1024)
    if label_bytes == 2:
        records[:, 0] = 19  # the coarse class, which must not be taken for the fine one
    records.tofile(path)


def test_the_binary_version_is_read_in_order_from_the_folder_and_from_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number in range(1, 6):
        _write_binary(folder / f"data_batch_{number}.bin", 10_000, 1, 10 * number)
    _write_binary(folder / "test_batch.bin", 10_000, 1, 100)
    for data_dir in (tmp_path, folder):
        found = find_complete(CIFAR10, data_dir, with_test=True)
        assert found is not None
        assert (found.path, found.layout) == (folder, CIFAR10.binary)
    (folder / "test_batch.bin").rename(tmp_path / "kept")
    assert find_complete(CIFAR10, tmp_path, with_test=True) is None
    found = find_complete(CIFAR10, tmp_path, with_test=False)
    assert found is not None
    assert found.missing(with_test=True) == ("test_batch.bin",)
    (tmp_path / "kept").rename(folder / "test_batch.bin")
    renamed = folder.rename(tmp_path / "renamed")
    found = find_complete(CIFAR10, renamed, with_test=True)
    assert found is not None
    assert found.path == renamed
    images, labels = found.read_train()
    assert (images.shape, images.dtype) == ((50_000, 3, 32, 32), torch.uint8)
    assert images[::10_000, :, 0, 0].tolist() == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 6)]
    assert torch.equal(labels, torch.arange(50_000) % 10)
    images, labels = found.read_test()
    assert (images.shape, labels.shape, labels.dtype) == ((10_000, 3, 32, 32), (10_000,), torch.int64)
    assert images[-1, :, -1, -1].tolist() == [100, 101, 102]


def test_the_binary_version_of_cifar100_gives_the_fine_classes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    _write_binary(folder / "train.bin", 50_000, 2, 0)
    found = find_complete(CIFAR100, tmp_path, with_test=False)
    assert found is not None
    images, labels = found.read_train()
    assert len(images) == 50_000
    assert torch.equal(labels, torch.arange(50_000) % 10)


def test_a_binary_file_of_the_wrong_size_or_with_a_class_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_batch.bin"
    _write_binary(path, 9_999, 1, 0)
    folder = CifarFolder(cifar=CIFAR10, layout=CIFAR10.binary, path=tmp_path)
    with pytest.raises(ValueError, match=rf"{path} has 30726927 bytes: must have 30730000, 10000 records of 3073"):
        folder.read_test()
    np.full((10_000, 3073), 10, dtype=np.uint8).tofile(tmp_path / "test_batch.bin")
    with pytest.raises(ValueError, match=r"holds class 10: classes of CIFAR-10 must lie in \[0, 9\]"):
        folder.read_test()


@pytest.mark.parametrize("cifar", [CIFAR10, CIFAR100])
def test_a_pickle_that_is_not_the_published_one_is_refused_and_never_opened(cifar: CifarSet, tmp_path: Path) -> None:
    folder = tmp_path / cifar.python.folder
    folder.mkdir()
    for name in cifar.python.train:
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    found = find_complete(cifar, tmp_path, with_test=False)
    assert found is not None
    with pytest.raises(ValueError, match=rf"{cifar.python.train[0]} has the md5 checksum .*: the published file has"):
        found.read_train()
    assert not (tmp_path / "sprung").exists()
    pickle.loads((folder / cifar.python.train[0]).read_bytes())
    assert (tmp_path / "sprung").exists()  # the trap works


class _Python2Pickler(pickle.Pickler):
    """Writes dtypes with the integer arguments that numpy wrote under Python 2."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), (3, "|", None, None, None, -1, -1, 0)
        return NotImplemented


@pytest.mark.parametrize("cifar", [CIFAR10, CIFAR100])
def test_the_python_version_is_read_from_files_with_the_published_checksum(cifar: CifarSet, tmp_path: Path) -> None:
    pixels = np.arange(20 * 3072, dtype=np.uint32).astype(np.uint8).reshape(20, 3072)
    entry = {"data": pixels, "coarse_labels": [0] * 20, cifar.label_key: list(range(20)), "batch_label": "x"}
    with (tmp_path / "only").open("wb") as file:
        _Python2Pickler(file, protocol=2).dump(entry)
    md5 = {"only": hashlib.md5((tmp_path / "only").read_bytes()).hexdigest()}
    layout = Layout(folder="any", train=("only", "only"), test="only", md5=md5)
    folder = CifarFolder(cifar=dataclasses.replace(cifar, python=layout), layout=layout, path=tmp_path)
    images, labels = folder.read_train()
    assert torch.equal(images[:20], torch.from_numpy(pixels.reshape(20, 3, 32, 32)))
    assert labels.tolist() == [*range(20), *range(20)]
    assert len(folder.read_test()[0]) == 20
