import contextlib
import json
import logging
import math
import re
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import Server, assert_equals_log, history, only_run, runs, ship
from tests.service.records import RUN_SPEC
from tests.service.waiting import DEADLINE_S
from triaccel_ray.records.events import End, EventLog, read_events
from triaccel_ray.service.storage.layout import SPEC, write_value
from triaccel_ray.service.tracking import shipment
from triaccel_ray.service.tracking.shipper import ParentRun, Shipper
from triaccel_ray.service.tracking.tracker import RUN_KEY_TAG, Tracker

TICKS_PER_EPOCH = 4


@pytest.fixture(params=["sqlite", "server"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Tracker:
    if request.param == "sqlite":
        stored: Tracker = request.getfixturevalue("sqlite_tracker")
        return stored
    server: Server = request.getfixturevalue("server")
    return Tracker(server.uri, tmp_path)


def test_a_finished_run_arrives_whole(tracker: Tracker, root: Path, experiment: str, tmp_path: Path) -> None:
    run = SimulatedRun(root / "trial-1", has_pictures=False)
    folder = run.complete(epochs=2)
    (folder / "spec.json").write_text('{"task": "digits"}')
    events = list(read_events(run.path))

    assert ship(tracker, root, experiment) == len(events)

    found = only_run(tracker, experiment)
    assert (found.name, found.status) == ("trial-1", "FINISHED")
    assert (found.start_ms, found.end_ms) == (events[0].time_ms, events[-1].time_ms)
    assert found.params["precision.tau_low"] == "3e-07"
    assert (found.params["recipe.lr"], found.params["budget"]) == ("0.1", "None")
    assert (found.tags["task"], found.tags["method"], found.tags["seed"]) == ("cifar10-resnet18", "triaccel", "0")
    assert found.tags["outcome"] == "finished"
    assert assert_equals_log(tracker, found, run.path) > 100
    assert history(tracker, found.id, "final/accuracy") == [(0, events[-1].time_ms, 91.5)]

    client = tracker.client
    listed = {item.path for item in client.list_artifacts(found.id)}
    assert listed == {"events.jsonl", "spec.json", "report.html", "figures"}
    pictures = {Path(item.path).name for item in client.list_artifacts(found.id, "figures")}
    assert pictures == {path.name for path in (folder / "figures").iterdir()}
    assert "precision.png" in pictures
    (tmp_path / "download").mkdir()
    copy = Path(client.download_artifacts(found.id, "events.jsonl", str(tmp_path / "download")))
    assert copy.read_bytes() == run.path.read_bytes()


def test_values_that_are_no_numbers_arrive_and_a_stopped_run_is_killed(
    sqlite_tracker: Tracker, root: Path, experiment: str
) -> None:
    run = SimulatedRun(root)
    run.start()
    tick = run.make_tick()
    run.append(*(replace(tick, observation=replace(tick.observation, loss=loss)) for loss in (math.nan, math.inf)))
    run.end("stopped")
    assert ship(sqlite_tracker, root, experiment) == 4
    found = only_run(sqlite_tracker, experiment)
    assert (found.name, found.status, found.tags["outcome"]) == ("a search", "KILLED", "stopped")
    first, second = history(sqlite_tracker, found.id, "train/loss")
    assert math.isnan(first[2])
    assert second[2] > 1e308


def test_a_run_is_followed_as_it_goes(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    run = SimulatedRun(root / "trial")
    shipper = Shipper(sqlite_tracker, root, experiment=experiment, interval_s=0.01)
    assert shipper.ship_once() == 0
    run.start()
    assert (shipper.ship_once(), shipper.ship_once()) == (1, 0)
    assert only_run(sqlite_tracker, experiment).status == "RUNNING"
    run.train(1)
    assert (shipper.ship_once(), shipper.ship_once()) == (TICKS_PER_EPOCH + 1, 0)
    shipper.start()
    run.end()
    assert shipper.finish(DEADLINE_S)
    found = only_run(sqlite_tracker, experiment)
    assert found.status == "FINISHED"
    assert_equals_log(sqlite_tracker, found, run.path)


def test_nothing_arrives_twice(tracker: Tracker, root: Path, experiment: str) -> None:
    run = SimulatedRun(root / "trial")
    note = run.complete(epochs=2) / "mlflow.json"
    num_events = ship(tracker, root, experiment)
    first = only_run(tracker, experiment)
    assert ship(tracker, root, experiment) == 0

    shipped = json.loads(note.read_text())
    assert (shipped["run_id"], first.tags[RUN_KEY_TAG]) == (first.id, shipped["key"])
    note.write_text(json.dumps({**shipped, "of_another_version": 1}))
    assert ship(tracker, root, experiment) == 0
    # A crash between the arrival of a batch and the note of it; between the run's creation and the note of its id;
    # and the note lost.
    note.write_text(json.dumps({**shipped, "position": {}}))
    assert ship(tracker, root, experiment) == num_events - 1
    note.write_text(json.dumps({name: shipped[name] for name in ("store", "key", "experiment")}))
    assert ship(tracker, root, experiment) == num_events
    note.unlink()
    assert ship(tracker, root, experiment) == num_events
    assert json.loads(note.read_text()) == shipped
    assert only_run(tracker, experiment) == first
    assert_equals_log(tracker, first, run.path)


def test_trials_are_children_of_their_search(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    parent = ParentRun(tags={"task": "digits"})
    trials = [SimulatedRun(root / f"trial-{index}") for index in range(2)]
    root.mkdir(exist_ok=True)
    ship(sqlite_tracker, root, experiment, parent)
    first = only_run(sqlite_tracker, experiment)
    assert (first.name, first.status, first.tags["task"]) == ("a search", "RUNNING", "digits")
    for trial in trials:
        trial.complete(epochs=1)
    SimulatedRun(root).append(End(status="finished", results={"best score": 12.5}))
    ship(sqlite_tracker, root, experiment, parent)
    found = {run.name: run for run in runs(sqlite_tracker, experiment)}
    assert set(found) == {"a search", "trial-0", "trial-1"}
    assert (found["a search"].id, found["a search"].status) == (first.id, "FINISHED")
    assert found["a search"].keys == {"final/best score"}
    for name in ("trial-0", "trial-1"):
        assert found[name].tags["mlflow.parentRunId"] == first.id
    assert "mlflow.parentRunId" not in found["a search"].tags

    # The search goes on.
    EventLog(root / "events.jsonl", keep=0).close()
    ship(sqlite_tracker, root, experiment, parent)
    again = {run.name: run.status for run in runs(sqlite_tracker, experiment)}
    assert again == {"a search": "RUNNING", "trial-0": "FINISHED", "trial-1": "FINISHED"}


def test_more_params_and_metrics_than_a_call_takes_arrive(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    run = SimulatedRun(root, parameters={f"number.{index}": index for index in range(130)} | {"long": "x" * 9000})
    run.complete(epochs=14)
    ship(sqlite_tracker, root, experiment)
    found = only_run(sqlite_tracker, experiment)
    assert (found.params["number.129"], len(found.params["long"])) == ("129", 6000)
    assert_equals_log(sqlite_tracker, found, run.path)


def test_copies_in_the_store_are_no_runs(sqlite_tracker: Tracker, experiment: str) -> None:
    root = sqlite_tracker.artifact_root.parent / experiment
    SimulatedRun(root / "trial").complete(epochs=1)
    ship(sqlite_tracker, root, experiment)
    assert any(sqlite_tracker.artifact_root.rglob("events.jsonl"))
    # Whoever ships everything in the folder that holds the store as well meets the copies.
    shipper = Shipper(sqlite_tracker, sqlite_tracker.artifact_root.parent, experiment=experiment)
    assert (shipper.ship_once(), shipper.last_error) == (0, None)
    assert len(runs(sqlite_tracker, experiment)) == 1


def test_a_damaged_log_holds_up_no_other(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    damaged, headless = SimulatedRun(root / "damaged"), SimulatedRun(root / "headless")
    damaged.start()
    with damaged.path.open("ab") as file:
        file.write(b'{"sequence": 1, "kind": "tick"\n')
    headless.end()
    noted, deleted = SimulatedRun(root / "noted"), SimulatedRun(root / "deleted")
    for run in (noted, deleted):
        run.start()
    (noted.folder / "mlflow.json").write_text("{")
    ship(sqlite_tracker, deleted.folder, experiment)
    sqlite_tracker.client.delete_run(only_run(sqlite_tracker, experiment).id)
    deleted.train(1)
    SimulatedRun(root / "whole").complete(epochs=1)
    shipper = Shipper(sqlite_tracker, root, experiment=experiment)
    shipper.ship_once()
    assert [run.name for run in runs(sqlite_tracker, experiment) if run.status == "FINISHED"] == ["whole"]
    for name, reason in (
        ("noted", "mlflow.json cannot be read"),
        ("headless", "does not begin with a start record"),
        ("deleted", "was deleted in MLflow"),
        ("damaged", "damaged/events.jsonl, line 2: not an event"),
    ):
        assert shipper.last_error.startswith(f"{name}: ")
        assert reason in shipper.last_error
        shutil.rmtree(root / name)
        shipper.flush(0.0)
    assert shipper.last_error is None


def test_another_store_gets_everything(
    sqlite_tracker: Tracker, server: Server, root: Path, experiment: str, tmp_path: Path
) -> None:
    run = SimulatedRun(root)
    run.complete(epochs=1)
    num_events = ship(sqlite_tracker, root, experiment)
    other = Tracker(server.uri, tmp_path)
    assert ship(other, root, experiment) == num_events
    assert_equals_log(other, only_run(other, experiment), run.path)


def test_a_folder_that_another_driver_ships_waits(
    sqlite_tracker: Tracker, root: Path, experiment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipment, "LOCK_TIMEOUT_S", 0.05)
    SimulatedRun(root / "trial").complete(epochs=1)
    shipper = Shipper(sqlite_tracker, root, experiment=experiment)
    with FileLock(root / "trial" / ".mlflow.json.lock"):
        assert shipper.ship_once() == 0
        assert shipper.last_error is not None
    assert shipper.flush(0.0)
    assert_equals_log(sqlite_tracker, only_run(sqlite_tracker, experiment), root / "trial" / "events.jsonl")


def test_two_drivers_at_once_make_one_run(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    SimulatedRun(root / "trial").complete(epochs=3)
    shippers = [Shipper(sqlite_tracker, root, experiment=experiment, parent=ParentRun()) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Shipper.ship_once, shippers))
    assert [shipper.last_error for shipper in shippers] == [None, None, None]
    found = {run.name: run for run in runs(sqlite_tracker, experiment)}
    assert len(found) == len(runs(sqlite_tracker, experiment)) == 2
    assert_equals_log(sqlite_tracker, found["trial"], root / "trial" / "events.jsonl")


def test_pictures_that_fail_do_not_keep_a_run_open(
    sqlite_tracker: Tracker, root: Path, experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    SimulatedRun(root, has_pictures=False).complete(epochs=1)
    write_value(root / SPEC, RUN_SPEC)
    (root / "figures").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        ship(sqlite_tracker, root, experiment)
    assert "no pictures" in caplog.text
    assert only_run(sqlite_tracker, experiment).status == "FINISHED"


def test_what_a_database_says_of_its_failure_is_one_line(
    sqlite_tracker: Tracker, root: Path, experiment: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mlflow.db"
    shutil.copy(sqlite_tracker.uri.removeprefix("sqlite:///"), file)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("DROP TABLE latest_metrics")
    SimulatedRun(root, has_pictures=False).complete(epochs=1)
    shipper = Shipper(Tracker(f"sqlite:///{file}", tmp_path), root, experiment=experiment)
    shipper.ship_once()
    assert re.fullmatch(".*no such table: latest_metrics.*", shipper.last_error or "")  # of one line
    assert "Traceback" not in capfd.readouterr().err
