import socket
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import ship
from tests.service.terminal import typed
from triaccel_ray.service.commands.ui import runs_pages
from triaccel_ray.service.tracking.tracker import Tracker


@pytest.mark.parametrize("option", ["--storage-path {}", "--tracking-uri sqlite:///{}/mlflow.db"])
def test_a_mistyped_path_is_named_and_nothing_is_made_there(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistyped = tmp_path / "mistyped"
    status, _, said = typed(capsys, "ui", *option.format(mistyped).split())
    assert (status, f"{mistyped}/mlflow.db': there is no such file" in " ".join(said.split())) == (2, True)
    assert not mistyped.exists()


def test_experiments_with_runs_have_pages_the_latest_first(
    sqlite_tracker: Tracker, tmp_path: Path, experiment: str
) -> None:
    sqlite_tracker.experiment_id(f"{experiment} empty")
    for name in ("older", "newer"):
        folder = SimulatedRun(tmp_path / name).complete(epochs=1)
        ship(sqlite_tracker, folder, f"{experiment} {name}")
    pages = {name: page for name, page in runs_pages(sqlite_tracker, "http://x").items() if experiment in name}
    assert list(pages) == [f"{experiment} newer", f"{experiment} older"]
    number = sqlite_tracker.experiment_id(f"{experiment} newer")
    assert pages[f"{experiment} newer"] == f"http://x/#/experiments/{number}/runs?workflowType=machine_learning"


def test_a_port_in_use_is_refused_before_anything_is_shown(
    sqlite_tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, shown, said = typed(capsys, "ui", "--port", str(port), "--tracking-uri", sqlite_tracker.uri)
    assert (status, shown) == (2, "")
    assert f"(host, port) = ('127.0.0.1', {port}): cannot be served at (Address already in use)" in " ".join(
        said.split()
    )
