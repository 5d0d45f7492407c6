"""A run whose process dies at every start, on a real Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import Tensor

from tests.service.own_task import own_spec
from tests.service.runs.several import Several
from tests.service.waiting import recorded_here
from triaccel_ray.config import ControlConfig
from triaccel_ray.service.failures import MAX_LOSSES, RunFailedError
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import CHECKPOINT
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Recipe

pytestmark = pytest.mark.usefixtures("own_ray")


class Mortal(Several):
    """Its data folder is the run's own: as long as there is a file `doomed`, the process dies in the second epoch."""

    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        folder = self.data_dir
        assert folder is not None
        is_due = (folder / CHECKPOINT).exists() and b'"kind":"tick"' in recorded_here().rpartition(b"\n{")[2]
        if is_due and (folder / "doomed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets, recipe)


def test_a_run_that_is_lost_too_often_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    (folder / "doomed").touch()
    specs = {"lost": own_spec(f"{__name__}:Mortal", control=ControlConfig(every_steps=2), data_dir=str(folder))}
    error = run_all(specs, StoragePath(str(tmp_path)), num_gpus=0)["lost"]
    assert isinstance(error, RunFailedError)
    assert error.cause == "preempted"
    assert f"lost failed (preempted): its process was lost {MAX_LOSSES + 1} times, the last time so: " in str(error)
    assert f"its log and last checkpoint are in {folder}" in str(error)
    run = read_run(folder)
    assert [(each.cause, each.epoch) for each in run.interruptions] == [("preempted", 1)] * MAX_LOSSES
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("failed (preempted)", [1])
    (folder / "doomed").unlink()
    assert run_all(specs, StoragePath(str(tmp_path)), num_gpus=0) == {}
    again = read_run(folder)
    assert again.status == "finished"
    assert len(again.interruptions) == MAX_LOSSES + 1
