"""Processes that are killed and a disk that is full, while a search goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.service.own_task import MODULE
from tests.service.stores import runs
from tests.service.waiting import COMMAND_S, DEADLINE_S, end, wait_until
from triaccel_ray.records.events import Epoch, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.tracking import Tracker

NAMES = ("hunt/fp32", "hunt/amp", "probe", "trial-000", "trial-001")

HELD = """
import os

from tests.service.waiting import HELD_S, recorded_here, wait_until

HERE = Path(__file__).parent


class Held(Blobs):
    # Each process waits after the run's first epoch, as long as there is a file `hold`; its number lies in `held`.
    name = "held"

    def loss(self, outputs, targets, recipe):
        if (HERE / "hold").exists() and b'"kind":"epoch"' in recorded_here():
            (HERE / "held" / str(os.getpid())).touch()
            wait_until(lambda: not (HERE / "hold").exists(), timeout_s=HELD_S)
        return super().loss(outputs, targets, recipe)
"""


@dataclass(frozen=True)
class Desk:
    """A folder with a task module, and the commands that were typed there."""

    folder: Path
    commands: list[subprocess.Popen[str]] = field(default_factory=list)

    def type(self, storage: Path, *words: str) -> subprocess.Popen[str]:
        """Begins a command in a process of its own."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        paths = os.pathsep.join([str(self.folder), os.getcwd()])
        command = subprocess.Popen(
            [sys.executable, "-m", "triaccel_ray.service", *words, "--storage-path", str(storage)],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": paths, "TRIACCEL_CPUS_PER_RUN": "1"},  # two trials side by side
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.commands.append(command)
        return command

    def hold(self) -> None:
        """Lets every process of a trial wait after about an epoch."""
        shutil.rmtree(self.folder / "held", ignore_errors=True)
        (self.folder / "held").mkdir()
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def held(self, command: subprocess.Popen[str], count: int) -> list[int]:
        """Returns the numbers of the processes that wait, once there are `count`."""
        wait_until(lambda: len(self.alive()) == count or command.poll() is not None)
        assert command.poll() is None, command.communicate(timeout=DEADLINE_S)[0]
        return self.alive()

    def alive(self) -> list[int]:
        return [pid for pid in map(int, os.listdir(self.folder / "held")) if alive(pid)]

    def clear(self) -> None:
        """Ends what a test has left: trials that wait, and commands with all their processes."""
        self.release()
        for command in self.commands:
            end(command)
            assert command.stdout is not None
            command.stdout.close()


def done(command: subprocess.Popen[str], *, status: int = 0) -> str:
    said, _ = command.communicate(timeout=COMMAND_S)
    assert command.returncode == status, said
    return said


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task whose trials wait when they are told to."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "held_task.py").write_text(MODULE + HELD)
    return folder


@pytest.fixture
def desk(project: Path) -> Iterator[Desk]:
    made = Desk(project)
    yield made
    made.clear()


@pytest.fixture(scope="module")
def whole(project: Path, cluster_address: str) -> Iterator[Path]:
    """The folder of a search that nothing has disturbed."""
    desk = Desk(project)
    where = ("--device", "cpu", "--address", cluster_address)
    own = ("--trials", "2", "--epochs", "5", "--objective", "pareto", "--margin", "100", "--memory-budget", "8GiB")
    try:
        done(desk.type(project, "search", "held_task:Held", "--name", "whole", *where, *own))
        yield project / "whole"
    finally:
        desk.clear()


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
    """What every run learned and decided; seconds and bytes differ from run to run."""
    told: dict[str, list[Any]] = {}
    for path in sorted(folder.glob(f"*/*/{EVENTS}")):
        told[path.parent.name] = lines = []
        for record in (event.record for event in read_events(path)):
            if isinstance(record, Tick):
                lines.append((record.observation.step, record.observation.loss, record.decision.plan))
            elif isinstance(record, Epoch):
                lines.append((record.epoch, record.step, record.train_loss, record.held_out(Goal())))
    return told


def recorded(storage: Path) -> list[str]:
    tracker = Tracker(f"sqlite:///{storage / 'mlflow.db'}", storage / "artifacts")
    return sorted(run.name for run in runs(tracker, "triaccel-searches"))


def interruptions(folder: Path, *names: str) -> list[list[str]]:
    return [[each.cause for each in read_run(folder / "trials" / name).interruptions] for name in names]


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def two_nodes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(desk.folder), os.getcwd()]))
    node = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, num_gpus=0)
    yield cluster
    cluster.shutdown()


def test_a_search_goes_on_by_itself_when_an_actor_and_a_node_are_lost(
    desk: Desk, whole: Path, two_nodes: Cluster, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    desk.hold()
    command = desk.type(tmp_path, "resume", "hunt", "--address", two_nodes.address)
    trials = desk.held(command, 2)
    (node,) = two_nodes.worker_nodes
    raylet = node.all_processes["raylet"][0].process.pid
    assert len([pid for pid in trials if psutil.Process(pid).ppid() == raylet]) == 1
    # Its trial is not killed: it has to end by itself, while the task's own code waits.
    kill(raylet, *(pid for pid in trials if psutil.Process(pid).ppid() != raylet))
    wait_until(lambda: not any(map(alive, trials)))
    desk.release()
    said = done(command)
    assert "trial-001 was interrupted (preempted)" in said
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted"]] * 2
    assert recorded(tmp_path) == sorted(["hunt", *NAMES])


def test_a_command_whose_head_is_lost_ends_and_says_how_to_go_on(
    desk: Desk, whole: Path, two_nodes: Cluster, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    desk.hold()
    command = desk.type(tmp_path, "resume", "hunt", "--address", two_nodes.address)
    desk.held(command, 2)
    kill(two_nodes.head_node.all_processes["gcs_server"][0].process.pid)
    said = done(command, status=1)
    assert f"the head of the cluster at {two_nodes.address} has not answered for 30 s" in said
    words = f"triaccel resume hunt --storage-path {tmp_path} --address {two_nodes.address}"
    assert said.splitlines()[-1] == words
    desk.release()
    done(desk.type(tmp_path, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)


def test_the_last_of_two_commands_goes_on_with_a_search(
    desk: Desk, whole: Path, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    desk.hold()
    first = desk.type(tmp_path, "resume", "hunt", "--address", cluster_address)
    trials = desk.held(first, 2)
    second = desk.type(tmp_path, "resume", "hunt")
    wait_until(lambda: len(desk.alive()) == 4 or second.poll() is not None)
    desk.release()
    said = done(first, status=2)
    assert "another process has taken this run over" in " ".join(said.split())
    assert "Traceback" not in said
    done(second)
    assert not any(map(alive, trials))
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted"]] * 2
    assert recorded(tmp_path) == sorted(["hunt", *NAMES])


def test_a_search_is_resumed_after_its_driver_and_after_its_head_was_lost(
    desk: Desk, whole: Path, cluster_address: str, tmp_path: Path
) -> None:
    folder = begun(whole, tmp_path)
    before = {path: path.read_bytes() for path in folder.glob(f"baselines/*/{EVENTS}")}
    desk.hold()
    command = desk.type(tmp_path, "resume", "hunt")
    trials = desk.held(command, 2)
    kill(command.pid)
    command.wait(DEADLINE_S)
    wait_until(lambda: not any(map(alive, trials)))  # Ray ends what has lost its driver

    command = desk.type(tmp_path, "resume", "hunt")
    desk.held(command, 2)
    # the head with all its processes, and the command that ran beside it
    kill(*(process.pid for process in psutil.Process(command.pid).children(recursive=True)), command.pid)
    command.wait(DEADLINE_S)

    desk.release()
    done(desk.type(tmp_path, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)
    assert interruptions(folder, "trial-000", "trial-001") == [["preempted", "preempted"]] * 2
    assert recorded(tmp_path) == sorted(["hunt", *NAMES])
    # what has ended is not touched
    assert {path: path.read_bytes() for path in before} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounting.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_stops_a_search_and_loses_nothing(
    desk: Desk, whole: Path, cluster_address: str, small_disk: Path
) -> None:
    folder = begun(whole, small_disk)
    desk.hold()
    command = desk.type(small_disk, "resume", "hunt", "--address", cluster_address)
    desk.held(command, 2)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    desk.release()
    said = done(command, status=2)
    assert "is full: make room, then go on with `triaccel resume`" in " ".join(said.split())
    assert "Traceback" not in said
    assert "[SQL: " not in said

    (small_disk / "filler").unlink()
    done(desk.type(small_disk, "resume", "hunt", "--address", cluster_address))
    assert outcome(folder) == outcome(whole)
    assert recorded(small_disk) == sorted(["hunt", *NAMES])
