"""A search's samples in the object store of a real Ray."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from tests.build import blobs, same
from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec
from triaccel_ray.data.sources import DatasetSource, TensorSource
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.shared_data import NotSharedError, SharedSplits, put_splits, share_splits
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose, Recipe, Splits

FORTY_MIB = 40 * 2**20

pytestmark = pytest.mark.usefixtures("own_ray")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.bfloat16, torch.float64])
def test_tensors_of_every_type_and_shape(dtype: torch.dtype) -> None:
    source = TensorSource(torch.randint(0, 2, (6, 4, 3)).to(dtype).transpose(1, 2), torch.arange(6))
    arrived: Any = ray.get(put_splits(Splits(train=source, held_out=source))).train
    assert same([arrived.inputs, arrived.targets], [source.inputs, source.targets])
    assert (type(arrived), arrived.inputs.dtype) == (TensorSource, dtype)


def test_samples_that_share_a_storage_with_others_travel_alone() -> None:
    everything = torch.full((1000, 256), 7, dtype=torch.uint8)
    everything[500:] = torch.tensor(list(b"test-sample-test"), dtype=torch.uint8).repeat(16)
    source = TensorSource(everything[:500], torch.arange(500))
    reference = put_splits(Splits(train=source, held_out=source))
    whole = pickle.dumps(ray.get(reference), protocol=5)
    assert b"test-sample" not in whole
    assert len(whole) < 300_000


def resident_growth(shared: list[SharedSplits]) -> tuple[int, int, bool]:
    """Growth of the resident set when the samples arrive and when they are read, and whether it is shared memory."""
    process = psutil.Process()
    torch.zeros(1, dtype=torch.uint8).sum(dtype=torch.int64)  # what loads at the first such operation
    before = process.memory_info()
    splits = ray.get(shared[0])
    arrived = process.memory_info()
    total = int(splits.train.inputs.sum(dtype=torch.int64))  # type: ignore[attr-defined]
    after = process.memory_info()
    assert total == 0
    private = (arrived.rss - arrived.shared) - (before.rss - before.shared)
    return arrived.rss - before.rss, after.rss - arrived.rss, private < FORTY_MIB // 2


def test_trials_map_the_samples_and_touch_them_before_anything_is_measured() -> None:
    inputs = torch.zeros(FORTY_MIB, dtype=torch.uint8).view(-1, 1024)
    source = TensorSource(inputs, torch.zeros(len(inputs), dtype=torch.uint8))
    shared = [put_splits(Splits(train=source, held_out=source))]  # Ray itself would get a bare reference
    arriving, reading, is_shared = ray.get(ray.remote(max_calls=1)(resident_growth).remote(shared))
    assert is_shared
    # All of them or none would be forty; the process itself grows by some MiB, now more, now less.
    assert arriving > 0.5 * FORTY_MIB
    assert reading < 0.5 * FORTY_MIB


class Unpicklable(TensorSource):
    def __init__(self) -> None:
        super().__init__(*blobs(4))
        self.generator = (index for index in range(3))


@pytest.mark.parametrize(
    ("make", "needle"),
    [
        (lambda: DatasetSource(torch.utils.data.TensorDataset(*blobs(4))), "train is a DatasetSource"),
        (lambda: TensorSource(torch.zeros(4, 2, device="meta"), torch.zeros(4)), "on meta: only dense ones on the CPU"),
        (Unpicklable, "something in it cannot be pickled"),
    ],
)
def test_what_cannot_be_shared_says_why(make: Callable[[], Any], needle: str) -> None:
    with pytest.raises(NotSharedError, match=needle):
        put_splits(Splits(train=make(), held_out=TensorSource(*blobs(4))))


def test_files_that_are_not_here_and_test_samples_are_not_shared(tmp_path: Path) -> None:
    with pytest.raises(NotSharedError, match=r"not on this machine: .*nowhere"):
        share_splits(own_spec("cifar10-resnet18", data_dir=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match=r"purpose = 'final': only a search's samples"):
        share_splits(own_spec("digits", purpose=Purpose.FINAL))


class Drawing(Digits):
    """Reading the samples draws from the global generator."""

    def data(self, purpose: Purpose) -> Splits:
        torch.rand(3)
        return super().data(purpose)


def test_a_run_does_not_depend_on_who_read_the_samples(tmp_path: Path) -> None:
    spec = replace(own_spec("tests.service.runs.test_shared_data:Drawing"), recipe=Recipe(epochs=1))
    shared = share_splits(spec)
    read, arrived = ([each.train, each.held_out] for each in (Digits().data(Purpose.SEARCH), ray.get(shared)))
    assert same(*([(each.inputs, each.targets) for each in found] for found in (read, arrived)))
    assert sum(map(len, arrived)) == 1797 - 359  # none of the test samples
    trained(local_run(spec, StoragePath.of(tmp_path / "read")))
    trained(local_run(spec, StoragePath.of(tmp_path / "shared"), shared))
    losses = [read_run(tmp_path / name).epochs[0].train_loss for name in ("read", "shared")]
    assert losses[0] == losses[1]
