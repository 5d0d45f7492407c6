"""What MLflow holds of a run that was lost after it had recorded more than its checkpoint, under memory pressure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.chaos.desk import Desk, alive, done, kill, still_runs
from tests.service.own_task import MODULE
from tests.service.stores import assert_equals_log, history, only_run, runs
from tests.service.waiting import DEADLINE_S, wait_until
from triaccel_ray.records.events import Epoch, Interruption, Tick, read_events
from triaccel_ray.service.tracking.tracking import Tracker

PRESSED = """
import json
import mmap
import os
from dataclasses import replace

from tests.service.waiting import HELD_S, wait_until

HERE = Path(__file__).parent
BALLAST = []


class Pressed(Blobs):
    # The first process holds memory that later ones do not, so that batches differ. After two epochs it waits at the
    # third tick that no checkpoint holds; its number lies in `held`.
    name = "pressed"
    recipe = Recipe(epochs=5, lr=0.05, warmup_epochs=1.0)
    batch = replace(Blobs.control.batch, rho_low=0.5, rho_high=0.7, oom_cooldown_ticks=1)
    control = replace(Blobs.control, batch=batch)

    def loss(self, outputs, targets, recipe):
        if (HERE / "hold").exists():
            if not BALLAST and (HERE / "log").exists():
                BALLAST.append(mmap.mmap(-1, 320 * 2**20))  # not of the heap, which would count as idle
                BALLAST[0].write(b"1" * len(BALLAST[0]))
            lines = (HERE / "log").read_text().splitlines() if (HERE / "log").exists() else []
            kinds = [json.loads(line)["kind"] for line in lines]
            if kinds.count("epoch") >= 2 and kinds[-3:] == ["tick"] * 3:
                (HERE / "held").write_text(str(os.getpid()))
                wait_until(lambda: not (HERE / "hold").exists(), timeout_s=HELD_S)
        return super().loss(outputs, targets, recipe)
"""


@dataclass(frozen=True)
class PressedDesk(Desk):
    """With storage, and a cluster that trains."""

    address: str = ""

    @property
    def tracker(self) -> Tracker:
        return Tracker(f"sqlite:///{self.folder}/storage/mlflow.db", self.folder / "storage" / "artifacts")

    @property
    def log(self) -> Path:
        return self.folder / "storage" / "r" / "events.jsonl"

    def record(self, *words: str) -> subprocess.Popen[str]:
        return self.type(*words, "--storage-path", str(self.folder / "storage"), "--address", self.address)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head that trains nothing, and a machine that does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    node = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(num_cpus=1, num_gpus=0)
    yield made
    made.shutdown()


@pytest.fixture
def desk(tmp_path: Path, cluster: Cluster) -> Iterator[PressedDesk]:
    (tmp_path / "pressed_task.py").write_text(MODULE + PRESSED)
    (tmp_path / "hold").touch()
    made = PressedDesk(tmp_path, address=cluster.address)
    (tmp_path / "log").symlink_to(made.log)
    yield made
    made.clear()


@pytest.mark.parametrize("lost", ["actor", "raylet", "driver"])
def test_mlflow_holds_the_log_value_by_value_after_a_loss(desk: PressedDesk, cluster: Cluster, lost: str) -> None:
    words = ("--name", "r", "--device", "cpu", "--memory-headroom", "400MiB")
    command = desk.record("run", "pressed_task:Pressed", *words)
    held = desk.folder / "held"
    still_runs(command, held.exists)
    first = [event.record for event in read_events(desk.log)]
    assert isinstance(first[-1], Tick)
    last_step = first[-1].observation.step
    # MLflow has what the checkpoint lacks.
    wait_until(lambda: only_run_has(desk.tracker, last_step))
    old = only_run(desk.tracker, "triaccel-runs")

    actor = int(held.read_text())
    if lost == "driver":
        kill(command.pid)
        command.wait(DEADLINE_S)
    elif lost == "raylet":
        (node,) = cluster.worker_nodes
        kill(node.all_processes["raylet"][0].process.pid)
        cluster.add_node(num_cpus=1, num_gpus=0)
    else:
        kill(actor)
    wait_until(lambda: not alive(actor))
    desk.release()
    done(desk.record("resume", "r") if lost == "driver" else command)

    found = only_run(desk.tracker, "triaccel-runs")
    assert found.id != old.id
    assert (found.status, found.tags["replaces"]) == ("FINISHED", old.id)
    assert assert_equals_log(desk.tracker, found, desk.log) > 100
    second = [event.record for event in read_events(desk.log)]
    (place,) = [place for place, record in enumerate(second) if isinstance(record, Interruption)]
    checkpointed = second[place - 1]
    assert isinstance(checkpointed, Epoch)
    assert found.tags["resumed_from_step"] == str(checkpointed.step)
    # Batches differed: a splice of both attempts would have been another curve.
    assert batches(first[place:]) != batches(second[place + 1 :])[: len(batches(first[place:]))]


def only_run_has(tracker: Tracker, step: int) -> bool:
    found = runs(tracker, "triaccel-runs")  # none until its first record is shipped
    return any(step == at for run in found for at, _, _ in history(tracker, run.id, "train/loss"))


def batches(records: list[object]) -> list[tuple[int, int]]:
    ticks = [record for record in records if isinstance(record, Tick)]
    return [(tick.observation.step, tick.applied.plan.batch_size) for tick in ticks]
