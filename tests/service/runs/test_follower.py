"""Runs trained by several ranks, here processes that form groups without Ray: results, checkpoints, the log."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.worker_pool import WorkerPool
from tests.service.runs.several import CONTROL, NUM_SAMPLES, samples_of_epochs, several_spec, told
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint
from triaccel_ray.service.runs.group import Follower
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT, EVENTS, MODEL, PREVIOUS, REPLACED, SPEC


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    made = WorkerPool(3)
    yield made
    made.close()


def trained(rank: int, spec: RunSpec, folder: Path, num_epochs: int, attempt: int = 0) -> int:
    """Trains some epochs on each rank, a checkpoint after each, and finishes after the last one of the run."""
    os.environ["MASTER_PORT"] = str(attempt)
    worker = (Follower if rank else Worker)(spec, folder)
    resumed_at = worker.resume()
    for _ in range(num_epochs):
        worker.advance()
        worker.checkpoint()
    if worker.finished:
        worker.finish()
    worker.close()
    return resumed_at


def assert_equal(folder: Path, other: Path) -> None:
    """Checks that two runs have made the same decisions, and that no loss or variance differs by more than 1e-4."""
    (plans, figures), (other_plans, other_figures) = told(folder), told(other)
    assert plans == other_plans
    assert figures == pytest.approx(other_figures, rel=1e-4, abs=1e-9)


@pytest.fixture(scope="module")
def whole(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("one") / "run"
    workers.run(1, trained, several_spec(gpus="1"), folder, 3)
    return folder


def test_several_ranks_train_as_one_does_with_the_same_batch(workers: WorkerPool, tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    spec = several_spec(gpus="3", data_dir=str(tmp_path), keep="best")
    assert workers.run(3, trained, spec, folder, 3) == [0, 0, 0]
    assert_equal(folder, whole)
    run = read_run(folder)
    assert (run.status, run.interruptions) == ("finished", ())
    assert (run.start.parameters["gpus"], run.start.parameters["world_size"]) == ("3", 3)
    assert run.epochs[-1].joules is None
    assert samples_of_epochs(tmp_path) == {epoch: list(range(NUM_SAMPLES)) for epoch in range(3)}
    assert {path.name for path in folder.iterdir()} == {CHECKPOINT, PREVIOUS, EVENTS, MODEL, SPEC}


@pytest.mark.parametrize(
    ("first", "second", "cause", "shares_optimizer"),
    [
        (3, 2, "preempted", False),
        (3, 2, "preempted", True),
        (2, 3, "resized", True),
        (2, 1, "preempted", False),
        (1, 2, "resized", False),
    ],
)
def test_a_group_of_another_size_trains_on(
    workers: WorkerPool, tmp_path: Path, whole: Path, first: int, second: int, cause: str, shares_optimizer: bool
) -> None:
    control = replace(CONTROL, shard_optimizer=shares_optimizer)
    spec, folder = several_spec(gpus="1..3", data_dir=str(tmp_path), control=control), tmp_path / "run"
    workers.run(first, trained, spec, folder, 2, 1)
    assert workers.run(second, trained, spec, folder, 1, 2) == [2] * second
    assert_equal(folder, whole)
    assert samples_of_epochs(tmp_path) == {epoch: list(range(NUM_SAMPLES)) for epoch in range(3)}
    (found,) = read_run(folder).interruptions
    assert (found.cause, found.epoch, found.world_size_before, found.world_size) == (cause, 2, first, second)
    assert f"{first} -> {second} processes; goes on after epoch 2" in found.message
    assert 0 <= found.seconds_lost < 300


@pytest.mark.parametrize(
    ("torn", "epoch"), [((CHECKPOINT,), 1), ((CHECKPOINT, PREVIOUS), 0), ((), 1)], ids=["newest", "both", "other model"]
)
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_can_read_and_that_fits(
    workers: WorkerPool, tmp_path: Path, whole: Path, torn: tuple[str, ...], epoch: int
) -> None:
    spec, folder = several_spec(), tmp_path / "run"
    workers.run(2, trained, spec, folder, 2)
    for name in torn:
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    if not torn:
        state = load_checkpoint(folder / CHECKPOINT)
        state["loop"]["model"]["0.weight"] = torch.zeros(32, 8)
        save_checkpoint(folder / CHECKPOINT, state)
    assert workers.run(2, trained, spec, folder, 3 - epoch) == [epoch, epoch]
    assert_equal(folder, whole)
    assert (folder / REPLACED).exists() == (epoch == 0)
    assert torn or "does not fit its run" in read_run(folder).interruptions[0].message
