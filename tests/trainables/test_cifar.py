from __future__ import annotations

import hashlib
import pickle
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import datasets

from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.trainables.registry import load_task
from triaccel_ray.trainables.task import Purpose, Splits

NUM_A_FILE = 10_000


class Python2Pickler(pickle.Pickler):
    """Writes dtypes with the integer arguments that numpy wrote under Python 2."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.dtype):
            return np.dtype, (obj.str[1:], 0, 1), (3, "|", None, None, None, -1, -1, 0)
        return NotImplemented


def written(path: Path, entry: dict[str, Any]) -> tuple[str, str]:
    """Returns the name and the checksum of a file that holds `entry`, as the published ones do."""
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(entry)
    return path.name, hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the parent of a folder that torchvision takes for CIFAR-10's: noise in the colours' order, test in black.

    Beside it lies the archive, as after a download.
    """
    root, noise, kind = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0), datasets.CIFAR10
    folder = root / kind.base_folder
    folder.mkdir()
    labels = [index % 10 for index in range(NUM_A_FILE)]
    train = []
    for number in range(1, 6):
        images = noise.integers(0, 256, (NUM_A_FILE, 3072), dtype=np.uint8)
        images[:, :3072:1024] = number, 10 * number, 20 * number  # of each plane the first pixel
        train.append(written(folder / f"data_batch_{number}", {"data": images, "labels": labels}))
    test = [written(folder / "test_batch", {"data": np.zeros((NUM_A_FILE, 3072), np.uint8), "labels": labels})]
    meta = written(folder / "batches.meta", {"label_names": list("0123456789")})
    archive = root / kind.filename
    with tarfile.open(archive, "w:gz", compresslevel=0) as tar:
        tar.add(folder, kind.base_folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setattr(kind, "url", "http://127.0.0.1:9/archive.tar.gz")  # where nobody answers
        patch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        patch.setattr(kind, "train_list", train)
        patch.setattr(kind, "test_list", test)
        patch.setattr(kind, "meta", {**kind.meta, "md5": meta[1]})
        yield root


def _keys(source: DataSource) -> set[bytes]:
    """Returns some pixels of every image, which in noise are as good as its identity."""
    assert isinstance(source, TensorSource)
    return {image.tobytes() for image in source.inputs[:, :, 1, :8].contiguous().numpy()}


@pytest.fixture(scope="module")
def searches(published: Path) -> dict[int, Splits]:
    """Returns what a search trains on and is judged by, by the edge of the images in pixels."""
    folders = {32: ("cifar10-resnet18", published), 224: ("cifar10-efficientnet-b0", published / "cifar-10-batches-py")}
    return {edge: load_task(name, folder).data(Purpose.SEARCH) for edge, (name, folder) in folders.items()}


def test_a_search_holds_out_500_training_images_a_class_and_a_final_run_none(
    published: Path, searches: dict[int, Splits]
) -> None:
    search, other, images = searches[32], searches[224], torch.rand(2, 3, 32, 32)
    final = load_task("cifar10-resnet18", published).data(Purpose.FINAL)
    assert isinstance(search.held_out, TensorSource)
    assert torch.bincount(search.held_out.targets).tolist() == [500] * 10
    assert (len(search.train), len(_keys(search.train) | _keys(search.held_out))) == (45_000, 50_000)
    assert _keys(other.held_out) == _keys(search.held_out)
    assert isinstance(final.train, TensorSource)
    assert (final.train.inputs.shape, final.train.inputs.dtype) == ((50_000, 3, 32, 32), torch.uint8)
    first_pixels = final.train.inputs[::NUM_A_FILE, :, 0, 0].tolist()
    assert first_pixels == [[number, 10 * number, 20 * number] for number in range(1, 6)]
    assert torch.equal(final.train.targets, torch.arange(50_000) % 10)
    assert isinstance(final.held_out, TensorSource)
    assert (len(final.held_out), final.held_out.inputs.max()) == (10_000, 0)
    # Test images of the small network are judged with their mirror images too.
    judged = (final.held_out, final.train, search.held_out, other.held_out)
    assert [len(source.views(images)) for source in judged] == [2, 1, 1, 1]


def test_batches_are_prepared_and_augmented_for_training_alone(searches: dict[int, Splits]) -> None:
    indices = torch.arange(4)
    for edge, splits in searches.items():
        plain, _ = splits.train.batch(indices, None)
        augmented, _ = splits.train.batch(indices, torch.Generator().manual_seed(0))
        assert plain.shape == augmented.shape == (4, 3, edge, edge)
        assert not torch.equal(plain, augmented)
        splits.train.set_epoch(1)
        assert not torch.equal(augmented, splits.train.batch(indices, torch.Generator().manual_seed(0))[0])
        held_out, _ = splits.held_out.batch(indices, torch.Generator().manual_seed(0))
        assert torch.equal(held_out, splits.held_out.batch(indices, None)[0])


def test_processes_that_start_together_unpack_once_in_the_users_cache(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, archive = tmp_path / "triaccel" / "data" / "cifar-10-batches-py", datasets.CIFAR10.filename
    folder.parent.mkdir(parents=True)
    shutil.copy(published / archive, folder.parent)
    sizes = []
    threads = [
        threading.Thread(
            target=lambda: sizes.append(len(load_task("cifar10-resnet18", None).data(Purpose.FINAL).train))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [50_000] * 2
    assert {path.name for path in folder.iterdir()} == {path.name for path in (published / folder.name).iterdir()}


class Trap:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_other_files_are_never_opened_and_what_cannot_be_had_is_explained(published: Path, tmp_path: Path) -> None:
    shutil.copytree(published / "cifar-10-batches-py", tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    said = r"CIFAR-10: .*-py is not complete, and downloading http://127.* failed \(.*Connection refused.*--data-dir"
    with pytest.raises(FileNotFoundError, match=said):
        load_task("cifar10-resnet18", tmp_path).data(Purpose.SEARCH)
    assert not (tmp_path / "sprung").exists()
