"""The adapter between Ray Tune and a run, in this process and on logical GPUs."""

import gc
import os
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray import tune

from tests.service.local_trial import local_run, local_trial, trained
from tests.service.own_task import RECIPE, own_spec
from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.records.events import End
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.search_spaces.thresholds import calibration, thresholds
from triaccel_ray.service.runs import worker as worker_module
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import end_run, read_run
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trial import FAILED_OBJECTIVE, NAME_KEY, RunTrial, TrialContext, reopen
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT, DAMAGED, ERROR, EVENTS, SPEC
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe

LARGE_BYTES = 100 * 2**20
"""Of the samples of `Large`."""


def context_of(task: str, folder: Path, **settings: Any) -> TrialContext:
    base, measured = own_spec(task, **settings), calibration({"0": [1e-6, 1e-4]})

    def spec_of(config: Mapping[str, Any]) -> RunSpec:
        return replace(base, control=thresholds(config, base.control, measured))

    return TrialContext(place=StoragePath(str(folder)), spec_of=spec_of, objective=Objective(name="metric"))


def take(context: TrialContext, name: str, *, epochs: int, **config: Any) -> list[dict[str, Any]]:
    """Results of a trial's first steps, after which its process lets go of it."""
    trial = local_trial(context, {NAME_KEY: name, **config})
    try:
        return [trial.step() for _ in range(epochs)]
    finally:
        trial.cleanup()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir()}


def summary(folder: Path) -> tuple[str, list[int], list[tuple[str, int]]]:
    """Status, epochs, and the interruptions' causes and epochs."""
    run = read_run(folder)
    return run.status, [epoch.epoch for epoch in run.epochs], [(each.cause, each.epoch) for each in run.interruptions]


class MeetingTrial(RunTrial):
    """Reports its GPU and process, and does not begin before a trial on another GPU is there too."""

    def step(self) -> dict[str, Any]:
        gpu = "-".join(map(str, ray.get_gpu_ids()))
        meeting = self._context.place.folder.parent / "meeting"
        meeting.mkdir(exist_ok=True)
        (meeting / gpu).touch()
        wait_until(lambda: len(list(meeting.iterdir())) == 2, say=lambda: "no other trial runs at the same time")
        return {**super().step(), "gpu": gpu, "pid": os.getpid(), "frozen": gc.get_freeze_count()}


def test_trials_run_side_by_side_each_on_its_own_gpu_and_reuse_their_actors(tmp_path: Path, own_ray: None) -> None:
    # In FP32: sums in another order would differ by more in BF16 than seeds are told apart by below.
    control = ControlConfig(precision=PrecisionConfig(enabled=False, initial=Precision.FP32))
    context = context_of("tests.service.runs.several:Several", tmp_path / "trials", control=control)
    rhos = [0.5, 0.6, 0.7, 0.8]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Tune announces its own deprecations
        results = tune.Tuner(
            tune.with_resources(tune.with_parameters(MeetingTrial, context=context), {"cpu": 1, "gpu": 1}),
            param_space={"rho_high": tune.grid_search(rhos), "rho_ratio": 0.5},
            tune_config=tune.TuneConfig(reuse_actors=True),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(tmp_path),
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()
    assert not results.errors
    ends = [result.metrics for result in results]
    assert {end["gpu"] for end in ends} == {"0", "1"}
    assert len({end["pid"] for end in ends}) == 2  # four trials, two actors
    assert len({(end["gpu"], end["pid"]) for end in ends}) == 2  # and each keeps its GPU
    assert min(end["frozen"] for end in ends) > 100_000  # libraries, which no trial looks through for garbage
    runs = [read_run(folder) for folder in sorted((tmp_path / "trials").iterdir())]
    assert sorted(run.spec.control.batch.rho_high for run in runs) == rhos
    for run in runs:
        (end,) = [end for end in ends if end["trial_id"] == run.name]
        assert run.spec.control.batch.rho_high == end["config"]["rho_high"]
        assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", [1, 2, 3])
        assert end["quality"] == run.epochs[-1].held_out(Goal())
        # A reused process begins every run from the same seed.
        assert run.epochs[0].train_loss == pytest.approx(runs[0].epochs[0].train_loss, rel=1e-6)


def test_a_trial_is_a_run_with_the_sampled_thresholds(module: str, tmp_path: Path) -> None:
    sample = {"tau_low_quantile": 0.0, "tau_high_share": 1.0}
    results = take(context_of(f"{module}:Blobs", tmp_path), "mine", epochs=3, **sample)
    assert [(result["epoch"], result["done"]) for result in results] == [(1, False), (2, False), (3, True)]
    run = read_run(tmp_path / "mine")
    assert run.status == "finished"
    assert run.spec.control.precision.tau_low == pytest.approx(1e-8)
    assert results[-1]["objective"] == results[-1]["quality"] == run.epochs[-1].held_out(Goal())


def test_a_process_that_is_used_again_begins_each_run_alike_and_gives_its_memory_back(
    module: str, tmp_path: Path
) -> None:
    process, held, left = psutil.Process(), [], []
    trial, losses = local_trial(context_of(f"{module}:Large", tmp_path), {NAME_KEY: "trial-0"}), []
    for number in range(5):
        trial.step()
        held.append(process.memory_info().rss)
        trial.reset_config({NAME_KEY: f"trial-{number + 1}"})
        left.append(process.memory_info().rss)
        losses.append(read_run(tmp_path / f"trial-{number}").epochs[0].train_loss)
    trial.cleanup()
    assert set(losses) == {losses[0]}
    # A run holds its samples at least. The allocator keeps some tens of MiB back, now more, now less, but what stays of
    # a run must not add up: of four runs together less than the half of one run's samples.
    assert min(full - empty for full, empty in zip(held, left, strict=True)) > 0.5 * LARGE_BYTES
    assert left[-1] - left[0] < 0.5 * LARGE_BYTES


@pytest.mark.parametrize(("name", "num_epochs"), [("finished", 3), ("stopped", 2), ("lost", 2)])
def test_a_trial_that_has_ended_is_told_and_not_touched(
    module: str, tmp_path: Path, name: str, num_epochs: int
) -> None:
    context, path = context_of(f"{module}:Blobs", tmp_path), tmp_path / name / EVENTS
    results = take(context, name, epochs=num_epochs)
    if name == "lost":  # before its end was written
        path.write_bytes(path.read_bytes().rpartition(b'{"sequence"')[0])
    elif name == "stopped":
        (tmp_path / name / CHECKPOINT).unlink()  # which is not needed
    before = path.read_bytes()
    told = take(context, name, epochs=num_epochs, ended=name != "finished")
    assert [result["quality"] for result in told] == [result["quality"] for result in results]
    assert told[-1]["done"]
    assert path.read_bytes().startswith(before)
    assert (path.read_bytes() == before) == (name != "lost")
    assert read_run(tmp_path / name).status == ("finished" if name == "finished" else "stopped")


def test_a_trial_too_far_behind_amp_ends_after_half_of_its_epochs(module: str, tmp_path: Path) -> None:
    untrained = context_of(f"{module}:Blobs", tmp_path, recipe=replace(RECIPE, lr=1e-9))
    context = replace(untrained, objective=Objective(name="metric", reference=(99.0,) * 3))
    results = take(context, "mine", epochs=2)
    assert [(result["done"], result["finished"]) for result in results] == [(False, False), (True, False)]
    assert summary(tmp_path / "mine") == ("stopped", [1, 2], [])
    before = files(tmp_path / "mine")
    assert take(context, "mine", epochs=2) == results
    assert files(tmp_path / "mine") == before
    patient = replace(context, objective=replace(context.objective, name="pareto"))
    assert not take(patient, "other", epochs=2)[-1]["done"]


def test_a_trial_that_has_not_ended_goes_on_also_with_a_damaged_spec(module: str, tmp_path: Path) -> None:
    context = context_of(f"{module}:Blobs", tmp_path)
    results = take(context, "mine", epochs=2)
    before = files(tmp_path / "mine")
    assert take(context, "mine", epochs=2) == [pytest.approx(result) for result in results]  # from the log
    assert files(tmp_path / "mine") == before
    (tmp_path / "mine" / SPEC).write_text("{")
    reopen(tmp_path / "mine")
    results += take(context, "mine", epochs=1)
    assert [each["quality"] for each in take(context, "whole", epochs=3)] == [each["quality"] for each in results]
    assert read_run(tmp_path / "mine").spec == own_spec(f"{module}:Blobs")
    assert summary(tmp_path / "mine") == ("finished", [1, 2, 3], [("stopped", 2)])


def test_a_trial_whose_log_is_damaged_goes_on_from_before_the_damage(module: str, tmp_path: Path) -> None:
    context, path = context_of(f"{module}:Blobs", tmp_path), tmp_path / "mine" / EVENTS
    take(context, "mine", epochs=2)
    whole = path.read_bytes()
    for damaged, num_done, num_whole in (
        (whole + b"\0\0\0\n", 2, whole.count(b"\n")),  # after a power cut
        (b"\x00\xff\n" + whole.partition(b"\n")[2], 0, 0),
        (whole.partition(b"\n")[2], 0, 0),
    ):
        path.write_bytes(damaged)
        reopen(path.parent)
        assert path.read_bytes() == damaged
        assert take(context, "mine", epochs=1)[0]["epoch"] == num_done + 1
        assert summary(path.parent)[1:] == (list(range(1, num_done + 2)), [("damaged", num_done)])
        told = f"its log is damaged after {num_whole} records; all of it is in {DAMAGED}"
        assert told in read_run(path.parent).interruptions[0].message
        assert (path.parent / DAMAGED).read_bytes() == damaged


@pytest.mark.parametrize(
    ("task", "cause"), [("Diverging", "non_finite"), ("TooLarge", "out_of_memory"), ("HugeModel", "out_of_memory")]
)
def test_a_configuration_that_cannot_train_is_a_result(module: str, tmp_path: Path, task: str, cause: str) -> None:
    context, sample = context_of(f"{module}:{task}", tmp_path), {"rho_high": 0.9, "rho_ratio": 0.5}
    (result,) = take(context, "mine", epochs=1, **sample)
    assert result["done"]
    assert result["objective"] == FAILED_OBJECTIVE < -100.0  # the largest shortfall
    assert read_run(tmp_path / "mine").status == f"failed ({cause})"
    before = files(tmp_path / "mine")
    assert take(context, "mine", epochs=1, **sample)[0]["objective"] == FAILED_OBJECTIVE
    assert files(tmp_path / "mine") == before


@pytest.mark.parametrize(("task", "message"), [("Mistaken", "the shapes do not fit"), ("Missing", "has no Missing")])
def test_a_bug_is_on_record_and_not_tried_again_before_the_search_is_resumed(
    module: str, tmp_path: Path, task: str, message: str
) -> None:
    context, folder = context_of(f"{module}:{task}", tmp_path), tmp_path / "mine"
    with pytest.raises(ValueError, match=message):
        take(context, "mine", epochs=1)
    assert "Traceback" in (folder / ERROR).read_text()
    assert read_run(folder).status == "failed (bug)"
    before = files(folder)
    (result,) = take(context, "mine", epochs=1)
    assert (result["done"], result["unfinished"], bool(result["message"])) == (True, "bug", True)
    assert files(folder) == before
    reopen(folder)
    assert read_run(folder).status == "stopped"
    with pytest.raises(ValueError, match=message):
        take(context, "mine", epochs=1)


def test_a_trial_with_which_another_process_goes_on_ends_and_writes_nothing(module: str, tmp_path: Path) -> None:
    context, folder = context_of(f"{module}:Blobs", tmp_path), tmp_path / "mine"
    given_up, successor = (local_trial(context, {NAME_KEY: "mine"}) for _ in range(2))
    given_up.step()
    results = [successor.step() for _ in range(2)]
    before = files(folder)
    result = given_up.step()
    assert (result["done"], result["unfinished"]) == (True, "taken_over")
    assert "another process has taken this run over" in result["message"]
    given_up.cleanup()
    assert files(folder) == before
    results.append(successor.step())
    successor.cleanup()
    assert [result["epoch"] for result in results] == [1, 2, 3]
    assert summary(folder) == ("finished", [1, 2, 3], [("preempted", 1)])
    other = local_trial(context, {NAME_KEY: "other"})
    other.step()
    end_run(tmp_path / "other", None, End(status="failed", cause="preempted"))  # by somebody who gave it up for lost
    before = files(tmp_path / "other")
    other.cleanup()
    assert files(tmp_path / "other") == before


def test_a_run_of_its_own_goes_on_from_its_checkpoint_and_is_not_trained_twice(module: str, tmp_path: Path) -> None:
    spec, place = own_spec(f"{module}:Blobs", purpose=Purpose.FINAL), StoragePath.of(tmp_path / "run")
    first = local_run(spec, place)
    assert first.step()["epoch"] == 1
    second = local_run(spec, place)
    results = [second.step() for _ in range(2)]
    second.cleanup()
    assert [(result["epoch"], result["done"]) for result in results] == [(2, False), (3, True)]
    assert summary(place.folder) == ("finished", [1, 2, 3], [("preempted", 1)])
    before = files(place.folder)
    assert trained(local_run(spec, place))["epoch"] == 3
    assert files(place.folder) == before
    first.cleanup()
    mistaken, place = own_spec(f"{module}:Mistaken"), StoragePath.of(tmp_path / "mistaken")
    for _ in range(2):  # a failure is tried again
        result = trained(local_run(mistaken, place))
        assert (type(result["error"]), result["is_refused"]) == (ValueError, False)
        assert "in forward" in "".join(traceback.format_exception(result["error"]))
    assert summary(place.folder) == ("failed (bug)", [], [("bug", 0)])


@pytest.mark.parametrize(("between", "expected"), [(0.0, [1, 5]), (150.0, [1, 3, 5]), (200.0, [1, 2, 3, 4, 5])])
def test_checkpoints_take_a_twentieth_of_the_time_but_for_the_last(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: float, expected: list[int]
) -> None:
    spec = own_spec(f"{module}:Blobs", recipe=Recipe(epochs=5, lr=0.05, warmup_epochs=1.0))
    trial, now, saved = local_run(spec, StoragePath.of(tmp_path / "run")), [0.0], []

    def save_slowly(worker: Worker) -> None:
        saved.append(worker.loop.sampler.epoch)
        now[0] += 10.0

    monkeypatch.setattr(Worker, "checkpoint", save_slowly)
    monkeypatch.setattr(worker_module, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time))
    for _ in range(5):
        trial.step()
        now[0] += between
    trial.cleanup()
    assert saved == expected
