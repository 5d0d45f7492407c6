"""The whole command line over two machines with a token, as docs/cluster.md has it, and what of the secrets is left.

The machines are two `ray start` on this one, each with a logical GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import matplotlib
import pytest

from tests.service.mlflow_server import Server
from tests.service.own_task import MODULE
from tests.service.ray_head import free_ports, ray_node
from tests.service.waiting import COMMAND_S, end
from triaccel_ray.service.search.search import read_search

SECRETS = {
    "MLFLOW_TRACKING_PASSWORD": "word-of-the-environment-5711",
    "AWS_SECRET_ACCESS_KEY": "key-of-the-store-5713",
}

JOBS = """
import ray
from ray._private.state import state
ray.init(address="{address}", logging_level="ERROR")
print(state.job_table())
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for storage, Ray's files and everything that is said, with the task's module."""
    made = Path(tempfile.mkdtemp(prefix="tr-", dir="/tmp"))  # Ray's sockets need a short path
    (made / "own_task.py").write_text(MODULE)
    yield made
    shutil.rmtree(made)


def test_a_search_on_a_cluster_with_a_token_leaves_no_secret_anywhere(
    server: Server, place: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    environment |= {"HOME": str(tmp_path), "MPLCONFIGDIR": matplotlib.get_configdir(), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(place), os.getcwd()]), "RAY_AUTH_MODE": "token"}
    making = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    token = subprocess.run(making, env=environment, check=True, capture_output=True, text=True).stdout.split()[-1]
    assert (tmp_path / ".ray" / "auth_token").read_text().strip() == token
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    own = ("--num-cpus=1", "--num-gpus=1", "--object-store-memory=100000000")
    head_words = ("--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false")
    with ExitStack() as stack:
        for name, words in {
            "head": (*head_words, f"--temp-dir={place / 'ray'}"),
            "other": (f"--address={address}",),
        }.items():
            stack.enter_context(ray_node(*words, *own, env=environment, log=place / f"{name}.log"))
        words = ("--trials=2", "--epochs=2", "--objective=pareto", "--space=thresholds-absolute", "--name=hunt")
        places = ("--storage-path", str(place / "storage"), "--tracking-uri", server.uri, "--address", address)
        with (place / "said.txt").open("wb") as said:
            command = subprocess.Popen(
                [sys.executable, "-m", "triaccel_ray.service", "search", "own_task:Blobs", *words, *places],
                env={**environment, **SECRETS, "MLFLOW_TRACKING_USERNAME": "somebody"},
                stdout=said,
                stderr=said,
            )
            stack.callback(end, command)
            assert command.wait(COMMAND_S) == 0, (place / "said.txt").read_text()
        asking = [sys.executable, "-c", JOBS.format(address=address)]
        jobs = subprocess.run(asking, env=environment, check=True, capture_output=True, text=True).stdout
    record = read_search(place / "storage" / "hunt")
    assert [run.status for run in (*record.baselines.values(), *record.trials)] == ["finished"] * 4
    assert "triaccel_ray.service search own_task:Blobs" in jobs
    files = [path for top in (place, server.folder) for path in top.rglob("*") if path.is_file()]
    assert {"server.db", "events.jsonl", "mlflow.json", "said.txt", "search.json"} <= {path.name for path in files}
    assert any(path.name.startswith("gcs_server") for path in files)
    assert any(path.name.startswith("raylet") for path in files)
    for secret in (*SECRETS.values(), token):
        assert [(str(path), secret) for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in jobs
