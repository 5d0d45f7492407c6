from __future__ import annotations

import gc
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import same, values
from tests.service.own_task import own_spec, write_module
from trainables.digits import Digits
from trainables.task import Purpose
from triaccel_ray.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from triaccel_ray.events import End, Epoch, Interruption, LogError, Record, Start, Tick, read_events
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.loop import ControlLoop
from triaccel_ray.service.failures import (
    ERROR,
    DiskFullError,
    NonFiniteLossError,
    PreemptedError,
    cause_of,
    needing_room,
)
from triaccel_ray.service.spec import RunSpec
from triaccel_ray.service.worker import (
    CHECKPOINT,
    EVENTS,
    PREVIOUS,
    SPEC,
    Worker,
    write_atomically,
)

DIGITS = RunSpec(
    task="digits",
    recipe=replace(Digits.recipe, epochs=3, warmup_epochs=1.0),
    control=replace(
        Digits.control,
        # No FP16, which a CPU emulates at a tenth of the speed.
        precision=replace(Digits.control.precision, tau_low=0.0, tau_high=1e-5),
        curvature=replace(Digits.control.curvature, every_steps=8),
    ),
    device="cpu",
)


class Crew:
    """Makes workers, and closes those that a test leaves open."""

    def __init__(self) -> None:
        self._made: list[Worker] = []

    def build(self, spec: RunSpec, folder: Path) -> Worker:
        self._made.append(Worker(spec, folder))
        return self._made[-1]

    def start(self, spec: RunSpec, folder: Path) -> Worker:
        worker = self.build(spec, folder)
        worker.start()
        return worker

    def close(self) -> None:
        for worker in self._made:
            if hasattr(worker, "loop"):
                worker.close()


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_collected() -> Iterator[None]:
    """A worker collects garbage: among all that a test session has imported, half a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_module(tmp_path, monkeypatch)


def records(folder: Path) -> list[Record]:
    return [event.record for event in read_events(folder / EVENTS)]


def last_of(folder: Path) -> End:
    end = records(folder)[-1]
    assert isinstance(end, End)
    return end


def decided(folder: Path) -> list[Any]:
    """What the log says of decisions and learning; seconds and bytes differ from run to run."""
    told: list[Any] = []
    for record in records(folder):
        if isinstance(record, Tick):
            seen, made = record.observation, record.decision
            told.append((seen.step, seen.loss, seen.layers, made.plan, made.state, record.applied))
        elif isinstance(record, Epoch):
            told.append((record.epoch, record.step, record.train_loss, record.held_out_accuracy, record.held_out_loss))
    return told


def train(worker: Worker) -> Worker:
    while not worker.finished:
        worker.train_epoch()
    return worker


@pytest.mark.parametrize("method", ["triaccel", "amp"])
def test_a_restored_run_equals_an_uninterrupted_one(crew: Crew, tmp_path: Path, method: str) -> None:
    spec = replace(DIGITS, method=method, seed=3)
    whole = train(crew.start(spec, tmp_path / "whole"))
    expected, weights = whole.finish(), values(whole.loop.model)

    first = crew.start(spec, tmp_path / "parts")
    first.train_epoch()
    first.save(tmp_path / "parts" / CHECKPOINT)
    first.train_epoch()  # lost: written after the checkpoint
    first.close()
    second = crew.build(spec, tmp_path / "parts")
    second.restore(tmp_path / "parts" / CHECKPOINT)
    results = train(second).finish()

    assert same(values(second.loop.model), weights)
    assert decided(tmp_path / "parts") == decided(tmp_path / "whole")
    assert any(isinstance(record, Tick) for record in records(tmp_path / "whole")) == (method == "triaccel")
    assert [results[name] for name in ("accuracy", "loss", "epochs")] == [
        expected[name] for name in ("accuracy", "loss", "epochs")
    ]
    assert [event.sequence for event in read_events(tmp_path / "parts" / EVENTS)] == list(
        range(len(records(tmp_path / "whole")))
    )


def test_the_seed_decides(crew: Crew, module: str, tmp_path: Path) -> None:
    weights = []
    for number, seed in enumerate((0, 0, 1)):
        worker = train(crew.start(own_spec(f"{module}:Blobs", seed=seed), tmp_path / str(number)))
        weights.append(values(worker.loop.model))
    assert same(weights[0], weights[1])
    assert not same(weights[0], weights[2])


@pytest.mark.parametrize("method", ["triaccel", "fp32"])
def test_a_final_run_reads_the_held_out_samples_once_at_its_end(
    crew: Crew, module: str, tmp_path: Path, method: str
) -> None:
    worker = crew.start(own_spec(f"{module}:Blobs", method=method, purpose=Purpose.FINAL), tmp_path / "run")
    reads = sys.modules[module].READS
    for _ in range(3):
        record = worker.train_epoch()
        assert record.held_out_accuracy is record.held_out_loss is record.score is None
    assert worker.finished
    assert reads == []
    with pytest.raises(ValueError, match="no epoch of this run has been judged"):
        _ = worker.figures
    results = worker.finish()
    assert sorted(reads) == [("final", index) for index in range(50)]
    assert last_of(tmp_path / "run") == End(status="finished", results=results)
    assert 0.0 <= results["accuracy"] <= 100.0


def test_a_search_run_is_judged_after_every_epoch(crew: Crew, module: str, tmp_path: Path) -> None:
    worker = crew.start(own_spec(f"{module}:Blobs"), tmp_path / "run")
    for epoch in range(1, 4):
        record = worker.train_epoch()
        reads = sys.modules[module].READS
        assert len(reads) == 50 * epoch
        assert set(reads) == {("search", index) for index in range(50)}
        figures = worker.figures
        assert (figures.accuracy, figures.score) == (record.held_out_accuracy, record.score)
    results = worker.finish()
    assert len(reads) == 150  # the last epoch's judgement is the run's
    assert (results["accuracy"], results["score"]) == pytest.approx((figures.accuracy, figures.score))


def test_the_log_tells_the_whole_run(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs", method="dynamic-batch")
    worker = train(crew.start(spec, tmp_path))
    assert not worker.ended
    worker.finish()
    assert worker.ended
    start, *between, end = records(tmp_path)
    assert isinstance(start, Start)
    assert start.control == spec.method_control
    assert (start.info["task"], start.info["method"], start.info["seed"]) == (spec.task, "dynamic-batch", "0")
    assert start.parameters["recipe.lr"] == 0.05
    assert start.parameters["memory_limit_bytes"] == worker.loop.memory.limit_bytes
    assert [record.epoch for record in between if isinstance(record, Epoch)] == [1, 2, 3]
    assert sum(isinstance(record, Tick) for record in between) == worker.loop.num_steps // 2
    assert isinstance(end, End)
    assert end.status == "finished"
    assert decode(RunSpec, json.loads((tmp_path / SPEC).read_text())) == spec


@pytest.mark.parametrize("method", ["triaccel", "amp"])
def test_a_loss_that_is_no_number_ends_the_run(crew: Crew, module: str, tmp_path: Path, method: str) -> None:
    worker = crew.start(own_spec(f"{module}:Diverging", method=method), tmp_path)
    with pytest.raises(NonFiniteLossError, match="the training loss of epoch 1 is nan"):
        worker.train_epoch()
    end = last_of(tmp_path)
    assert (end.status, end.cause) == ("failed", "non_finite")
    assert "nan" in end.message
    assert worker.ended


@pytest.mark.parametrize(
    ("task", "error", "cause"), [("TooLarge", MemoryError, "out_of_memory"), ("Broken", KeyError, "bug")]
)
def test_a_failure_is_in_the_log_with_its_cause(
    crew: Crew, module: str, tmp_path: Path, task: str, error: type[Exception], cause: str
) -> None:
    worker = crew.start(own_spec(f"{module}:{task}", method="fp32"), tmp_path)
    with pytest.raises((error, RuntimeError)) as caught:
        worker.train_epoch()
    assert cause_of(caught.value) == last_of(tmp_path).cause == cause
    trace = (tmp_path / ERROR).read_text()
    assert "Traceback" in trace
    assert "in forward" in trace
    crew.build(worker.spec, tmp_path).resume()
    assert not (tmp_path / ERROR).exists()


def test_a_run_that_is_cut_short_says_so(crew: Crew, module: str, tmp_path: Path) -> None:
    worker = crew.start(own_spec(f"{module}:Blobs"), tmp_path)
    worker.train_epoch()
    worker.stop()
    assert last_of(tmp_path) == End(status="stopped")


@pytest.mark.parametrize("recorded", [False, True])
def test_a_checkpoint_never_counts_the_end_of_a_run_that_is_cut_short(
    crew: Crew, module: str, tmp_path: Path, recorded: bool
) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path, epochs=1)
    worker = crew.build(spec, tmp_path)
    worker.resume()
    if recorded:
        worker.train_epoch()
    worker.stop()  # by another thread, before the epoch is recorded, or between the epoch and its checkpoint
    if not recorded:
        worker.train_epoch()
    worker.checkpoint()
    worker.close()
    assert last_of(tmp_path) == End(status="stopped")
    again = crew.build(spec, tmp_path)
    assert again.resume() == 1
    train(again)
    assert not any(isinstance(record, End) for record in records(tmp_path))
    train(crew.start(spec, tmp_path / "whole"))
    assert decided(tmp_path) == decided(tmp_path / "whole")


def test_a_folder_with_a_run_is_left_as_it_is(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    crew.start(spec, tmp_path).train_epoch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match=r"folder .* holds a run already: resume it, or choose another name"):
        crew.start(replace(spec, seed=1), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_run_that_died_before_its_first_checkpoint_begins_again(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    crew.start(spec, tmp_path).train_epoch()
    worker = crew.build(spec, tmp_path)
    worker.start(replace_existing=True)
    (record,) = records(tmp_path)
    assert isinstance(record, Start)


def saved(crew: Crew, spec: RunSpec, folder: Path) -> Path:
    worker = crew.start(spec, folder)
    worker.train_epoch()
    worker.save(folder / CHECKPOINT)
    worker.close()
    return folder / CHECKPOINT


def test_a_checkpoint_of_other_settings_is_refused(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    path = saved(crew, spec, tmp_path)
    before = (tmp_path / EVENTS).read_bytes()
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        crew.build(replace(spec, seed=1), tmp_path).restore(path)
    assert (tmp_path / EVENTS).read_bytes() == before


def test_a_log_shorter_than_the_checkpoint_is_refused(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    path = saved(crew, spec, tmp_path)
    lines = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(CheckpointError, match=r"does not fit its run: event log .* it was cut") as caught:
        crew.build(spec, tmp_path).restore(path)
    assert isinstance(caught.value.__cause__, LogError)


def test_a_missing_or_damaged_checkpoint_is_refused(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    path = saved(crew, spec, tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        crew.build(spec, tmp_path).restore(tmp_path / "elsewhere.pt")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        crew.build(spec, tmp_path).restore(path)


def lost(crew: Crew, spec: RunSpec, folder: Path, *, epochs: int) -> None:
    """Trains that many epochs, a checkpoint after each, and no end."""
    worker = crew.start(spec, folder)
    for _ in range(epochs):
        worker.train_epoch()
        worker.checkpoint()
    worker.close()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("torn", "epoch"),
    [((), 2), ((CHECKPOINT,), 1), ((CHECKPOINT, PREVIOUS), 0)],
    ids=["whole", "newest torn", "both torn"],
)
def test_a_torn_checkpoint_is_never_loaded(
    crew: Crew, module: str, tmp_path: Path, torn: tuple[str, ...], epoch: int
) -> None:
    spec = own_spec(f"{module}:Blobs")
    train(crew.start(spec, tmp_path / "whole"))
    folder = tmp_path / "torn"
    lost(crew, spec, folder, epochs=2)
    for name in torn:
        cut(folder / name)
    (folder / f".{CHECKPOINT}.123.partial").write_bytes(b"half a checkpoint")
    worker = crew.build(spec, folder)
    assert worker.resume() == epoch
    (told,) = (record for record in records(folder) if isinstance(record, Interruption))
    assert (told.cause, told.epoch) == ("preempted", epoch)
    assert told.message.count("is damaged") == len(torn)
    train(worker)
    assert decided(folder) == decided(tmp_path / "whole")
    assert not list(folder.glob("*.partial"))


def test_a_run_that_begins_again_does_not_hold_two_models(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Counted")
    lost(crew, spec, tmp_path, epochs=1)
    cut(tmp_path / CHECKPOINT)
    assert crew.build(spec, tmp_path).resume() == 0
    assert sys.modules[module].AT_ONCE == [1, 1, 1]  # the lost one, the resumed one, and again from the beginning


def test_a_checkpoint_from_before_a_setting_was_added_is_this_runs(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path, epochs=1)
    state = load_checkpoint(tmp_path / CHECKPOINT)
    fields = json.loads(state["spec"])
    assert fields.pop("trials_per_gpu") == 1
    save_checkpoint(tmp_path / CHECKPOINT, {**state, "spec": json.dumps(fields)})
    worker = crew.build(spec, tmp_path)
    assert worker.resume() == 1
    worker.close()
    save_checkpoint(tmp_path / CHECKPOINT, {**state, "spec": json.dumps({**fields, "of_a_later_version": 1})})
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        crew.build(spec, tmp_path).resume()


def test_a_missing_checkpoint_falls_back_too(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path, epochs=2)
    (tmp_path / CHECKPOINT).unlink()
    assert crew.build(spec, tmp_path).resume() == 1


def test_every_interruption_stays_on_record(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path, epochs=1)
    for _ in range(2):  # lost again before the next checkpoint
        worker = crew.build(spec, tmp_path)
        worker.resume()
        worker.train_epoch()
        worker.close()
    worker = crew.build(spec, tmp_path)
    worker.resume()
    assert sum(isinstance(record, Interruption) for record in records(tmp_path)) == 3
    train(worker)
    ticks = [event.sequence for event in read_events(tmp_path / EVENTS) if not isinstance(event.record, Interruption)]
    assert ticks == list(range(len(ticks)))


OUTLIVING = """
import json
import os
import sys
from pathlib import Path

from triaccel_ray.events import TakenOverError
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.service.failures import cause_of
from triaccel_ray.service.spec import RunSpec
from triaccel_ray.service.worker import Worker

worker = Worker(decode(RunSpec, json.loads(sys.argv[1])), Path(sys.argv[2]))
worker.start()
worker.train_epoch()
worker.checkpoint()
print("trained", flush=True)
step = sys.stdin.readline().strip()
try:
    getattr(worker, step)()
except TakenOverError as error:
    print(cause_of(error), worker.ended or step == "checkpoint", flush=True)
worker.close()
"""


@pytest.mark.parametrize("step", ["train_epoch", "checkpoint", "stop"])
def test_a_process_that_outlives_its_run_writes_nothing_more(
    crew: Crew, module: str, tmp_path: Path, step: str
) -> None:
    spec, folder = own_spec(f"{module}:Blobs"), tmp_path / "run"
    train(crew.start(spec, tmp_path / "whole"))
    outliving = subprocess.Popen(
        [sys.executable, "-c", OUTLIVING, json.dumps(encode(spec)), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
    )
    assert outliving.stdout is not None
    assert outliving.stdout.readline() == "trained\n"
    worker = crew.build(spec, folder)
    assert worker.resume() == 1
    worker.train_epoch()
    worker.checkpoint()
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said, _ = outliving.communicate(f"{step}\n")
    assert (said, outliving.returncode) == ("taken_over True\n", 0)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    train(worker).finish()
    assert decided(folder) == decided(tmp_path / "whole")
    assert [record.cause for record in records(folder) if isinstance(record, Interruption)] == ["preempted"]


def test_a_checkpoint_that_a_run_did_not_write_in_its_log_is_not_loaded(
    crew: Crew, module: str, tmp_path: Path
) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path / "run", epochs=1)
    lost(crew, spec, tmp_path / "other", epochs=2)  # as one that is put in place while the run is taken over
    (tmp_path / "run" / CHECKPOINT).rename(tmp_path / "run" / PREVIOUS)
    shutil.copy(tmp_path / "other" / CHECKPOINT, tmp_path / "run")
    lines = (tmp_path / "other" / EVENTS).read_bytes().splitlines(keepends=True)
    with (tmp_path / "run" / EVENTS).open("ab") as file:
        file.writelines(lines)
    assert crew.build(spec, tmp_path / "run").resume() == 1
    (told,) = (record for record in records(tmp_path / "run") if isinstance(record, Interruption))
    assert "are not those that the checkpoint follows" in told.message


def test_settings_that_were_changed_are_refused_when_resumed(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    lost(crew, spec, tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match="belongs to a run with other settings"):
        crew.build(replace(spec, seed=1), tmp_path).resume()


def test_a_run_without_an_epoch_cannot_be_finished(crew: Crew, module: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epochs = 0: a run is finished after at least one epoch"):
        crew.start(own_spec(f"{module}:Blobs"), tmp_path).finish()


def test_a_glance_at_a_run(crew: Crew, module: str, tmp_path: Path) -> None:
    worker = crew.start(own_spec(f"{module}:Blobs"), tmp_path)
    before = worker.status()
    assert before is not None
    assert (before.epoch, before.num_epochs, before.batch_size, before.accuracy) == (0.0, 3, 32, None)
    worker.train_epoch()
    after = worker.status()
    assert after is not None
    assert (after.epoch, after.accuracy) == (1.0, worker.figures.accuracy)
    assert after.images_per_second > 0.0
    assert sum(after.layers_per_precision.values()) == 3
    assert 0 < after.used_bytes <= after.limit_bytes
    worker.close()
    assert worker.status() is None


def test_the_budget_or_headroom_is_the_limit(crew: Crew, module: str, tmp_path: Path) -> None:
    spec = own_spec(f"{module}:Blobs")
    budget = crew.build(replace(spec, memory_budget_bytes=2**33), tmp_path).loop.memory
    assert budget.limit_bytes == 2**33
    headroom = crew.build(replace(spec, memory_headroom_bytes=2**26), tmp_path).loop.memory
    assert headroom.limit_bytes == pytest.approx(headroom.idle_bytes + 2**26, abs=2**25)


def test_a_budget_below_the_idle_process_is_refused(crew: Crew, module: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory budget = 1 MiB: the process already holds"):
        crew.build(own_spec(f"{module}:Blobs", memory_budget_bytes=2**20), tmp_path)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", "old")
    write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "new")]


def test_causes() -> None:
    assert cause_of(MemoryError()) == "out_of_memory"
    assert cause_of(NonFiniteLossError(str(math.nan))) == "non_finite"
    assert cause_of(PreemptedError()) == "preempted"
    assert cause_of(DiskFullError()) == "disk_full"
    assert cause_of(RuntimeError("a bug")) == "bug"


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


def test_a_worker_whose_loop_fails_while_it_closes_has_its_log_closed(tmp_path: Path, crew: Crew) -> None:
    worker = crew.start(DIGITS, tmp_path)
    worker.fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    log = worker._log
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
