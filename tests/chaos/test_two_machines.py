"""The whole command line over two machines with a token, as docs/cluster.md has it, and what of the secrets is left.

The machines are two `ray start` on this one, each with a logical GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pytest

from tests.service.own_task import MODULE
from tests.service.ray_head import free_ports, ray_node
from tests.service.stores import Server, assert_equals_log, runs
from tests.service.waiting import COMMAND_S, end
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.tracking.tracking import Tracker

SECRETS = {
    "MLFLOW_TRACKING_PASSWORD": "word-of-the-environment-5711",
    "AWS_SECRET_ACCESS_KEY": "key-of-the-store-5713",
}
IN_THE_URI = "word-of-the-uri-5714"
NUM_TRIALS = 2

TASK = """
import ray
from tests.service.waiting import wait_until

NODES = Path(__file__).with_name("nodes.txt")


class Meeting(Blobs):
    # Runs wait for each other, two by two, and note where they are, at their first model.
    name = "meeting"
    has_met = False

    def model(self):
        if not self.has_met:
            self.has_met = True
            with NODES.open("a") as file:
                file.write(f"{ray.get_runtime_context().get_node_id()}\\n")
            number = len(NODES.read_text().split())
            wait_until(lambda: len(NODES.read_text().split()) >= number + number % 2, say=lambda: "no other run")
        return super().model()
"""

JOBS = """
import ray
from ray._private.state import state
ray.init(address="{address}", logging_level="ERROR")
print(state.job_table())
"""


@dataclass(frozen=True)
class Hunt:
    """A search that has been done on the two machines."""

    place: Path
    """Storage folder, Ray's folders and everything that was said."""
    said: str
    jobs: str
    """What Ray's own records say of the jobs of the cluster."""
    token: str
    environment: dict[str, str]
    tracker: Tracker
    server: Path

    @property
    def folder(self) -> Path:
        return self.place / "storage" / "hunt"


@pytest.fixture(scope="module")
def hunt(starting_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunt]:
    place = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))  # Ray's sockets need a short path
    home = tmp_path_factory.mktemp("home")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    environment |= {"HOME": str(home), "MPLCONFIGDIR": matplotlib.get_configdir(), "RAY_USAGE_STATS_ENABLED": "0"}
    (place / "meeting.py").write_text(MODULE + TASK)
    environment |= {"PYTHONPATH": os.pathsep.join([str(place), os.getcwd()]), "RAY_AUTH_MODE": "token"}
    making = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    token = subprocess.run(making, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1]
    assert (home / ".ray" / "auth_token").read_text().strip() == token
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    own = ("--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000")
    head_words = ("--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false")
    starting_server.wait()
    with ExitStack() as stack:
        for name, words in (
            ("head", (*head_words, f"--temp-dir={place / 'ray'}")),
            ("other", (f"--address={address}",)),
        ):
            log = place / f"{name}.log"
            stack.enter_context(ray_node(*words, *own, env=environment, log=log))
        uri = f"http://somebody:{IN_THE_URI}@127.0.0.1:{starting_server.port}"
        typed = f"--trials {NUM_TRIALS} --epochs 2 --objective pareto --space thresholds-absolute --name hunt".split()
        places = ("--storage-path", str(place / "storage"), "--tracking-uri", uri, "--address", address)
        with (place / "said.txt").open("wb") as said:
            command = subprocess.Popen(
                [sys.executable, "-m", "triaccel_ray.service", "search", "meeting:Meeting", *typed, *places],
                env={**environment, **SECRETS, "MLFLOW_TRACKING_USERNAME": "somebody"},
                stdout=said,
                stderr=said,
            )
            stack.callback(end, command)
            command.wait(COMMAND_S)
        text = (place / "said.txt").read_text()
        assert command.returncode == 0, text
        asking = [sys.executable, "-c", JOBS.format(address=address)]
        jobs = subprocess.run(asking, env=environment, check=True, capture_output=True, text=True).stdout
        yield Hunt(
            place=place,
            said=text,
            jobs=jobs,
            token=token,
            environment=environment,
            tracker=Tracker(starting_server.uri, place / "artifacts"),
            server=starting_server.folder,
        )
    shutil.rmtree(place)


def test_trials_run_on_both_machines_and_all_of_the_search_is_recorded(hunt: Hunt) -> None:
    fp32, amp, one, other, *_ = (hunt.place / "nodes.txt").read_text().split()
    assert {one, other} == {fp32, amp}
    assert one != other
    record = read_search(hunt.folder)
    assert [run.status for run in (*record.baselines.values(), *record.trials)] == ["finished"] * (2 + NUM_TRIALS)
    found = {run.name: run for run in runs(hunt.tracker, "triaccel-searches")}
    mine = {name.removeprefix("hunt/"): run for name, run in found.items() if name != "hunt"}
    names = {"fp32", "amp", *(f"trial-{number:03d}" for number in range(NUM_TRIALS))}
    assert set(mine) == names | {run.name for again in record.repeats.values() for run in again}
    assert {run.status for run in (found["hunt"], *mine.values())} == {"FINISHED"}
    for run in mine.values():
        (folder,) = hunt.folder.glob(f"*/{run.name.removeprefix('hunt/')}")
        assert assert_equals_log(hunt.tracker, run, folder / "events.jsonl") > 0


def test_a_search_on_a_cluster_leaves_no_secret_anywhere(hunt: Hunt) -> None:
    assert "triaccel_ray.service search meeting:Meeting" in hunt.jobs
    assert re.search(r"http://\*+@127\.0\.0\.1", hunt.jobs)
    files = [path for top in (hunt.place, hunt.server) for path in top.rglob("*") if path.is_file()]
    assert {"server.db", "events.jsonl", "mlflow.json", "said.txt", "search.json"} <= {path.name for path in files}
    assert any(path.name.startswith("gcs_server") for path in files)
    assert any(path.name.startswith("raylet") for path in files)
    for secret in (*SECRETS.values(), IN_THE_URI, hunt.token):
        assert [(str(path), secret) for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in hunt.jobs
    assert json.loads((hunt.folder / "mlflow.json").read_text())["store"].startswith("http://***@")
