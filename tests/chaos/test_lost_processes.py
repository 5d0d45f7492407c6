"""Runs whose actor's process is killed while they train, on a real Ray."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.build import blobs, mlp
from tests.service.own_task import own_spec
from tests.service.waiting import HELD_S, recorded_here, wait_until
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.events import Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.failures import MAX_LOSSES, RunFailedError
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.storage.layout import CHECKPOINT, EVENTS
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe, Splits, Task

pytestmark = pytest.mark.usefixtures("own_ray")

MORTAL, DOOMED, PID = "mortal", "doomed", "pid"
FIXED = ControlConfig(every_steps=2, batch=BatchConfig(enabled=False, start=32))
"""The batch does not follow the memory, which differs from process to process."""


class Mortal(Task):
    """Its data folder is the run's own; what lies there says what happens in the second epoch.

    With a file `doomed` the process kills itself, with `mortal` it writes its number to `pid` and waits.
    """

    name = "mortal"

    def model(self) -> nn.Module:
        return mlp()

    def data(self, purpose: Purpose) -> Splits:
        return Splits(train=TensorSource(*blobs(160)), held_out=TensorSource(*blobs(50, seed=1)))

    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        folder = self.data_dir
        assert folder is not None
        is_due = (folder / CHECKPOINT).exists() and b'"kind":"tick"' in recorded_here().rpartition(b"\n{")[2]
        if is_due and (folder / DOOMED).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if is_due and (folder / MORTAL).exists():
            (folder / PID).write_text(f"{os.getpid()}\n")
            wait_until(lambda: not (folder / MORTAL).exists(), timeout_s=HELD_S)
        return super().loss(outputs, targets, recipe)


def learned(run: RunRecord) -> list[tuple[object, ...]]:
    """What a run learned and decided; seconds and bytes differ from run to run."""
    records = [event.record for event in read_events(run.folder / EVENTS)]
    ticks = [record for record in records if isinstance(record, Tick)]
    return [
        *((epoch.epoch, epoch.step, epoch.train_loss, epoch.held_out(Goal())) for epoch in run.epochs),
        *((tick.observation.step, tick.observation.loss, tick.decision.plan) for tick in ticks),
    ]


def test_a_run_whose_process_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    specs = {}
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
        specs[name] = own_spec(f"{__name__}:Mortal", control=FIXED, data_dir=str(tmp_path / name))
    (tmp_path / "killed" / MORTAL).touch()

    def kill_in_the_second_epoch() -> None:
        pid = tmp_path / "killed" / PID
        wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        os.kill(int(pid.read_text()), signal.SIGKILL)
        (tmp_path / "killed" / MORTAL).unlink()

    killing = threading.Thread(target=kill_in_the_second_epoch)
    killing.start()
    assert run_all(specs, StoragePath(str(tmp_path)), num_gpus=0) == {}
    killing.join()
    killed, whole = (read_run(tmp_path / name) for name in specs)
    assert killed.status == whole.status == "finished"
    (interruption,) = killed.interruptions
    assert (interruption.cause, interruption.epoch) == ("preempted", 1)
    assert interruption.message == "the process or its node was lost; goes on after epoch 1"
    assert whole.interruptions == ()
    assert learned(killed) == learned(whole)


def test_a_run_that_is_lost_too_often_has_failed(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    folder.mkdir()
    (folder / DOOMED).touch()
    specs = {"lost": own_spec(f"{__name__}:Mortal", control=FIXED, data_dir=str(folder))}
    error = run_all(specs, StoragePath(str(tmp_path)), num_gpus=0)["lost"]
    assert isinstance(error, RunFailedError)
    assert error.cause == "preempted"
    assert f"lost failed (preempted): its process was lost {MAX_LOSSES + 1} times, the last time so: " in str(error)
    assert f"its log and last checkpoint are in {folder}" in str(error)
    run = read_run(folder)
    assert [(each.cause, each.epoch) for each in run.interruptions] == [("preempted", 1)] * MAX_LOSSES
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("failed (preempted)", [1])
    (folder / DOOMED).unlink()
    assert run_all(specs, StoragePath(str(tmp_path)), num_gpus=0) == {}
    again = read_run(folder)
    assert again.status == "finished"
    assert len(again.interruptions) == MAX_LOSSES + 1
