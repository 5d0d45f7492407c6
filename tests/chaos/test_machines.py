"""A search on a cluster of several machines, here several raylets, that come and go."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.autoscaler.v2.sdk import get_cluster_status

from tests.service.own_task import own_spec
from tests.service.ray_head import machines, ray_node
from tests.service.waiting import DEADLINE_S, end, wait_until
from triaccel_ray.records.events import Epoch, Event, read_events
from triaccel_ray.service.cluster.cluster import cluster, gpu_fraction, require_gpus
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.shared_data import share_splits
from triaccel_ray.service.search.search import Prepared, read_search, tune_trials
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import SEARCH, create_with_spec
from triaccel_ray.service.storage.storage_path import StoragePath

MODULE = """
from dataclasses import replace
from pathlib import Path

import ray
from tests.build import blobs, mlp
from tests.service.waiting import HELD_S, wait_until
from triaccel_ray.trainables.task import Splits, Task
from triaccel_ray.model.metrics import ACCURACY, top1
from triaccel_ray.data.sources import TensorSource

HERE = Path(__file__).parent


def note(what):
    with (HERE / what).open("a") as file:
        file.write(f"{ray.get_runtime_context().get_node_id()}\\n")


class Held(Task):
    # Trials wait at the end of their second epoch until the test lets them go on.
    is_noted, judged = False, 0

    def model(self):
        if not self.is_noted:  # before a run, others are tried
            note("trials-on")
        self.is_noted = True
        return mlp()

    def data(self, purpose):
        note("read-on")
        return Splits(train=TensorSource(*blobs(160)), held_out=TensorSource(*blobs(8, seed=1)))

    @property
    def metrics(self):
        return {"accuracy": replace(ACCURACY, values=self.judge)}

    def judge(self, outputs, targets):
        self.judged += len(targets) == 8  # all that are held out: what is tried before a run is judged on other numbers
        if self.judged == 2:
            wait_until(lambda: not (HERE / "hold").exists(), timeout_s=HELD_S)
        return top1(outputs, targets)
"""


class Project:
    """A folder with a task whose trials wait, and a search in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.search = folder, folder / "hunt"
        (folder / "held_task.py").write_text(MODULE)
        (folder / "hold").touch()

    def let_go(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def nodes(self, what: str) -> list[str]:
        """Where what is noted has happened, in order."""
        path = self.folder / what
        return path.read_text().split() if path.exists() else []

    def first_epochs(self) -> dict[str, Event]:
        """The record of each trial's first epoch."""
        paths = self.search.glob("trials/*/events.jsonl")
        events = [(path.parent.name, event) for path in paths for event in read_events(path)]
        return {name: each for name, each in events if isinstance(each.record, Epoch) and each.record.epoch == 1}

    def wait_for_trials(self, count: int) -> None:
        """Returns once so many trials have done their first epoch."""
        wait_until(lambda: len(self.first_epochs()) >= count, say=lambda: self.nodes("trials-on"))


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of one machine with two CPUs and one GPU, which is logical."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    monkeypatch.syspath_prepend(str(tmp_path))
    with machines(num_cpus=2, num_gpus=1) as made:
        yield made.address


def test_machines_that_join_take_trials_and_those_that_leave_lose_none(tmp_path: Path, head: str) -> None:
    project = Project(tmp_path)
    uncut: Any = {"space": "thresholds-absolute", "objective": "pareto"}  # no probe, and nothing is stopped early
    spec = SearchSpec(base=own_spec("held_task:Held", device="auto", trials_per_gpu=2), num_trials=3, **uncut)
    create_with_spec(project.search, SEARCH, spec)
    require_gpus(head, spec.base)
    before: dict[str, Event] = {}
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            project.wait_for_trials(2)  # they share the head's GPU, and no third one fits
            (first,) = set(project.nodes("trials-on"))
            words = (f"--address={head}", "--num-cpus=1", "--num-gpus=1")
            with ray_node(*words, env=os.environ, log=tmp_path / "joining.log"):
                project.wait_for_trials(3)  # while the others still wait for the end of their second epoch
                assert len(project.nodes("trials-on")) == 3
                assert project.nodes("trials-on")[2] != first
                before.update(project.first_epochs())
        except BaseException as error:
            failures.append(error)
        project.let_go()

    prepared = Prepared(objective=Objective(name="metric"), calibration=None, headroom_bytes=None)
    thread = threading.Thread(target=come_and_go)
    with cluster(head):
        shared = share_splits(spec.base)
        thread.start()
        tune_trials(spec, prepared, StoragePath.of(project.search), num_gpus=gpu_fraction(2), shared=shared)
        thread.join()
    assert not failures
    trials = read_search(project.search).trials
    assert [run.status for run in trials] == ["finished"] * 3
    assert {run.start.info["trials_per_gpu"] for run in trials} == {"2"}
    first, second, other, back = project.nodes("trials-on")
    assert first == second == back != other  # the third trial went on at the head
    assert project.first_epochs() == before  # from its checkpoint: what had been done was not done again
    assert len(project.nodes("read-on")) == 1  # and nobody but the driver has read the samples


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that joins is to be none, so that the run ends at once")
def test_a_run_that_needs_a_gpu_waits_for_a_machine_with_one(tmp_path: Path) -> None:
    storage, said = tmp_path / "runs", tmp_path / "said"
    with machines() as made, contextlib.ExitStack() as stack:
        words = ("run", "digits", "--device", "cuda", "--address", made.address, "--storage-path", str(storage))
        command = subprocess.Popen(
            [sys.executable, "-m", "triaccel_ray.service", *words],
            stdout=stack.enter_context(said.open("wb")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(end, command)
        waits = "the cluster has 0 GPUs now: the run waits for 1"
        wait_until(lambda: waits in said.read_text() or command.poll() is not None)
        with cluster(made.address):
            wait_until(lambda: {"GPU": 1.0, "CPU": 1.0} in _waited_for() or command.poll() is not None)
        assert command.poll() is None, said.read_text()
        made.add_node(num_cpus=1, num_gpus=1)
        assert command.wait(DEADLINE_S) == 2
    assert "no CUDA device is visible" in said.read_text()  # asked of the machine that joined, whose GPU is logical


def _waited_for() -> list[dict[str, float]]:
    """What is asked of the cluster and not there: what an autoscaler goes by."""
    state = get_cluster_status(ray.get_runtime_context().gcs_address)
    return [
        bundle.bundle for demand in state.resource_demands.placement_group_demand for bundle in demand.bundles_by_count
    ]
