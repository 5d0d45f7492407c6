import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import same, values
from tests.service.own_task import own_spec
from tests.service.worker_factory import Begin, last_of, records, train
from triaccel_ray.config import ControlConfig
from triaccel_ray.measure.memory import MIB
from triaccel_ray.records.events import End, Epoch, Tick
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import NonFiniteLossError
from triaccel_ray.service.runs.building import fitted_control
from triaccel_ray.service.runs.spec import RunSpec, run_spec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import SPEC, read_value
from triaccel_ray.trainables.task import Purpose, Recipe


def test_the_seed_decides(start: Begin, tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        worker = train(start(folder=tmp_path / str(number), seed=seed))
        weights.append(values(worker.loop.model))
    assert same(weights[0], weights[1])
    assert not same(weights[0], weights[2])


@pytest.mark.parametrize("method", ["triaccel", "fp32"])
def test_a_final_run_reads_the_held_out_samples_once_at_its_end(
    start: Begin, module: str, tmp_path: Path, method: str
) -> None:
    worker = start(method=method, purpose=Purpose.FINAL)
    reads = sys.modules[module].READS
    for _ in range(3):
        worker.advance()
        record = worker.last
        assert record.held_out(Goal()) is record.held_out_loss is record.score is None
    assert worker.finished
    assert reads == []
    assert worker.performance is None
    results = worker.finish()
    assert sorted(reads) == [("final", index) for index in range(50)]
    assert last_of(tmp_path) == End(status="finished", results=results)
    assert 0.0 <= results["accuracy"] <= 100.0


def test_a_final_run_judged_by_several_views_also_tells_what_one_yields(start: Begin) -> None:
    results = train(start("TwoViews", purpose=Purpose.FINAL)).finish()
    # outputs for x and -x together say little of x
    assert 0.0 <= results["accuracy"] < results["one_view_accuracy"] <= 100.0
    score = results["accuracy"] / (results["seconds_per_epoch"] * results["peak_gb"])
    assert results["score"] == pytest.approx(score, rel=1e-6)


def test_a_tasks_own_loss_may_be_no_number_on_held_out_samples(start: Begin) -> None:
    results = train(start("Unjudged")).finish()
    assert math.isnan(results["loss"])
    assert results["accuracy"] > 50.0


def test_a_search_run_is_judged_after_every_epoch(start: Begin, module: str) -> None:
    worker = start()
    sys.modules[module].READS.clear()  # of the two samples that are tried beforehand
    for epoch in range(1, 4):
        worker.advance()
        record = worker.last
        reads = sys.modules[module].READS
        assert len(reads) == 50 * epoch
        assert set(reads) == {("search", index) for index in range(50)}
        performance = worker.performance
        assert (performance.metric, performance.score) == (record.held_out(Goal()), record.score)
    results = worker.finish()
    assert len(reads) == 150  # the last epoch's judgement is the run's
    assert (results["accuracy"], results["score"]) == pytest.approx((performance.metric, performance.score))


def test_on_a_cpu_time_that_others_have_the_core_does_not_count(start: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = start()
    step = worker.loop.step

    def waiting() -> None:
        time.sleep(0.1)
        step()

    monkeypatch.setattr(worker.loop, "step", waiting)
    worker.advance()
    epoch = worker.last
    waited = 0.1 * worker.loop.num_steps
    assert epoch.seconds > waited
    assert 0.0 < epoch.typical_seconds < epoch.seconds - 0.9 * waited


def test_the_log_tells_the_whole_run(start: Begin, tmp_path: Path) -> None:
    worker = train(start(method="dynamic-batch"))
    worker.finish()
    spec = worker.spec
    assert worker.log.ended
    first, *between, end = records(tmp_path)
    assert first.control == fitted_control(spec, 160)
    assert (first.info["task"], first.info["method"], first.info["seed"]) == (spec.task, "dynamic-batch", "0")
    assert first.parameters["recipe.lr"] == 0.05
    assert first.parameters["memory_limit_bytes"] == worker.loop.memory.limit_bytes
    assert [record.epoch for record in between if isinstance(record, Epoch)] == [1, 2, 3]
    assert sum(isinstance(record, Tick) for record in between) == worker.loop.num_steps // first.control.every_steps
    assert end.status == "finished"
    assert read_value(RunSpec, tmp_path / SPEC, "") == spec


@pytest.mark.parametrize(
    ("task", "purpose", "message"),
    [
        ("Diverging", Purpose.SEARCH, "the training loss of epoch 1 is nan"),
        ("Poisoned", Purpose.SEARCH, "the loss on held-out samples is nan, and the model holds"),
        ("Poisoned", Purpose.FINAL, "the loss on held-out samples is nan, and the model holds"),
    ],
)
def test_a_run_with_what_is_no_number_has_diverged(start: Begin, task: str, purpose: Purpose, message: str) -> None:
    worker = start(task, purpose=purpose)
    with pytest.raises(NonFiniteLossError, match=message):
        train(worker).finish()


def test_a_run_without_an_epoch_can_be_stopped(start: Begin, tmp_path: Path) -> None:
    start().stop()
    assert last_of(tmp_path) == End(status="stopped")


def test_the_budget_or_headroom_is_the_limit_and_one_below_the_idle_process_is_refused(start: Begin) -> None:
    assert start(memory_budget_bytes=2**33).loop.memory.limit_bytes == 2**33
    headroom = start(memory_headroom_bytes=2**26).loop.memory
    assert headroom.limit_bytes == pytest.approx(headroom.idle_bytes + 2**26, abs=2**25)
    with pytest.raises(ValueError, match="memory budget = 1 MiB: the process already holds"):
        start(memory_budget_bytes=2**20)


def test_intervals_and_batch_fit_a_short_run() -> None:
    expected = {1: (1, 1, 96), 10: (5, 20, 240), 100: (50, 200, 512)}
    for epochs, intervals_and_largest_batch in expected.items():
        spec = own_spec("digits", recipe=Recipe(epochs=epochs), control=ControlConfig())
        control = fitted_control(spec, 96 * epochs)
        found = (control.every_steps, control.curvature.every_steps, control.batch.maximum)
        assert found == intervals_and_largest_batch


TRAIN_ONE_AFTER_ANOTHER = """
import sys
from dataclasses import replace
from pathlib import Path
from triaccel_ray.measure.memory import MIB
from triaccel_ray.service.runs.spec import run_spec
from triaccel_ray.service.runs.worker import Worker

spec = replace(run_spec("digits"), memory_headroom_bytes=64 * MIB, device="cpu")
control = replace(spec.control, batch=replace(spec.control.batch, start=192, enabled=False))
spec = replace(spec, recipe=replace(spec.recipe, epochs=2), control=control)
for number, folder in enumerate(sys.argv[1:]):
    before = [b"1" * (100 * MIB) for _ in range(2 * number)]
    del before[1:]  # so one is held, and the other was freed
    worker = Worker(spec, Path(folder))
    worker.resume()
    while not worker.finished:
        worker.advance()
    worker.finish()
    worker.close()
"""


def test_what_a_process_has_done_before_is_no_batchs_memory(tmp_path: Path) -> None:
    """In a process of its own: in a heap that other tests have fragmented, batches touch more pages, or fewer."""
    folders, taken = [tmp_path / str(number) for number in range(2)], []
    subprocess.run([sys.executable, "-c", TRAIN_ONE_AFTER_ANOTHER, *map(str, folders)], check=True, timeout=300)
    for folder in folders:
        shares = [record.observation.memory for record in records(folder) if isinstance(record, Tick)]
        assert all(memory.limit_bytes - memory.idle_bytes == 64 * MIB for memory in shares)
        taken.append(max(memory.window_peak_bytes - memory.idle_bytes for memory in shares))
    assert abs(taken[0] - taken[1]) < 8 * MIB


def test_a_worker_whose_loop_fails_while_it_closes_has_its_log_closed(tmp_path: Path) -> None:
    worker = Worker(replace(run_spec("digits"), device="cpu"), tmp_path)
    worker.resume()
    worker.fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    log = worker.log._log

    def broken() -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    worker.loop._pending.observing(broken, step=0)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        worker.close()
    assert log._file.closed
    assert not hasattr(worker, "loop")
    assert last_of(tmp_path).status == "failed"
