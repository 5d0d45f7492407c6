from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import same, values
from tests.service.own_task import own_spec
from tests.service.worker_factory import WorkerFactory, last_of, records, train
from triaccel_ray.config import ControlConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB
from triaccel_ray.records.checkpoint import OtherFormatError
from triaccel_ray.records.codec import decode
from triaccel_ray.records.events import End, Epoch, Start, Tick
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import DiskFullError, NonFiniteLossError, cause_of, needing_room
from triaccel_ray.service.runs.building import fitted_control
from triaccel_ray.service.runs.spec import RunSpec, run_spec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT, ERROR, SPEC, write_atomically
from triaccel_ray.trainables.task import Purpose, Recipe


def test_the_seed_decides(worker_factory: WorkerFactory, module: str, tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        worker = train(worker_factory.start(own_spec(f"{module}:Blobs", seed=seed), tmp_path / str(number)))
        weights.append(values(worker.loop.model))
    assert same(weights[0], weights[1])
    assert not same(weights[0], weights[2])


@pytest.mark.parametrize("method", ["triaccel", "fp32"])
def test_a_final_run_reads_the_held_out_samples_once_at_its_end(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, method: str
) -> None:
    worker = worker_factory.start(own_spec(f"{module}:Blobs", method=method, purpose=Purpose.FINAL), tmp_path / "run")
    reads = sys.modules[module].READS
    for _ in range(3):
        record = worker.train_epoch()
        assert record.held_out(Goal()) is record.held_out_loss is record.score is None
    assert worker.finished
    assert reads == []
    assert worker.figures is None
    results = worker.finish()
    assert sorted(reads) == [("final", index) for index in range(50)]
    assert last_of(tmp_path / "run") == End(status="finished", results=results)
    assert 0.0 <= results["accuracy"] <= 100.0


@pytest.mark.parametrize("method", ["triaccel", "fp32"])
def test_a_final_run_judged_by_several_views_also_tells_what_one_yields(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, method: str
) -> None:
    worker = train(worker_factory.start(own_spec(f"{module}:TwoViews", method=method, purpose=Purpose.FINAL), tmp_path))
    results = worker.finish()
    # outputs for x and -x together say little of x
    assert 0.0 <= results["accuracy"] < results["one_view_accuracy"] <= 100.0
    assert results["score"] == pytest.approx(
        results["accuracy"] / (results["seconds_per_epoch"] * results["peak_gb"]), rel=1e-6
    )


def test_a_tasks_own_loss_may_be_no_number_on_held_out_samples(
    worker_factory: WorkerFactory, module: str, tmp_path: Path
) -> None:
    results = train(worker_factory.start(own_spec(f"{module}:Unjudged"), tmp_path)).finish()
    assert math.isnan(results["loss"])
    assert results["accuracy"] > 50.0


def test_a_checkpoint_of_another_version_leaves_the_run_as_it_is(
    worker_factory: WorkerFactory, module: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    worker = worker_factory.start(own_spec(f"{module}:Blobs"), folder)
    worker.train_epoch()
    worker.checkpoint()
    worker.close()
    path = folder / CHECKPOINT
    torch.save({**torch.load(path, weights_only=True), "format": 99}, path)
    (folder / ERROR).write_text("of the failure that is to be resumed from")
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    with pytest.raises(OtherFormatError, match="go on with the version that began the run"):
        worker_factory.build(own_spec(f"{module}:Blobs"), folder).resume()
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_a_search_run_is_judged_after_every_epoch(worker_factory: WorkerFactory, module: str, tmp_path: Path) -> None:
    worker = worker_factory.start(own_spec(f"{module}:Blobs"), tmp_path / "run")
    sys.modules[module].READS.clear()  # of the two samples that are tried beforehand
    for epoch in range(1, 4):
        record = worker.train_epoch()
        reads = sys.modules[module].READS
        assert len(reads) == 50 * epoch
        assert set(reads) == {("search", index) for index in range(50)}
        figures = worker.figures
        assert (figures.metric, figures.score) == (record.held_out(Goal()), record.score)
    results = worker.finish()
    assert len(reads) == 150  # the last epoch's judgement is the run's
    assert (results["accuracy"], results["score"]) == pytest.approx((figures.metric, figures.score))


def test_on_a_cpu_time_that_others_have_the_core_does_not_count(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_factory.start(own_spec(f"{module}:Blobs"), tmp_path / "run")
    step = worker.loop.step

    def waiting() -> None:
        time.sleep(0.1)
        step()

    monkeypatch.setattr(worker.loop, "step", waiting)
    epoch = worker.train_epoch()
    waited = 0.1 * worker.loop.num_steps
    assert epoch.seconds > waited
    assert epoch.typical_seconds is not None
    assert 0.0 < epoch.typical_seconds < epoch.seconds - 0.9 * waited


def test_the_log_tells_the_whole_run(worker_factory: WorkerFactory, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs", method="dynamic-batch")
    worker = train(worker_factory.start(spec, tmp_path))
    assert not worker.log.ended
    worker.finish()
    assert worker.log.ended
    start, *between, end = records(tmp_path)
    assert isinstance(start, Start)
    assert start.control == fitted_control(spec, 160)
    assert (start.info["task"], start.info["method"], start.info["seed"]) == (spec.task, "dynamic-batch", "0")
    assert start.parameters["recipe.lr"] == 0.05
    assert start.parameters["memory_limit_bytes"] == worker.loop.memory.limit_bytes
    assert [record.epoch for record in between if isinstance(record, Epoch)] == [1, 2, 3]
    assert sum(isinstance(record, Tick) for record in between) == worker.loop.num_steps // start.control.every_steps
    assert isinstance(end, End)
    assert end.status == "finished"
    assert decode(RunSpec, json.loads((tmp_path / SPEC).read_text())) == spec


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("Diverging", {"method": "triaccel"}, "the training loss of epoch 1 is nan"),
        ("Diverging", {"method": "amp"}, "the training loss of epoch 1 is nan"),
        ("Poisoned", {"purpose": Purpose.SEARCH}, "the loss on held-out samples is nan"),
        ("Poisoned", {"purpose": Purpose.FINAL}, "the loss on held-out samples is nan"),
    ],
)
def test_a_run_with_what_is_no_number_has_diverged(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, task: str, settings: dict[str, Any], message: str
) -> None:
    worker = worker_factory.start(own_spec(f"{module}:{task}", **settings), tmp_path)
    with pytest.raises(NonFiniteLossError, match=message):
        train(worker).finish()
    end = last_of(tmp_path)
    assert (end.status, end.cause) == ("failed", "non_finite")
    assert "nan" in end.message
    assert worker.log.ended


def test_a_run_without_an_epoch_can_be_stopped_and_not_finished(
    worker_factory: WorkerFactory, module: str, tmp_path: Path
) -> None:
    worker = worker_factory.start(own_spec(f"{module}:Blobs"), tmp_path)
    with pytest.raises(ValueError, match="epochs = 0: a run is finished after at least one epoch"):
        worker.finish()
    worker.stop()
    assert last_of(tmp_path) == End(status="stopped")


@pytest.mark.parametrize(
    ("task", "error", "cause"), [("TooLarge", MemoryError, "out_of_memory"), ("Broken", KeyError, "bug")]
)
def test_a_failure_is_in_the_log_with_its_cause(
    worker_factory: WorkerFactory, module: str, tmp_path: Path, task: str, error: type[Exception], cause: str
) -> None:
    worker = worker_factory.start(own_spec(f"{module}:{task}", method="fp32"), tmp_path)
    with pytest.raises((error, RuntimeError)) as caught:
        worker.train_epoch()
    assert cause_of(caught.value) == last_of(tmp_path).cause == cause
    trace = (tmp_path / ERROR).read_text()
    assert "Traceback" in trace
    assert "in forward" in trace
    worker_factory.build(worker.spec, tmp_path).resume()
    assert not (tmp_path / ERROR).exists()


def test_the_budget_or_headroom_is_the_limit_and_one_below_the_idle_process_is_refused(
    worker_factory: WorkerFactory, module: str, tmp_path: Path
) -> None:
    spec = own_spec(f"{module}:Blobs")
    budget = worker_factory.build(replace(spec, memory_budget_bytes=2**33), tmp_path).loop.memory
    assert budget.limit_bytes == 2**33
    headroom = worker_factory.build(replace(spec, memory_headroom_bytes=2**26), tmp_path).loop.memory
    assert headroom.limit_bytes == pytest.approx(headroom.idle_bytes + 2**26, abs=2**25)
    with pytest.raises(ValueError, match="memory budget = 1 MiB: the process already holds"):
        worker_factory.build(replace(spec, memory_budget_bytes=2**20), tmp_path)


@pytest.mark.parametrize(
    ("epochs", "num_samples", "t_ctrl", "t_curv", "largest"),
    [(1, 96, 1, 1, 96), (10, 960, 5, 20, 240), (100, 9600, 50, 200, 512)],
)
def test_intervals_and_batch_fit_a_short_run(
    epochs: int, num_samples: int, t_ctrl: int, t_curv: int, largest: int
) -> None:
    spec = own_spec("digits", recipe=Recipe(epochs=epochs), control=ControlConfig())
    control = fitted_control(spec, num_samples)
    assert (control.every_steps, control.curvature.every_steps) == (t_ctrl, t_curv)
    assert control.batch.maximum == largest


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_from_other_errors(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFullError, match=r"the disk of .* is full: make room, then go on with `triaccel resume`"),
        needing_room(tmp_path),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        file.write(b"no room")
    with pytest.raises(FileNotFoundError), needing_room(tmp_path):
        (tmp_path / "nowhere").read_bytes()


def test_what_a_process_has_done_before_is_no_batchs_memory(tmp_path: Path) -> None:
    taken = []
    for number in range(2):
        spec = run_spec("digits", data_dir=None, recipe={"epochs": 2}, memory_headroom_bytes=64 * MIB, device="cpu")
        batch = replace(spec.control.batch, start=192, enabled=False)
        worker = Worker(replace(spec, control=replace(spec.control, batch=batch)), tmp_path / str(number))
        worker.resume()
        for _ in range(2):
            worker.train_epoch()
        worker.close()
        shares = [r.observation.memory for r in records(tmp_path / str(number)) if isinstance(r, Tick)]
        assert all(memory.limit_bytes - memory.idle_bytes == 64 * MIB for memory in shares)
        taken.append(max(memory.window_peak_bytes - memory.idle_bytes for memory in shares))
    assert abs(taken[0] - taken[1]) < 8 * MIB


def test_a_worker_whose_loop_fails_while_it_closes_has_its_log_closed(tmp_path: Path) -> None:
    worker = Worker(run_spec("digits", data_dir=None, recipe={}, device="cpu"), tmp_path)
    worker.resume()
    worker.fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    log = worker.log._log
    assert log is not None

    def broken() -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    assert isinstance(worker.loop, ControlLoop)
    worker.loop._pending.observing(broken, step=0)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        worker.close()
    assert log._file.closed
    assert not hasattr(worker, "loop")
    assert last_of(tmp_path).status == "failed"
