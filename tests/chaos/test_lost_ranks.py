"""Runs on several GPUs, here gloo processes on CPUs, that lose ranks, machines or their trial, on a real Ray."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor

from tests.build import blobs
from tests.service.ray_head import ray_node
from tests.service.runs.several import NUM_SAMPLES, Noting, Several, samples_of_epochs, several_spec
from tests.service.waiting import HELD_S, wait_until
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.events import Epoch, Event, Interruption, read_events
from triaccel_ray.service.cluster.cluster import cluster
from triaccel_ray.service.failures import MAX_LOSSES, RunFailedError
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.runs import run_all
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
    name = "mortal"

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


def processes(name: str) -> list[int]:
    found = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"]]
    return [each.pid for each in found if each.info["cmdline"][0].startswith(f"ray::{name}")]


def assert_whole(folder: Path) -> None:
    """Checks that the run has finished, and that each of its epochs has trained on each sample once."""
    run = read_run(folder / "run")
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", list(range(1, RECIPE.epochs + 1)))
    assert samples_of_epochs(folder) == WHOLE
    wait_until(lambda: not processes("RayTrainWorker"), say=lambda: processes("RayTrainWorker"))


@pytest.mark.usefixtures("own_ray")
def test_ranks_that_are_killed_at_random_steps_cost_no_sample(tmp_path: Path) -> None:
    chance = random.Random(1)
    doom = [f"{chance.randrange(2)} {chance.randint(1, 9)}" for _ in range(MAX_LOSSES)]
    (tmp_path / DOOM).write_text("\n".join(doom))
    assert trained(tmp_path, "2") is None
    assert len(lines(tmp_path / DEATHS)) == MAX_LOSSES
    assert_whole(tmp_path)
    found = interruptions(tmp_path)
    attempts = {line.split()[0] for line in lines(tmp_path / DEATHS)}  # in one of which both ranks may have died
    assert [(each.cause, each.world_size) for each in found] == [("preempted", 2)] * len(attempts)
    assert all(each.seconds_lost is not None and each.seconds_lost > 0 for each in found)


@pytest.mark.usefixtures("own_ray")
def test_a_group_that_is_lost_too_often_has_failed(tmp_path: Path) -> None:
    (tmp_path / DOOM).write_text("\n".join(["1 2"] * (MAX_LOSSES + 1)))
    error = trained(tmp_path, "2")
    assert isinstance(error, RunFailedError)
    assert error.cause == "preempted"
    assert f"a process was lost {MAX_LOSSES + 1} times, the last time so: " in str(error)
    assert len(interruptions(tmp_path)) == MAX_LOSSES
    assert read_run(tmp_path / "run").status == "failed (preempted)"


@pytest.mark.usefixtures("own_ray")
def test_a_group_whose_trial_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / HOLD).touch()
    orphans: list[int] = []

    def kill() -> None:
        wait_until(lambda: sum(isinstance(each.record, Epoch) for each in events(tmp_path)) == 2)
        orphans.extend(processes("RayTrainWorker"))
        (trial,) = processes("ResourceTrainable")
        os.kill(trial, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, orphans)))
        wait_until(lambda: interruptions(tmp_path))  # the new group found room, though the old one had taken all

    assert trained(tmp_path, "2", kill) is None
    assert len(orphans) == 2
    assert_whole(tmp_path)
    assert [(each.cause, each.epoch) for each in interruptions(tmp_path)] == [("preempted", 2)]
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


@pytest.fixture
def machines() -> Iterator[Cluster]:
    """A head and two other machines, with a CPU each."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1, num_gpus=0)
    yield made
    made.shutdown()


def test_an_elastic_group_shrinks_and_grows_with_the_cluster(tmp_path: Path, machines: Cluster) -> None:
    (tmp_path / HOLD).touch()
    sizes: list[tuple[str, int, int]] = []

    def come_and_go() -> None:
        wait_until(lambda: sum(isinstance(each.record, Epoch) for each in events(tmp_path)) == 2)
        for change in (lambda: machines.remove_node(next(iter(machines.worker_nodes)), allow_graceful=False), add):
            before = len(interruptions(tmp_path))
            change()
            wait_until(
                lambda before=before: len(interruptions(tmp_path)) > before,
                timeout_s=HELD_S,
                say=lambda: (sizes, [each["Alive"] for each in ray.nodes()], processes("")),
            )
            last = interruptions(tmp_path)[-1]
            sizes.append((last.cause, last.world_size_before, last.world_size))

    def add() -> None:
        words = (f"--address={machines.address}", "--num-cpus=1", "--num-gpus=0")
        joined.enter_context(ray_node(*words, env=os.environ, log=tmp_path / "joining.log"))

    with contextlib.ExitStack() as joined, cluster(machines.address):
        assert trained(tmp_path, "2..3", come_and_go) is None
    assert sizes == [("preempted", 3, 2), ("resized", 2, 3)]
    assert_whole(tmp_path)
