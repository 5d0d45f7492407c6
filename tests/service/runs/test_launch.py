"""What becomes of runs, on a real Ray: those that finish, fail, are refused or are cut off."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.exceptions import RayTaskError
from torch import Tensor

from tests.service.build import SimulatedRun
from tests.service.own_task import own_spec
from tests.service.runs.several import Several
from triaccel_ray.records.events import End, Start, read_events
from triaccel_ray.service.failures import RunFailedError, StoreError
from triaccel_ray.service.runs.launch import _end_if_unfinished, _without_ray_wrapper, fit, run_all
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.trial import NAME_KEY, TrialContext
from triaccel_ray.service.storage.layout import SPEC, write_value
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe


class Mistaken(Several):
    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        if len(targets) > 2:  # not when two samples are tried beforehand
            raise KeyError("a mistake in the loss")
        return super().loss(outputs, targets, recipe)


@pytest.mark.usefixtures("own_ray")
def test_each_run_ends_its_own_way(tmp_path: Path) -> None:
    assert run_all({}, StoragePath(str(tmp_path)), num_gpus=0) == {}
    specs = {
        "good": own_spec(f"{Several.__module__}:Several", purpose=Purpose.FINAL),
        "mistaken": own_spec(f"{__name__}:Mistaken"),
        "refused": own_spec(f"{Several.__module__}:Several", memory_budget_bytes=2**20),
    }
    failures = run_all(specs, StoragePath(str(tmp_path)), num_gpus=0)
    assert list(failures) == ["mistaken", "refused"]
    assert isinstance(failures["mistaken"], RunFailedError)
    assert "mistaken failed: KeyError: 'a mistake in the loss'" in str(failures["mistaken"])
    assert type(failures["refused"]) is ValueError
    assert "memory budget = 1 MiB" in str(failures["refused"])
    assert failures["refused"].__notes__[-1] == "raised by the run refused"
    good, mistaken = (read_run(tmp_path / name) for name in ("good", "mistaken"))
    assert (good.status, [epoch.epoch for epoch in good.epochs]) == ("finished", [1, 2, 3])
    assert (mistaken.status, mistaken.interruptions) == ("failed (bug)", ())
    assert not (tmp_path / "refused").exists()
    assert ray.is_initialized()


class _OnlyHere:
    """Finds the spec of a run in this process, and fails in that of a trial, before it has begun."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._process = spec, os.getpid()

    def __call__(self, config: Mapping[str, Any]) -> RunSpec:
        if os.getpid() != self._process:
            raise KeyError("not on this machine")
        return self._spec


@pytest.mark.usefixtures("own_ray")
def test_a_run_whose_process_never_starts_has_failed(tmp_path: Path) -> None:
    context = TrialContext(place=StoragePath(str(tmp_path)), spec_of=_OnlyHere(own_spec("digits")))
    found = fit(context, tune.TuneConfig(), num_gpus=0, space={NAME_KEY: tune.grid_search(["run"])})
    assert "error raised in its creation task" in str(found["run"]["error"])
    assert read_run(tmp_path / "run").status == "failed (preempted)"


def test_a_run_whose_process_had_no_time_to_end_its_log_was_stopped(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "run")
    run.start()
    write_value(run.folder / SPEC, own_spec("digits"))
    for _ in range(2):
        _end_if_unfinished(StoragePath.of(run.folder))
        assert [type(event.record) for event in read_events(run.path)] == [Start, End]
    assert read_run(run.folder).status == "stopped"
    _end_if_unfinished(StoragePath.of(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_why_tune_gave_a_trial_up_is_told_without_rays_wrapping() -> None:
    raised = RayTaskError("train", "the traceback", StoreError("out of reach"))
    assert str(_without_ray_wrapper(raised.as_instanceof_cause())) == "out of reach"
    assert str(_without_ray_wrapper("a text")) == "a text"
