from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.stores import ship
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.commands.ui import ALLOWED_HOSTS, ALLOWED_ORIGINS, exposure, is_loopback, runs_pages
from triaccel_ray.service.tracking.tracking import Tracker


def test_who_opens_the_ui_to_others_is_told_under_which_names_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ALLOWED_HOSTS, ALLOWED_ORIGINS):
        monkeypatch.delenv(name, raising=False)
    said = exposure("0.0.0.0", 5001)
    assert "everybody who reaches this machine can read and delete runs" in said
    assert "MLFLOW_SERVER_ALLOWED_HOSTS=NAME:5001 MLFLOW_SERVER_CORS_ALLOWED_ORIGINS=http://NAME:5001" in said
    monkeypatch.setenv(ALLOWED_HOSTS, "box.example:5001")
    assert "403" in exposure("0.0.0.0", 5001)
    monkeypatch.setenv(ALLOWED_ORIGINS, "http://box.example:5001")
    assert "403" not in exposure("0.0.0.0", 5001)


def test_loopback_addresses_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "192.0.2.7", "localhost.example")))


@pytest.mark.parametrize("option", ["--storage-path {}", "--tracking-uri sqlite:///{}/mlflow.db"])
def test_a_mistyped_path_is_named_and_nothing_is_made_there(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistyped = tmp_path / "mistyped"
    with pytest.raises(SystemExit, match="2"):
        main(["ui", *option.format(mistyped).split()])
    assert f"{mistyped}/mlflow.db': there is no such file" in " ".join(capsys.readouterr().err.split())
    assert not mistyped.exists()


def test_where_no_server_can_listen_is_named(sqlite_tracker: Tracker, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "192.0.2.7"):  # documentation's own network: no machine has it
            with pytest.raises(SystemExit, match="2"):
                main(["ui", "--host", host, "--port", str(port), "--tracking-uri", sqlite_tracker.uri])
            said = capsys.readouterr()
            assert f"host, port = '{host}', {port}: cannot be listened on" in " ".join(said.err.split())
            assert said.out == ""
            assert ("everybody who reaches this machine" in said.err) == (not is_loopback(host))


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
