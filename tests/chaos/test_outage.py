from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from tests.chaos.desk import fill
from tests.service.build import SimulatedRun
from tests.service.stores import Server, assert_equals_log, free_port, only_run, runs
from tests.service.waiting import DEADLINE_S, wait_until
from triaccel_ray.service.tracking.shipper import Parent, Shipper
from triaccel_ray.service.tracking.tracking import Tracker


def test_the_thread_ships_while_the_run_goes_on(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    run = SimulatedRun(root / "trial")
    shipper = Shipper(sqlite_tracker, root, experiment=experiment, interval_s=0.02)
    shipper.start()
    run.start()
    wait_until((run.folder / "mlflow.json").exists)
    run.train(2)
    run.end()
    assert shipper.finish(DEADLINE_S)
    assert not any(thread.name.startswith("mlflow-shipper") for thread in threading.enumerate())
    found = only_run(sqlite_tracker, experiment)
    assert found.status == "FINISHED"
    assert assert_equals_log(sqlite_tracker, found, run.path) > 100


def test_an_outage_loses_nothing(server: Server, root: Path, experiment: str, tmp_path: Path) -> None:
    tracker = Tracker(server.uri.replace("//", "//someone:secret@"), tmp_path)
    shipper = Shipper(tracker, root, experiment=experiment, parent=Parent(name="search"))
    first, second = SimulatedRun(root / "trial-1"), SimulatedRun(root / "trial-2")
    first.start()
    first.train(1)
    shipper.ship_once()
    assert shipper.last_error is None
    server.stop()
    try:
        first.train(1)
        first.end()
        second.complete(epochs=2)
        assert shipper.ship_once() == 0
        assert shipper.last_error is not None
        assert "***@127.0.0.1" in shipper.last_error
        assert "secret" not in shipper.last_error
        assert not shipper.flush(0.5)
        afresh = Shipper(tracker, root, experiment=experiment, parent=Parent(name="search"))
        assert (afresh.ship_once(), afresh.last_error is None) == (0, False)
    finally:
        server.start()
        server.wait()
    assert shipper.flush(DEADLINE_S)
    found = {run.name: run for run in runs(tracker, experiment)}
    assert len(runs(tracker, experiment)) == 3
    assert {name: run.status for name, run in found.items()} == {
        "search": "RUNNING",
        "trial-1": "FINISHED",
        "trial-2": "FINISHED",
    }
    for name in ("trial-1", "trial-2"):
        assert found[name].tags["mlflow.parentRunId"] == found["search"].id
        assert assert_equals_log(tracker, found[name], root / name / "events.jsonl") > 100


def test_a_store_that_was_never_there_harms_nobody(root: Path, experiment: str, tmp_path: Path) -> None:
    for name in ("trial-1", "trial-2"):
        SimulatedRun(root / name).complete(epochs=1)
    for uri in (f"http://127.0.0.1:{free_port()}", "sqlite:////proc/nowhere/mlflow.db", "mlruns"):
        tracker = Tracker(uri, tmp_path)
        shipper = Shipper(tracker, root, experiment=experiment)
        assert shipper.ship_once() == 0
        assert shipper.last_error is not None
        # One run has met the trouble; the others need not wait for the same.
        assert shipper.last_error.startswith("trial-1: ")
        assert not (root / "trial-2" / "mlflow.json").exists()
        missing = Shipper(tracker, root / "missing", experiment=experiment, parent=Parent(name="x"))
        assert (missing.ship_once(), missing.last_error is None) == (0, False)


def test_a_server_that_hangs_delays_the_end_no_longer_than_it_may(
    server: Server, root: Path, experiment: str, tmp_path: Path
) -> None:
    tracker = Tracker(server.uri, tmp_path)
    shipper = Shipper(tracker, root, experiment=experiment, interval_s=0.02)
    run = SimulatedRun(root / "trial")
    run.start()
    run.train(1)
    shipper.ship_once()
    shipper.start()
    with server.hanging():
        run.train(2)
        run.end()
        wait_until(lambda: tracker.asked_at is not None)
        began = time.monotonic()
        assert not shipper.finish(1.0)
        assert time.monotonic() - began < 3.0
        assert shipper.last_error == "the store has not answered for 1 s"
    afresh = Shipper(Tracker(server.uri, tmp_path), root, experiment=experiment)
    assert afresh.finish(DEADLINE_S)
    assert assert_equals_log(tracker, only_run(tracker, experiment), run.path) > 100


def test_a_store_that_fails_delays_the_end_no_longer_than_it_may(root: Path, experiment: str, tmp_path: Path) -> None:
    SimulatedRun(root / "trial").complete(epochs=1)
    shipper = Shipper(Tracker(f"http://127.0.0.1:{free_port()}", tmp_path), root, experiment=experiment)
    began = time.monotonic()
    assert not shipper.finish(0.5)
    assert time.monotonic() - began < 5.0


def test_a_full_disk_is_named(sqlite_tracker: Tracker, root: Path, experiment: str, small_disk: Path) -> None:
    shutil.copy(sqlite_tracker.uri.removeprefix("sqlite:///"), small_disk / "mlflow.db")
    tracker = Tracker(f"sqlite:///{small_disk}/mlflow.db", small_disk / "artifacts")
    tracker.experiment_id(experiment)
    filler = fill(small_disk)
    SimulatedRun(root / "trial").complete(epochs=1)
    shipper = Shipper(tracker, root, experiment=experiment)
    shipper.ship_once()
    assert shipper.last_error == f"trial: the disk of sqlite:///{small_disk}/mlflow.db is full: make room there"
    filler.unlink()
    assert shipper.flush(DEADLINE_S)


def test_a_full_disk_of_artifacts_is_named(
    sqlite_tracker: Tracker, root: Path, experiment: str, small_disk: Path
) -> None:
    run = SimulatedRun(root / "trial")
    run.complete(epochs=1)
    (run.folder / "report.html").write_bytes(bytes(80 * 2**20))
    shipper = Shipper(Tracker(sqlite_tracker.uri, small_disk), root, experiment=experiment)
    shipper.ship_once()
    assert shipper.last_error is not None
    assert f"the disk of {small_disk}" in shipper.last_error
    assert "is full: make room there" in shipper.last_error


def test_an_end_that_failed_is_made_up_for(
    sqlite_tracker: Tracker, root: Path, experiment: str, tmp_path: Path
) -> None:
    blocked = tmp_path / "artifacts"
    blocked.write_text("a file where the folder of artifacts should be")
    run = SimulatedRun(root)
    run.start()
    shipper = Shipper(Tracker(sqlite_tracker.uri, blocked), root, experiment=experiment)
    assert (shipper.ship_once(), shipper.last_error) == (1, None)
    run.train(1)
    run.end()
    shipper.ship_once()
    assert shipper.last_error is not None
    assert only_run(sqlite_tracker, experiment).status == "RUNNING"
    blocked.unlink()
    assert (shipper.ship_once(), shipper.last_error) == (1, None)
    found = only_run(sqlite_tracker, experiment)
    assert found.status == "FINISHED"
    assert assert_equals_log(sqlite_tracker, found, run.path) > 50
