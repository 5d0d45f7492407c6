"""Runs that go on after they were lost, and what must not be loaded."""

import errno
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.build import same, values
from tests.service.own_task import own_spec
from tests.service.worker_factory import WorkerFactory, decided, last_of, records, train
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import FORMAT, CheckpointError, OtherFormatError, load_checkpoint, save_checkpoint
from triaccel_ray.records.events import End, Interruption, Tick, read_events
from triaccel_ray.service.failures import DiskFullError
from triaccel_ray.service.runs import record
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import CHECKPOINT, ERROR, EVENTS, PREVIOUS, REPLACED

PICTURES = ControlConfig(
    every_steps=2,
    revert_slowdowns=False,  # time differs from run to run
    # BF16 and FP32, on a CPU that emulates BF16, too
    precision=PrecisionConfig(tau_low=0.0, tau_high=2e-2, dwell_ticks=0, patience_ticks=1, allow_slow_precisions=True),
    curvature=CurvatureConfig(every_steps=4, num_samples=8),
    batch=BatchConfig(start=8, minimum=8, maximum=32, granularity=8, step_up=8, step_down=8),
)


@pytest.mark.parametrize("method", ["triaccel", "amp"])
def test_a_restored_run_equals_an_uninterrupted_one(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, method: str
) -> None:
    spec = own_spec(f"{module}:Pictures", method=method, control=PICTURES, seed=3)
    whole = train(worker_factory.start(spec, tmp_path / "whole"))
    expected, weights = whole.finish(), values(whole.loop.model)

    first = worker_factory.start(spec, tmp_path / "parts")
    first.advance()
    first.checkpoint()
    first.advance()  # lost: written after the checkpoint
    first.close()
    second = worker_factory.build(spec, tmp_path / "parts")
    assert second.resume() == 1
    results = train(second).finish()

    assert same(values(second.loop.model), weights)
    assert decided(tmp_path / "parts") == decided(tmp_path / "whole")
    ticks = [record for record in records(tmp_path / "whole") if isinstance(record, Tick)]
    plans = {(tick.decision.plan.batch_size, *tick.decision.plan.precision.values()) for tick in ticks}
    assert len(plans) >= 4 if method == "triaccel" else not ticks  # there was something to decide
    assert [results[name] for name in ("accuracy", "loss", "epochs")] == [
        expected[name] for name in ("accuracy", "loss", "epochs")
    ]


def lost(worker_factory: WorkerFactory, spec: RunSpec, folder: Path, *, epochs: int) -> None:
    """Trains that many epochs, a checkpoint after each, and no end."""
    worker = worker_factory.start(spec, folder)
    for _ in range(epochs):
        worker.advance()
        worker.checkpoint()
    worker.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("torn", "epoch"), [((), 2), ((CHECKPOINT,), 1), ((CHECKPOINT, PREVIOUS), 0)], ids=["none", "newest", "both"]
)
def test_a_torn_checkpoint_is_never_loaded(
    worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path, torn: tuple[str, ...], epoch: int
) -> None:
    train(worker_factory.start(spec, tmp_path / "whole"))
    folder = tmp_path / "torn"
    lost(worker_factory, spec, folder, epochs=2)
    for name in torn:
        cut(folder / name)
    (folder / f".{CHECKPOINT}.123.partial").write_bytes(b"half a checkpoint")
    before = (folder / EVENTS).read_bytes()
    worker = worker_factory.build(spec, folder)
    assert worker.resume() == epoch
    (told,) = (record for record in records(folder) if isinstance(record, Interruption))
    assert (told.cause, told.epoch) == ("preempted", epoch)
    assert told.message.count("is damaged") == len(torn)
    assert (REPLACED in told.message) == (folder / REPLACED).exists() == (epoch == 0)
    if epoch == 0:
        assert (folder / REPLACED).read_bytes() == before
    train(worker)
    assert decided(folder) == decided(tmp_path / "whole")
    assert not list(folder.glob("*.partial"))


def test_every_interruption_stays_on_record(worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path) -> None:
    began = time.time()
    lost(worker_factory, spec, tmp_path, epochs=1)
    for _ in range(2):  # lost again before the next checkpoint
        worker = worker_factory.build(spec, tmp_path)
        worker.resume()
        worker.advance()
        worker.close()
    worker = worker_factory.build(spec, tmp_path)
    worker.resume()
    found = [record for record in records(tmp_path) if isinstance(record, Interruption)]
    assert len(found) == 3
    lost_s = [each.seconds_lost or 0.0 for each in found]
    assert min(lost_s) > 0
    assert sum(lost_s) <= time.time() - began  # no second counts twice
    train(worker)
    ticks = [event.sequence for event in read_events(tmp_path / EVENTS) if not isinstance(event.record, Interruption)]
    assert ticks == list(range(len(ticks)))


def test_a_full_disk_or_device_does_not_pass_for_a_damaged_checkpoint(
    worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def exhausted(loop: ControlLoop, state: object) -> None:
        raise torch.OutOfMemoryError("no room for the state")

    folder = tmp_path / "run"
    lost(worker_factory, spec, folder, epochs=1)
    with monkeypatch.context() as patched:
        patched.setattr(record, "write_value", full)
        with pytest.raises(DiskFullError, match="make room, then go on"):
            worker_factory.build(spec, folder).resume()
    with monkeypatch.context() as patched:
        patched.setattr(ControlLoop, "load_state_dict", exhausted)
        with pytest.raises(torch.OutOfMemoryError, match="no room for the state"):
            worker_factory.build(spec, folder).resume()
    assert not (folder / REPLACED).exists()
    assert worker_factory.build(spec, folder).resume() == 1


@pytest.mark.parametrize("log", ["shorter", "another run's"])
def test_a_checkpoint_that_does_not_follow_its_log_is_not_loaded(
    worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path, log: str
) -> None:
    folder = tmp_path / "run"
    lost(worker_factory, spec, folder, epochs=2)
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    if log == "shorter":
        (folder / EVENTS).write_bytes(b"".join(lines[:-1]))
    else:  # as one that is put in place while the run is taken over
        lost(worker_factory, spec, tmp_path / "other", epochs=2)
        shutil.copy(tmp_path / "other" / CHECKPOINT, folder)
    assert worker_factory.build(spec, folder).resume() == 1
    (told,) = (record for record in records(folder) if isinstance(record, Interruption))
    assert ("it was cut" if log == "shorter" else "are not those that the checkpoint follows") in told.message


def test_a_run_that_begins_again_does_not_hold_two_models(
    worker_factory: WorkerFactory, module: str, tmp_path: Path
) -> None:
    spec = own_spec(f"{module}:Counted")
    lost(worker_factory, spec, tmp_path, epochs=1)
    cut(tmp_path / CHECKPOINT)
    assert worker_factory.build(spec, tmp_path).resume() == 0
    assert set(sys.modules[module].AT_ONCE) == {1}


def test_only_a_checkpoint_of_the_same_run_and_format_is_loaded(
    worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path
) -> None:
    lost(worker_factory, spec, tmp_path, epochs=1)
    state = load_checkpoint(tmp_path / CHECKPOINT)
    fields = json.loads(state["spec"])
    assert fields.pop("trials_per_gpu") == 1  # as one written before this setting was added
    mine, later = ({**state, "spec": json.dumps(each)} for each in (fields, {**fields, "of_a_later_version": 1}))
    (tmp_path / ERROR).write_text("of the failure that is to be resumed from")
    for asked, content, kind, message in (
        (spec, {"format": FORMAT, "state": later}, CheckpointError, "belongs to a run with other settings"),
        (replace(spec, seed=1), {"format": FORMAT, "state": mine}, CheckpointError, "belongs to a run with other"),
        (spec, {"format": 99, "state": mine}, OtherFormatError, "go on with the version that began the run"),
    ):
        torch.save(content, tmp_path / CHECKPOINT)
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
        with pytest.raises(kind, match=message):
            worker_factory.build(asked, tmp_path).resume()
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()} == before
    save_checkpoint(tmp_path / CHECKPOINT, mine)
    assert worker_factory.build(spec, tmp_path).resume() == 1
    assert not (tmp_path / ERROR).exists()


@pytest.mark.parametrize("recorded", [False, True])
def test_a_checkpoint_never_counts_the_end_of_a_run_that_is_cut_short(
    worker_factory: WorkerFactory, spec: RunSpec, tmp_path: Path, recorded: bool
) -> None:
    lost(worker_factory, spec, tmp_path, epochs=1)
    worker = worker_factory.build(spec, tmp_path)
    worker.resume()
    if recorded:
        worker.advance()
    worker.stop()  # by another thread, before the epoch is recorded, or between the epoch and its checkpoint
    if not recorded:
        worker.advance()
    worker.checkpoint()
    worker.close()
    assert last_of(tmp_path) == End(status="stopped")
    again = worker_factory.build(spec, tmp_path)
    assert again.resume() == 1
    train(again)
    assert not any(isinstance(record, End) for record in records(tmp_path))
    train(worker_factory.start(spec, tmp_path / "whole"))
    assert decided(tmp_path) == decided(tmp_path / "whole")
