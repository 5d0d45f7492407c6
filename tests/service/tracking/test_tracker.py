import contextlib
import os
import shutil
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.service.mlflow_server import Server
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.locations import named_store, tracking_uri_of
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.tracker import Tracker, TrackingUnavailableError


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("sqlite:///here.db", Path("artifacts"))
    assert tracker.uri == f"sqlite:///{tmp_path}/here.db"
    assert tracker.artifact_root == tmp_path / "artifacts"


def test_an_experiment_is_created_once_and_keeps_its_name(sqlite_tracker: Tracker, experiment: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        (number,) = {*pool.map(sqlite_tracker.experiment_id, [experiment] * 4)}
    found = sqlite_tracker.client.get_experiment_by_name(experiment)
    assert found.artifact_location == sqlite_tracker.artifact_root.as_uri()
    sqlite_tracker.client.delete_experiment(number)
    with pytest.raises(ValueError, match=r"was deleted in MLflow .* restore it"):
        sqlite_tracker.experiment_id(experiment)


def test_mlflows_own_state_and_the_users_settings_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, sqlite_tracker: Tracker
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT", raising=False)
    assert Tracker(sqlite_tracker.uri, sqlite_tracker.artifact_root).client.search_experiments()
    assert (os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"], os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]) == ("5", "20")
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() != sqlite_tracker.uri
    assert "MLFLOW_TRACKING_URI" not in os.environ


@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("file:///tmp/mlruns", r"must be http://HOST:PORT of a server or sqlite:///FILE"),
        ("", r"must be http://HOST:PORT"),
        ("sqlite:///", r"must be http://HOST:PORT"),
        ("http://ann:sec/ret@host/x", r"'http://\*\*\*@host/x': must not hold a password.* MLFLOW_TRACKING_USERNAME"),
        ("https://secret@host", r"'https://\*\*\*@host': must not hold a password"),
    ],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_other_stores_and_passwords_in_uris_are_refused(
    uri: str, rule: str, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks" if is_given else uri or "databricks")
    with pytest.raises(
        ValueError, match=f"{'tracking uri' if is_given else 'MLFLOW_TRACKING_URI'} = .*{rule}"
    ) as refused:
        named_store(uri if is_given else None)
    assert "secret" not in str(refused.value)


def test_a_store_is_the_one_given_else_the_environments_else_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert named_store("sqlite:///given.db") == f"sqlite:///{Path.cwd() / 'given.db'}"
    assert named_store(None) == "http://host:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", " ")
    assert named_store(None) is None
    assert tracking_uri_of(Locations(storage_path=StoragePath("/runs"))) == "sqlite:////runs/mlflow.db"
    with pytest.raises(TrackingUnavailableError, match="tracking uri = None"):
        tracking_uri_of(Locations(storage_path=StoragePath("s3://bucket/runs")))


def test_a_server_answers_another_is_refused_and_one_that_hangs_is_not_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tracker(server.uri, tmp_path).prepare()
    Tracker(f"{server.uri}/", tmp_path).check()
    for uri in ("http://", "http://host:99999", "http://a b/"):
        said = f"= {uri!r}: no MLflow server answers there .*--tracking-uri sqlite:///FILE"
        with pytest.raises(TrackingUnavailableError, match=said):
            Tracker(uri, tmp_path).check()
    with pytest.raises(TrackingUnavailableError, match=r"no MLflow server \(/health: 404\)"):
        Tracker(f"{server.uri}/elsewhere", tmp_path).check()
    monkeypatch.setattr("triaccel_ray.service.tracking.tracker.PROBE_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        with pytest.raises(TrackingUnavailableError, match="timed out"):
            tracker.check()


def test_a_file_that_cannot_be_used_is_refused_and_left_as_it_is(sqlite_tracker: Tracker, tmp_path: Path) -> None:
    text, other, newer = tmp_path / "notes.txt", tmp_path / "other.db", tmp_path / "newer.db"
    text.write_text("these are my notes, and they are no database " * 20)
    shutil.copy(sqlite_tracker.uri.removeprefix("sqlite:///"), newer)
    for file, change in (
        (other, "CREATE TABLE customers (name TEXT)"),
        (newer, "UPDATE alembic_version SET version_num = 'of the future'"),
    ):
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(change)
    contents = text.read_bytes(), other.read_bytes()
    for name, rule in (
        (text / "mlflow.db", "cannot be created"),
        (Path("/proc/nowhere/mlflow.db"), "cannot be created"),
        (tmp_path / ("long" * 100), "cannot be created"),
        (tmp_path, "is not a SQLite database"),
        (text, "is not a SQLite database"),
        (other, r"something else .*customers"),
        (newer, r"newer\.db'.*of the future"),
    ):
        with pytest.raises(TrackingUnavailableError, match=rule):
            Tracker(f"sqlite:///{name}", tmp_path).prepare()
    assert (text.read_bytes(), other.read_bytes()) == contents
    if os.geteuid() != 0:  # root may write everywhere
        tmp_path.chmod(0o500)
        with pytest.raises(TrackingUnavailableError, match="cannot be written"):
            Tracker(f"sqlite:///{tmp_path}/mlflow.db", tmp_path).check()
