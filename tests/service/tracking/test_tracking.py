from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.build import same
from tests.service.stores import Server, free_port, runs
from triaccel_ray.service.credentials import without_credentials
from triaccel_ray.service.tracking import tracking
from triaccel_ray.service.tracking.model_registry import ARTIFACT, register
from triaccel_ray.service.tracking.tracking import RUN_KEY_TAG, Tracker, TrackingUnavailableError


def test_a_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("sqlite:///here.db", Path("artifacts"))
    assert tracker.uri == f"sqlite:///{tmp_path}/here.db"
    assert tracker.artifact_root == tmp_path / "artifacts"


def test_an_experiment_is_created_once_and_keeps_its_name(sqlite_tracker: Tracker, experiment: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        (number,) = {*pool.map(sqlite_tracker.experiment_id, [experiment] * 4)}
    found = sqlite_tracker.client.get_experiment_by_name(experiment)
    assert found is not None
    assert found.artifact_location == sqlite_tracker.artifact_root.as_uri()
    sqlite_tracker.client.delete_experiment(number)
    with pytest.raises(ValueError, match=r"was deleted in MLflow .* restore it"):
        sqlite_tracker.experiment_id(experiment)


def test_a_run_is_found_again_by_its_key(sqlite_tracker: Tracker, experiment: str) -> None:
    first = sqlite_tracker.open_run(experiment, "one", key="folder/one@5", tags={"task": "digits"}, start_ms=5)
    assert sqlite_tracker.open_run(experiment, "one", key="folder/one@5") == first
    other = sqlite_tracker.open_run(experiment, "one", key="folder/one@6", parent_id=first)
    assert other != first
    one, two = runs(sqlite_tracker, experiment)
    assert (one.id, one.name, one.status, one.start_ms) == (first, "one", "RUNNING", 5)
    assert (one.tags["task"], one.tags[RUN_KEY_TAG]) == ("digits", "folder/one@5")
    assert (two.id, two.tags["mlflow.parentRunId"]) == (other, first)


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


def test_a_server_answers(server: Server, tmp_path: Path) -> None:
    Tracker(server.uri, tmp_path).prepare()
    Tracker(f"{server.uri}/", tmp_path).check()
    Tracker(server.uri.replace("//", "//user:secret@"), tmp_path).check()


@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("file:///tmp/mlruns", "must begin with sqlite:///"),
        ("", "must begin with sqlite:///"),
        ("sqlite:///", "names no file"),
        ("http://", "no MLflow server answers there"),
        ("http://host:99999", "no MLflow server answers there"),
        ("http://a b/", "no MLflow server answers there"),
    ],
)
def test_a_malformed_uri_is_refused(tmp_path: Path, uri: str, rule: str) -> None:
    with pytest.raises(TrackingUnavailableError, match=rule) as refused:
        Tracker(uri, tmp_path).check()
    assert repr(uri) in str(refused.value)
    assert "--tracking-uri sqlite:///FILE" in str(refused.value)


def test_nobody_answers_and_the_password_is_not_told(tmp_path: Path) -> None:
    for user in ("someone:sec/ret@", "someone:secret@", "secret@", "someone:se@cret@"):
        tracker = Tracker(f"http://{user}127.0.0.1:{free_port()}", tmp_path)
        with pytest.raises(TrackingUnavailableError, match=r"http://\*\*\*@127\.0\.0\.1:") as refused:
            tracker.check()
        assert "cret" not in str(refused.value)
        assert "cret" not in tracker.display_uri
        assert "cret" not in tracker.mask(f"GET {tracker.uri}/api failed, after http://x:secret@other/y")
    path = tmp_path / "ann@corp" / "mlflow.db"
    tracker = Tracker(f"sqlite:///{path}", tmp_path)
    text = f"{path} is locked, and https://ann:secret@host/x is gone"
    assert tracker.mask(text) == f"{path} is locked, and https://***@host/x is gone"
    assert tracker.display_uri == f"sqlite:///{path}"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://[::1]:5000/team@corp", "http://[::1]:5000/team@corp"),
        ("https://ann:secret@host:5000/team@corp", "https://***@corp"),
        ("http://ann:sec/ret@host/x", "http://***@host/x"),
        ("http://ann:12?3@host", "http://***@host"),
        ("postgresql+psycopg2://ann:secret@host/db", "postgresql+psycopg2://***@host/db"),
        ("sqlite:////home/ann@corp/mlflow.db", "sqlite:////home/ann@corp/mlflow.db"),
        ("/home/ann@corp", "/home/ann@corp"),
        ("--storage-path=hdfs://me@host:9000/x", "--storage-path=hdfs://me@host:9000/x"),
        ("hdfs://me:secret@host:9000/x", "hdfs://***@host:9000/x"),
        ("--address=http://ann:sec ret@host", "--address=http://***@host"),
    ],
)
def test_users_and_passwords_are_hidden_and_paths_are_not(uri: str, shown: str) -> None:
    assert without_credentials(uri) == shown


def test_another_server_is_refused_and_one_that_hangs_is_not_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TrackingUnavailableError, match=r"no MLflow server \(/health: 404\)"):
        Tracker(f"{server.uri}/elsewhere", tmp_path).check()
    monkeypatch.setattr(tracking, "PROBE_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = Tracker(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        with pytest.raises(TrackingUnavailableError, match="timed out"):
            tracker.check()


def test_artifacts_are_found_where_the_folder_was_moved_to(
    sqlite_tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(sqlite_tracker.uri.removeprefix("sqlite:///"), tmp_path / "mlflow.db")
    before, after = tmp_path / "before", tmp_path / "a new place"
    before.mkdir()
    (tmp_path / "mlflow.db").rename(before / "mlflow.db")
    tracker = Tracker(f"sqlite:///{before}/mlflow.db", before / "artifacts")
    first, second = (tracker.open_run("moved", name, key=name) for name in ("first", "second"))
    (tmp_path / "text").write_text("text")
    tracker.client.log_artifact(first, str(tmp_path / "text"))
    model = torch.nn.Linear(2, 1)
    assert register(tracker, first, "moved", lambda: model, {}) == "1"
    elsewhere = tmp_path / "another storage folder" / "artifacts"
    elsewhere.mkdir(parents=True)
    other = tracker.client.create_experiment("other", artifact_location=elsewhere.as_uri())
    before.rename(after)

    moved = Tracker(f"sqlite:///{after}/mlflow.db", after / "artifacts")
    assert [item.path for item in moved.client.list_artifacts(first)] == [ARTIFACT, "text"]
    import mlflow.pytorch

    monkeypatch.setenv("MLFLOW_TRACKING_URI", moved.uri)
    assert same(dict(mlflow.pytorch.load_model("models:/moved/1").state_dict()), dict(model.state_dict()))
    moved.client.log_artifact(second, str(tmp_path / "text"))
    new = moved.open_run("moved", "third", key="third")
    moved.client.log_artifact(new, str(tmp_path / "text"))
    assert not before.exists()
    assert {path.name for path in (after / "artifacts").iterdir()} == {first, second, new}
    # what another storage folder has recorded in the same file stays there
    assert moved.client.get_experiment(other).artifact_location == elsewhere.as_uri()


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
        (tmp_path / ("long" * 100), "cannot be read"),
        (tmp_path, "is not a file"),
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
