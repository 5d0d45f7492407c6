"""Processes that are killed and a disk that is full, while a search goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.chaos.shell import Shell, alive, done, fill, kill, still_runs
from tests.service.mlflow_server import Recorded, assert_equals_log, history, runs
from tests.service.own_task import MODULE
from tests.service.waiting import DEADLINE_S, wait_until
from triaccel_ray.records.events import Epoch, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.tracker import Tracker

NAMES = ("fp32 of hunt", "amp of hunt", "probe", "trial-000", "trial-001")

HELD = """
import os

from tests.service.waiting import COMMAND_S, HELD_S, recorded_here, wait_until

HERE = Path(__file__).parent


class Held(Blobs):
    # Each process waits at a tick after the run's first epoch, as long as there is a file `hold`; its number lies in
    # `held`.

    def loss(self, outputs, targets, recipe):
        _, epoch, second = recorded_here().partition(b'"kind":"epoch"')
        if (HERE / "hold").exists() and b'"kind":"tick"' in second:
            (HERE / "held" / str(os.getpid())).touch()
            wait_until(lambda: not (HERE / "hold").exists(), timeout_s=HELD_S)
        return super().loss(outputs, targets, recipe)
"""


@dataclass(frozen=True)
class SearchShell(Shell):
    """Where two trials run side by side."""

    def hunt(self, storage: Path, *words: str) -> subprocess.Popen[str]:
        return self.type(*words, "--storage-path", str(storage), TRIACCEL_CPUS_PER_RUN="1")

    def hold(self) -> None:
        """Lets every process of a trial wait after about an epoch."""
        shutil.rmtree(self.folder / "held", ignore_errors=True)
        (self.folder / "held").mkdir()
        (self.folder / "hold").touch()

    def held(self, command: subprocess.Popen[str], count: int) -> list[int]:
        """Returns the numbers of the processes that wait, once there are `count`."""
        still_runs(command, lambda: len(self.alive()) == count)
        return self.alive()

    def alive(self) -> list[int]:
        return [pid for pid in map(int, os.listdir(self.folder / "held")) if alive(pid)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task whose trials wait when they are told to."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "held_task.py").write_text(MODULE + HELD)
    return folder


@pytest.fixture
def shell(project: Path) -> Iterator[SearchShell]:
    made = SearchShell(project)
    yield made
    made.clear()


@pytest.fixture(scope="module")
def whole(project: Path, cluster_address: str) -> Iterator[Path]:
    """The folder of a search that nothing has disturbed."""
    shell = SearchShell(project)
    where = ("--device", "cpu", "--address", cluster_address)
    own = ("--trials", "2", "--epochs", "5", "--objective", "pareto", "--margin", "100", "--memory-budget", "8GiB")
    own += ("--revert-slowdowns", "off")  # time, which differs from run to run, is to decide nothing
    try:
        done(shell.hunt(project, "search", "held_task:Held", "--name", "whole", *where, *own))
        yield project / "whole"
    finally:
        shell.clear()


def begun(whole: Path, storage: Path) -> Path:
    """The folder of the same search before its first trial."""
    folder = storage / "hunt"
    for path in (whole / "baselines").iterdir():
        (folder / "baselines" / path.name).mkdir(parents=True)
        for name in (EVENTS, "spec.json"):
            shutil.copy(path / name, folder / "baselines" / path.name)
    for name in ("search.json", "prepared.json"):
        shutil.copy(whole / name, folder)
    return folder


def outcome(folder: Path) -> dict[str, list[Any]]:
    """What every run learned and decided; seconds and bytes differ from run to run, and with them which is the best."""
    told: dict[str, list[Any]] = {}
    for path in sorted(folder.glob(f"[bt]*/*/{EVENTS}")):
        told[path.parent.name] = lines = []
        for record in (event.record for event in read_events(path)):
            if isinstance(record, Tick):
                lines.append((record.observation.step, record.observation.loss, record.decision.plan))
            elif isinstance(record, Epoch):
                lines.append((record.epoch, record.step, record.train_loss, record.held_out(Goal())))
    return told


def tracker_of(storage: Path) -> Tracker:
    return Tracker(f"sqlite:///{storage / 'mlflow.db'}", storage / "artifacts")


def recorded(storage: Path) -> dict[str, Recorded]:
    """The runs in MLflow by name; each equals its log, value by value."""
    found = {run.name: run for run in runs(tracker_of(storage), "triaccel-searches") if "-again-" not in run.name}
    for name, run in found.items():
        for log in (storage / "hunt").glob(f"*/{name.removesuffix(' of hunt')}/{EVENTS}"):
            assert assert_equals_log(tracker_of(storage), run, log) > 0
    return found


def has_shipped(storage: Path, name: str) -> bool:
    """Whether MLflow has the last tick of a trial."""
    steps = [
        event.record.observation.step
        for event in read_events(storage / "hunt" / "trials" / name / EVENTS)
        if isinstance(event.record, Tick)
    ]
    found = [run for run in runs(tracker_of(storage), "triaccel-searches") if run.name == name]
    return any(step == steps[-1] for run in found for step, _, _ in history(tracker_of(storage), run.id, "train/loss"))


def interruptions(folder: Path, *names: str) -> list[list[str]]:
    return [[each.cause for each in read_run(folder / "trials" / name).interruptions] for name in names]


@pytest.fixture
def two_nodes(shell: SearchShell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(shell.folder), os.getcwd()]))
    node = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, num_gpus=0)
    yield cluster
    cluster.shutdown()


def test_a_search_goes_on_by_itself_when_an_actor_and_a_node_are_lost(
    shell: SearchShell, whole: Path, two_nodes: Cluster, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    shell.hold()
    command = shell.hunt(tmp_path, "resume", "hunt", "--address", two_nodes.address)
    trials = shell.held(command, 2)
    for name in ("trial-000", "trial-001"):  # more than their checkpoints hold
        wait_until(lambda name=name: has_shipped(tmp_path, name))
    (node,) = two_nodes.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    assert len([pid for pid in trials if psutil.Process(pid).ppid() == raylet]) == 1
    # Its trial is not killed: it has to end by itself, while the task's own code waits.
    kill(raylet, *(pid for pid in trials if psutil.Process(pid).ppid() != raylet))
    wait_until(lambda: not any(map(alive, trials)))
    shell.release()
    said = done(command)
    assert "trial-001 was interrupted (preempted)" in said
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted"]] * 2
    found = recorded(tmp_path)
    assert found.keys() == {"hunt", *NAMES}
    assert {name for name, run in found.items() if "replaces" in run.tags} == {"trial-000", "trial-001"}


def test_a_command_whose_head_is_lost_ends_and_can_be_resumed(
    shell: SearchShell, whole: Path, two_nodes: Cluster, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    shell.hold()
    command = shell.hunt(tmp_path, "resume", "hunt", "--address", two_nodes.address)
    shell.held(command, 2)
    kill(two_nodes.head_node.all_processes["gcs_server"][0].process.pid)
    said = done(command, status=1)
    assert f"the head of the cluster at {two_nodes.address} has not answered for 30 s" in said
    shell.release()
    done(shell.hunt(tmp_path, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)


def test_the_last_of_two_commands_goes_on_with_a_search(
    shell: SearchShell, whole: Path, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    shell.hold()
    first = shell.hunt(tmp_path, "resume", "hunt", "--address", cluster_address)
    trials = shell.held(first, 2)
    second = shell.hunt(tmp_path, "resume", "hunt")
    wait_until(lambda: len(shell.alive()) == 4 or second.poll() is not None)
    shell.release()
    said = done(first, status=2)
    assert "another process has taken this run over" in " ".join(said.split())
    assert "Traceback" not in said
    done(second)
    assert not any(map(alive, trials))
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted"]] * 2
    assert recorded(tmp_path).keys() == {"hunt", *NAMES}


def test_a_search_is_resumed_after_its_driver_and_after_its_head_was_lost(
    shell: SearchShell, whole: Path, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    before = {path: path.read_bytes() for path in folder.glob(f"baselines/*/{EVENTS}")}
    shell.hold()
    command = shell.hunt(tmp_path, "resume", "hunt")
    trials = shell.held(command, 2)
    wait_until(lambda: has_shipped(tmp_path, "trial-000"))
    kill(command.pid)
    command.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, trials)))  # Ray ends what has lost its driver

    command = shell.hunt(tmp_path, "resume", "hunt")
    shell.held(command, 2)
    # the head with all its processes, and the command that ran beside it
    kill(*(process.pid for process in psutil.Process(command.pid).children(recursive=True)), command.pid)
    command.wait(DEADLINE_S)

    shell.release()
    done(shell.hunt(tmp_path, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted", "preempted"]] * 2
    assert recorded(tmp_path).keys() == {"hunt", *NAMES}
    # what has ended is not touched
    assert {path: path.read_bytes() for path in before} == before


def test_a_full_disk_stops_a_search_and_loses_nothing(
    shell: SearchShell, whole: Path, cluster_address: str, small_disk: Path
) -> None:
    folder = begun(whole, small_disk)
    shell.hold()
    command = shell.hunt(small_disk, "resume", "hunt", "--address", cluster_address)
    shell.held(command, 2)
    filler = fill(small_disk)
    shell.release()
    said = done(command, status=2)
    assert "is full: make room, then go on with `triaccel resume`" in " ".join(said.split())
    assert "Traceback" not in said
    assert "[SQL: " not in said

    filler.unlink()
    done(shell.hunt(small_disk, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)
    assert recorded(small_disk).keys() == {"hunt", *NAMES}
