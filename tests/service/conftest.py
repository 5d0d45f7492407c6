import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.service.mlflow_server import Server
from tests.service.own_task import own_spec, write_module
from tests.service.ray_head import machines
from tests.service.terminal import Terminal
from tests.service.worker_factory import Begin, WorkerFactory
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.tracking.tracker import Tracker


@pytest.fixture(scope="session")
def cluster_address() -> Iterator[str]:
    """A Ray cluster of two CPUs and two GPUs, which are logical: commands of several modules join it."""
    with machines(num_cpus=2, num_gpus=2) as cluster:
        yield cluster.address


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory, cluster_address: str) -> Terminal:
    """One cluster for the whole file, to which the commands connect as to any other."""
    return Terminal(storage=tmp_path_factory.mktemp("storage"), address=cluster_address)


@pytest.fixture(scope="module")
def own_ray(cluster_address: str) -> Iterator[None]:
    """This process is connected to the cluster of the tests; meanwhile no command can join it from here."""
    paths = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    ray.init(address=cluster_address, log_to_driver=False, runtime_env={"env_vars": paths})
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def starting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that does not answer yet: it starts while the tests of the SQLite store run."""
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(starting_server: Server) -> Server:
    """A running server; a test that stops it starts it again."""
    starting_server.wait()
    return starting_server


@pytest.fixture(scope="session")
def sqlite_tracker(tmp_path_factory: pytest.TempPathFactory, starting_server: Server) -> Tracker:
    """One SQLite store for all tests, for a new one takes seconds; each test has an experiment of its own."""
    folder = tmp_path_factory.mktemp("a store")
    tracker = Tracker(f"sqlite:///{folder / 'mlflow.db'}", folder / "artifacts")
    tracker.prepare()
    return tracker


@pytest.fixture
def experiment(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A name that no other test uses."""
    return f"{request.node.name} {tmp_path.name}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a search"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with the tests' own tasks, which lies in `tmp_path`."""
    return write_module(tmp_path, monkeypatch)


@pytest.fixture
def worker_factory() -> Iterator[WorkerFactory]:
    made = WorkerFactory()
    yield made
    made.close()


@pytest.fixture
def spec(module: str) -> RunSpec:
    """A run of the tests' usual task."""
    return own_spec(f"{module}:Blobs")


@pytest.fixture
def start(worker_factory: WorkerFactory, module: str, tmp_path: Path) -> Begin:
    """Begins a run of one of the tests' own tasks, in `tmp_path` unless it is to be elsewhere."""

    def begin(task: str = "Blobs", *, folder: Path = tmp_path, **settings: object) -> Any:
        return worker_factory.start(own_spec(f"{module}:{task}", **settings), folder)

    return begin
