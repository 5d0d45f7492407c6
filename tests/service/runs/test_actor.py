from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from tests.service.own_task import own_spec
from triaccel_ray.model.dry_run import UserCodeError
from triaccel_ray.service.failures import cause_of
from triaccel_ray.service.runs.actor import RunActor, original_error
from triaccel_ray.service.runs.pace import Pace
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.place import Place


def test_an_actor_trains_one_run_and_answers_meanwhile(module: str, tmp_path: Path) -> None:
    actor = RunActor(own_spec(f"{module}:Blobs"), Place(str(tmp_path / "run")))
    assert actor.status() is None
    assert actor.setup(resume=False) == 0
    assert [actor.train_epoch().epoch for _ in range(3)] == [1, 2, 3]
    status = actor.status()
    assert status is not None
    assert status.epoch == 3.0
    results = actor.finish()
    assert actor.status() is None
    run = read_run(tmp_path / "run")
    assert run.end is not None
    assert (run.status, run.end.results) == ("finished", results)


def test_an_actor_goes_on_from_the_checkpoint_if_there_is_one(module: str, tmp_path: Path) -> None:
    spec, folder = own_spec(f"{module}:Blobs"), Place(str(tmp_path / "run"))
    first = RunActor(spec, folder)
    assert first.setup(resume=True) == 0
    first.train_epoch()
    second = RunActor(spec, folder)
    assert second.setup(resume=True) == 1
    assert [second.train_epoch().epoch for _ in range(2)] == [2, 3]
    second.finish()
    first._get().close()


def test_checkpoints_that_take_long_wait_but_for_the_last(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, now, saved = RunActor(own_spec(f"{module}:Blobs"), Place(str(tmp_path / "run"))), [0.0], []
    actor._saving = Pace(lambda: now[0])
    save = Worker.checkpoint

    def save_slowly(worker: Worker) -> None:
        save(worker)
        saved.append(worker.loop.sampler.epoch)
        now[0] += 10.0

    monkeypatch.setattr(Worker, "checkpoint", save_slowly)
    actor.setup(resume=False)
    for _ in range(3):
        actor.train_epoch()
        now[0] += 5.0
    assert saved == [1, 3]
    actor.finish()


def test_an_actor_must_be_set_up(module: str, tmp_path: Path) -> None:
    actor = RunActor(own_spec(f"{module}:Blobs"), Place(str(tmp_path / "run")))
    with pytest.raises(RuntimeError, match="the run is not set up: call setup first"):
        actor.train_epoch()


def test_bad_input_is_told_from_a_mistake_in_the_tasks_code(module: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="memory budget = 1 MiB"):
        RunActor(own_spec(f"{module}:Blobs", memory_budget_bytes=2**20), Place(str(folder))).setup(resume=False)
    with pytest.raises(UserCodeError, match=r"Unbuildable.model\(\) raised TypeError: ") as caught:
        RunActor(own_spec(f"{module}:Unbuildable"), Place(str(folder))).setup(resume=False)
    assert cause_of(caught.value) == "bug"
    assert not folder.exists()


def test_the_traceback_of_a_run_travels_with_what_it_raised() -> None:
    raised = RayTaskError("setup", "File mine.py, line 7, in model", ValueError("too few"))
    cause = original_error(raised.as_instanceof_cause())
    assert (type(cause), str(cause)) == (ValueError, "too few")
    assert "File mine.py, line 7, in model" in "".join(traceback.format_exception(cause))


def test_a_wrapped_error_is_unwrapped() -> None:
    inner, outer = ValueError("what the actor raised"), RuntimeError("what Ray makes of it")
    outer.cause = inner  # type: ignore[attr-defined]
    assert original_error(outer) is inner
    assert original_error(inner) is inner
