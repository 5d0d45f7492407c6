import functools
import hashlib
import http.server
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets

from tests.build import Trap
from triaccel_ray.trainables.cifar_files import HOMEPAGE, read_cifar

KINDS: dict[Any, Any] = {10: datasets.CIFAR10, 100: datasets.CIFAR100}
NOBODY = "http://127.0.0.1:9/archive.tar.gz"


def _write_binary(path: Path, num_records: int, label_bytes: int, marker: int) -> None:
    """Writes records whose class is their index modulo 10, whose planes hold `marker`, `marker` + 1, `marker` + 2."""
    records = np.zeros((num_records, label_bytes + 3072), dtype=np.uint8)
    records[:, label_bytes - 1] = np.arange(num_records) % 10
    records[:, label_bytes:] = np.repeat(np.arange(marker, marker + 3, dtype=np.uint8), 1024)
    if label_bytes == 2:
        records[:, 0] = 19  # the coarse class, which must not be taken for the fine one
    path.parent.mkdir(exist_ok=True)
    records.tofile(path)


def test_the_binary_version_is_read_in_order_from_the_folder_and_from_its_parent(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    for number in range(1, 6):
        _write_binary(folder / f"data_batch_{number}.bin", 10_000, 1, 10 * number)
    assert len(read_cifar(10, tmp_path, with_test=False)) == 1
    with pytest.raises(FileNotFoundError, match=rf"\n  {folder}: test_batch.bin\n"):
        read_cifar(10, tmp_path, with_test=True)
    _write_binary(folder / "test_batch.bin", 10_000, 1, 100)
    assert len(read_cifar(10, folder, with_test=True)) == 2
    train, test = read_cifar(10, folder.rename(tmp_path / "renamed"), with_test=True)
    assert (train[0].shape, train[0].dtype) == ((50_000, 3, 32, 32), torch.uint8)
    assert train[0][::10_000, :, 0, 0].tolist() == [[10 * n, 10 * n + 1, 10 * n + 2] for n in range(1, 6)]
    assert torch.equal(train[1], torch.arange(50_000) % 10)
    assert (test[0].shape, test[1].shape, test[1].dtype) == ((10_000, 3, 32, 32), (10_000,), torch.int64)
    assert test[0][-1, :, -1, -1].tolist() == [100, 101, 102]


def test_the_binary_version_of_cifar100_gives_the_fine_classes(tmp_path: Path) -> None:
    _write_binary(tmp_path / "cifar-100-binary" / "train.bin", 50_000, 2, 0)
    ((images, labels),) = read_cifar(100, tmp_path, with_test=False)
    assert len(images) == 50_000
    assert torch.equal(labels, torch.arange(50_000) % 10)


def test_a_binary_file_of_the_wrong_size_or_with_a_class_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for number in range(1, 6):
        _write_binary(tmp_path / f"data_batch_{number}.bin", 9_999, 1, 0)
    path = tmp_path / "data_batch_1.bin"
    with pytest.raises(ValueError, match=rf"{path} has 30726927 bytes: must have 30730000, 10000 records of 3073"):
        read_cifar(10, tmp_path, with_test=False)
    np.full((10_000, 3073), 10, dtype=np.uint8).tofile(path)
    with pytest.raises(ValueError, match=r"holds class 10: classes of CIFAR-10 must lie in \[0, 9\]"):
        read_cifar(10, tmp_path, with_test=False)


@pytest.mark.parametrize("num_classes", KINDS)
def test_a_pickle_that_is_not_the_published_one_is_refused_and_never_opened(num_classes: Any, tmp_path: Path) -> None:
    folder = tmp_path / KINDS[num_classes].base_folder
    folder.mkdir()
    names = [name for name, _ in KINDS[num_classes].train_list]
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(FileNotFoundError, match=f"Missing or damaged in each place:\n  {folder}: {', '.join(names)}\n"):
        read_cifar(num_classes, tmp_path, with_test=False)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((folder / names[0]).read_bytes())
    assert (tmp_path / "sprung").exists()  # the trap works


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it so
        pass


class _Python2Pickler(pickle.Pickler):
    """Writes dtypes with the integer arguments that numpy wrote under Python 2."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), (3, "|", None, None, None, -1, -1, 0)
        return NotImplemented


def _entry(path: Path, content: dict[str, Any]) -> tuple[str, str]:
    """Writes a file as the published ones; returns its name and checksum."""
    with path.open("wb") as file:
        _Python2Pickler(file, protocol=2).dump(content)
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields the number of classes of a data set whose small archive a server on this machine gives out."""
    kind, folder, root = KINDS[request.param], tmp_path / "made", tmp_path / "served"
    folder.mkdir()
    root.mkdir()
    pixels = np.arange(20 * 3072, dtype=np.uint32).astype(np.uint8).reshape(20, 3072)
    labels = {"labels": list(range(20))} if request.param == 10 else {"fine_labels": list(range(20))}
    content = {"data": pixels, "coarse_labels": [0] * 20, "batch_label": "x", **labels}
    monkeypatch.setattr(kind, "train_list", [_entry(folder / name, content) for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [_entry(folder / name, content) for name, _ in kind.test_list])
    meta = _entry(folder / kind.meta["filename"], {kind.meta["key"]: ["a"]})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": meta[1]})
    with tarfile.open(root / kind.filename, "w:gz") as tar:
        tar.add(folder, kind.base_folder)
    monkeypatch.setattr(kind, "tgz_md5", hashlib.md5((root / kind.filename).read_bytes()).hexdigest())
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        monkeypatch.setattr(kind, "url", f"http://127.0.0.1:{server.server_port}/{kind.filename}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield request.param
        server.shutdown()
        thread.join()


def test_an_empty_folder_is_filled_once_and_read_again(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several that start together."""
    data_dir, kind = tmp_path / "data", KINDS[served]
    data_dir.mkdir()
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(read_cifar(served, data_dir, with_test=True))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(kind, "url", NOBODY)
    results.append(read_cifar(served, data_dir / kind.base_folder, with_test=True))
    expected = torch.arange(20 * 3072).to(torch.uint8).reshape(20, 3, 32, 32)
    assert len(results) == 5
    for (images, labels), (test_images, test_labels) in results:
        assert torch.equal(images, expected.repeat(len(kind.train_list), 1, 1, 1))
        assert torch.equal(test_images, expected)
        assert labels.tolist() == [*range(20)] * len(kind.train_list)
        assert test_labels.tolist() == [*range(20)]
    assert [path.name for path in data_dir.iterdir() if path.is_dir()] == [kind.base_folder]


def test_the_default_is_a_cache_whose_incomplete_files_are_replaced(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "triaccel" / "data" / KINDS[served].base_folder
    for _ in range(2):
        assert len(read_cifar(served, None, with_test=False)) == 1
        (folder / KINDS[served].test_list[0][0]).write_text("damaged")
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")  # relative, hence ignored
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    read_cifar(served, None, with_test=False)
    assert (tmp_path / "home" / ".cache" / "triaccel" / "data" / folder.name).is_dir()


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("url", NOBODY, "Connection refused"),
        ("tgz_md5", "0" * 32, f"has the md5 checksum .*: must have {'0' * 32}"),
        ("url", "{}x", "HTTPError: HTTP Error 404"),
    ],
)
def test_a_failed_download_names_the_files_the_source_and_the_option_and_can_be_tried_again(
    served: Any, attribute: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, data_dir = KINDS[served], tmp_path / "data"
    data_dir.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(kind, attribute, value.format(kind.url))
        with pytest.raises(FileNotFoundError, match=message) as error:
            read_cifar(served, data_dir, with_test=True)
        assert all(part in str(error.value) for part in (f"CIFAR-{served}", kind.url, HOMEPAGE, "--data-dir"))
    for place, suffix in (
        (kind.base_folder, ""),
        ({10: "cifar-10-batches-bin", 100: "cifar-100-binary"}[served], ".bin"),
    ):
        names = ", ".join(f"{name}{suffix}" for name, _ in kind.train_list + kind.test_list)
        assert f"{data_dir / place}: {names}" in str(error.value)
    assert len(read_cifar(served, data_dir, with_test=False)) == 1


def test_nothing_is_downloaded_beside_a_users_files_nor_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent is not an existing folder(.|\n)*data_batch_1.bin"):
        read_cifar(10, tmp_path / "absent", with_test=False)
    (tmp_path / "data_batch_1.bin").touch()
    with pytest.raises(FileNotFoundError, match="is not empty, so nothing was downloaded") as error:
        read_cifar(10, tmp_path, with_test=False)
    assert f"{tmp_path}: data_batch_2.bin, data_batch_3.bin, data_batch_4.bin, data_batch_5.bin\n" in str(error.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["data_batch_1.bin"]
