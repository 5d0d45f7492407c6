"""A task whose ranks die where a test says so, and its training through the service."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.build import blobs
from tests.service.runs.several import (
    NUM_SAMPLES,
    Noting,
    Several,
    attempts_at_epochs,
    samples_of_epochs,
    several_spec,
)
from tests.service.waiting import HELD_S, processes, wait_until
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.events import Epoch, Event, Interruption, read_events
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose, Recipe, Splits

DOOM, DEATHS, HOLD = "doom", "deaths", "hold"
RECIPE = Recipe(epochs=6, lr=0.05, warmup_epochs=1.0)
WHOLE = {epoch: list(range(NUM_SAMPLES)) for epoch in range(RECIPE.epochs)}


class Dying(Noting):
    """Kills its process at the next step that DOOM lists as `rank step`, and waits in epoch 2 while there is HOLD."""

    num_steps = 0

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if None not in (generator, self.epoch, self.folder):
            assert self.folder is not None
            home = self.folder.parent
            self.num_steps += 1
            if self.epoch == 2:
                wait_until(lambda: not (home / HOLD).exists(), timeout_s=HELD_S)
            deaths, doom = lines(home / DEATHS), lines(home / DOOM)
            if doom[len(deaths) : len(deaths) + 1] == [f"{os.environ['RANK']} {self.num_steps}"]:
                with (home / DEATHS).open("a") as file:
                    file.write(f"{os.environ['MASTER_PORT']} {time.time()}\n")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(indices, generator)


class Mortal(Several):
    def data(self, purpose: Purpose) -> Splits:
        assert self.data_dir is not None
        train = Dying(*blobs(NUM_SAMPLES))
        train.folder = self.data_dir / "seen"
        return Splits(train=train, held_out=TensorSource(*blobs(50, seed=1)))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def events(folder: Path) -> list[Event]:
    path = folder / "run" / EVENTS
    return list(read_events(path)) if path.exists() else []


def interruptions(folder: Path) -> list[Interruption]:
    return [event.record for event in events(folder) if isinstance(event.record, Interruption)]


def wait_for_epochs(folder: Path, count: int) -> None:
    wait_until(lambda: sum(isinstance(each.record, Epoch) for each in events(folder)) == count)


def trained(folder: Path, gpus: str, meanwhile: Callable[[], None] = lambda: None) -> Exception | None:
    """Trains the run, and returns its error; `meanwhile` runs in another thread."""
    spec = several_spec(f"{__name__}:Mortal", recipe=RECIPE, data_dir=str(folder), gpus=gpus)
    failures: list[BaseException] = []

    def act() -> None:
        try:
            meanwhile()
        except BaseException as error:
            failures.append(error)
        (folder / HOLD).unlink(missing_ok=True)

    thread = threading.Thread(target=act)
    thread.start()
    error = run_all({"run": spec}, StoragePath(str(folder)), num_gpus=0).get("run")
    thread.join()
    assert not failures, failures
    return error


def assert_whole(folder: Path) -> None:
    """Checks that the run has finished, trained each epoch on each sample once, and repeated only what was lost."""
    run = read_run(folder / "run")
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", list(range(1, RECIPE.epochs + 1)))
    assert samples_of_epochs(folder) == WHOLE
    for attempts in attempts_at_epochs(folder).values():
        assert len(attempts) <= 1 + len(interruptions(folder))
        assert all(len(samples) == len(set(samples)) for samples in attempts)
    wait_until(lambda: not processes("RayTrainWorker"), say=lambda: processes("RayTrainWorker"))
