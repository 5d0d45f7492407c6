from pathlib import Path

import numpy as np
import pytest
import torch

from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.trainables.registry import load_task
from triaccel_ray.trainables.task import Purpose


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with CIFAR-10's binary training files, images of noise, and no test file."""
    folder = tmp_path_factory.mktemp("cifar") / "cifar-10-batches-bin"
    folder.mkdir()
    noise = np.random.default_rng(0)
    for number in range(1, 6):
        records = noise.integers(0, 256, (10_000, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(10_000) % 10
        records.tofile(folder / f"data_batch_{number}.bin")
    return folder.parent


def _keys(source: DataSource) -> set[bytes]:
    """Returns the first pixels of every image, which in noise are as good as its identity."""
    assert isinstance(source, TensorSource)
    return {image.tobytes() for image in source.inputs[:, :, 0, :8].contiguous().numpy()}


def test_a_search_holds_out_500_training_images_a_class_and_needs_no_test_file(data_dir: Path) -> None:
    splits = load_task("cifar10-resnet18", data_dir).data(Purpose.SEARCH)
    assert (len(splits.train), len(splits.held_out)) == (45_000, 5_000)
    assert isinstance(splits.held_out, TensorSource)
    assert torch.bincount(splits.held_out.targets).tolist() == [500] * 10
    assert len(_keys(splits.train) | _keys(splits.held_out)) == 50_000
    again = load_task("cifar10-efficientnet-b0", data_dir).data(Purpose.SEARCH)
    assert _keys(again.held_out) == _keys(splits.held_out)
    assert len(splits.held_out.views(torch.rand(2, 3, 32, 32))) == 1


def test_a_final_run_trains_on_everything_and_is_judged_by_the_test_file(data_dir: Path) -> None:
    small, images = load_task("cifar10-resnet18", data_dir), torch.rand(2, 3, 32, 32)
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-bin: test_batch.bin\n"):
        small.data(Purpose.FINAL)
    with pytest.raises(FileNotFoundError, match="CIFAR-100: no complete set of files"):
        load_task("cifar100-resnet18", data_dir).data(Purpose.SEARCH)  # CIFAR-10's files are not its own
    path = data_dir / "cifar-10-batches-bin" / "test_batch.bin"
    np.zeros((10_000, 3073), dtype=np.uint8).tofile(path)
    splits, others = small.data(Purpose.FINAL), load_task("cifar10-efficientnet-b0", data_dir).data(Purpose.FINAL)
    path.unlink()
    assert (len(splits.train), len(splits.held_out)) == (50_000, 10_000)
    assert isinstance(splits.held_out, TensorSource)
    assert splits.held_out.inputs.max() == 0
    # Those of the small network are judged with their mirror images too.
    views = [len(source.views(images)) for source in (splits.held_out, splits.train, others.held_out)]
    assert views == [2, 1, 1]


def test_batches_are_prepared_and_augmented_for_training_alone(data_dir: Path) -> None:
    indices = torch.arange(4)
    for name, edge in (("cifar10-resnet18", 32), ("cifar10-efficientnet-b0", 224)):
        splits = load_task(name, data_dir).data(Purpose.SEARCH)
        plain, targets = splits.train.batch(indices, None)
        augmented, _ = splits.train.batch(indices, torch.Generator().manual_seed(0))
        assert plain.shape == augmented.shape == (4, 3, edge, edge)
        assert plain.dtype == torch.float32
        assert plain.is_contiguous(memory_format=torch.channels_last)
        assert targets.dtype == torch.int64
        assert not torch.equal(plain, augmented)
        splits.train.set_epoch(1)
        assert not torch.equal(augmented, splits.train.batch(indices, torch.Generator().manual_seed(0))[0])
        held_out, _ = splits.held_out.batch(indices, torch.Generator().manual_seed(0))
        assert torch.equal(held_out, splits.held_out.batch(indices, None)[0])
