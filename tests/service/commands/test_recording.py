"""What goes on is recorded in the store where it was begun."""

import json
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import ship
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.commands.recording import with_recorded_store
from triaccel_ray.service.locations import tracker_of
from triaccel_ray.service.storage.layout import SHIPPED
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.tracker import Tracker, TrackingUnavailableError


@pytest.fixture
def run(sqlite_tracker: Tracker, tmp_path: Path, experiment: str) -> Path:
    """The folder of a run that is recorded in an experiment of its own, and in a store outside its storage folder."""
    folder = SimulatedRun(tmp_path / "storage" / "run").complete(epochs=1)
    ship(sqlite_tracker, folder, experiment)
    return folder


@pytest.fixture
def where(tmp_path: Path) -> Locations:
    return Locations(storage_path=StoragePath(str(tmp_path / "storage")))


def note(run: Path, **changes: str | None) -> None:
    """Changes what `mlflow.json` says; None takes a field away."""
    known = json.loads((run / SHIPPED).read_text()) | changes
    (run / SHIPPED).write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


def test_the_store_is_that_of_the_run(
    run: Path, sqlite_tracker: Tracker, where: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    assert with_recorded_store(run, where).tracking_uri == sqlite_tracker.uri
    assert f"recorded in {sqlite_tracker.uri}, as before" in capsys.readouterr().err
    given = Locations(storage_path=where.storage_path, tracking_uri="sqlite:///given.db")
    assert with_recorded_store(run, given) == given
    assert with_recorded_store(run.parent / "new", where) == where


def test_a_store_that_is_gone_is_the_usual_one_again(
    run: Path, where: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(run, store="sqlite:////gone/mlflow.db")
    assert with_recorded_store(run, where) == where
    note(run, store=f"sqlite:///{run.parent / 'mlflow.db'}")
    assert with_recorded_store(run, where) == where
    (run.parent / "mlflow.db").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5001")  # for what is recorded nowhere yet
    assert with_recorded_store(run, where).tracking_uri == f"sqlite:///{run.parent / 'mlflow.db'}"


def test_a_bucket_has_no_usual_store(run: Path, where: Locations) -> None:
    bucket = Locations(storage_path=StoragePath("s3://bucket/runs"))
    note(run, store="http://127.0.0.1:5000")
    for each in (where, bucket):
        assert with_recorded_store(run, each).tracking_uri == "http://127.0.0.1:5000"
    (run / SHIPPED).unlink()
    assert with_recorded_store(run, bucket) == bucket
    with pytest.raises(TrackingUnavailableError, match="tracking uri = None"):
        tracker_of(bucket)
