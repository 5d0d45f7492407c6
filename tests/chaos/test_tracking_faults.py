"""What a tracking server does wrong, and that neither training nor the record suffers from it."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.shell import fill
from tests.service.build import SimulatedRun
from tests.service.mlflow_server import Server, assert_equals_log, free_port, only_run, runs
from tests.service.proxy import Answer, Proxy, proxy_to
from tests.service.waiting import DEADLINE_S, wait_until
from triaccel_ray.records.events import End, EventLog
from triaccel_ray.service.tracking.shipper import ParentRun, Shipper
from triaccel_ray.service.tracking.tracker import RUN_KEY_TAG, Tracker

PARENT = ParentRun()


def live_through(shipper: Shipper, root: Path) -> list[SimulatedRun]:
    """A search of two trials, shipped at every turn of its life."""
    trials = [SimulatedRun(root / name) for name in ("trial-1", "trial-2")]
    root.mkdir(exist_ok=True)
    shipper.ship_once()
    for trial in trials:
        trial.start()
        shipper.ship_once()
        for _ in range(2):
            trial.train(1)
            shipper.ship_once()
        trial.end()
        shipper.ship_once()
    log = EventLog(root / "events.jsonl")
    log.append(End(status="finished", results={"score": 7.0}))
    log.close()
    return trials


def assert_all_there_once(tracker: Tracker, experiment: str, trials: list[SimulatedRun]) -> None:
    found = {run.name: run for run in runs(tracker, experiment)}
    assert len(runs(tracker, experiment)) == len(trials) + 1
    assert {run.status for run in found.values()} == {"FINISHED"}
    for trial in trials:
        recorded = found[trial.folder.name]
        assert recorded.tags["mlflow.parentRunId"] == found["a search"].id
        assert assert_equals_log(tracker, recorded, trial.path) > 100


@pytest.mark.parametrize("num_lost", [1, 2])
def test_answers_that_are_lost_leave_nothing_twice(
    server: Server, root: Path, experiment: str, tmp_path: Path, num_lost: int
) -> None:
    """One answer: MLflow's client asks again itself. Two: the call fails, and the next pass makes it again."""

    def rule(method: str, number: int) -> Answer:
        return "lose" if method != "GET" and number % 6 < num_lost else "pass"

    with proxy_to(server.uri) as proxy:
        shipper = Shipper(Tracker(proxy.uri, tmp_path), root, experiment=experiment, parent=PARENT)
        proxy.rule = rule
        trials = live_through(shipper, root)
        num_passes = 1
        while shipper.ship_once() or shipper.last_error:
            num_passes += 1
            assert num_passes < 50, shipper.last_error
        assert sum(answer == "lose" for *_, answer in proxy.answers) > 10
    assert_all_there_once(Tracker(server.uri, tmp_path), experiment, trials)


@contextmanager
def failing(server: Server, proxy: Proxy, fault: str) -> Iterator[None]:
    """The server is dead, or answers 500 to all that goes through the proxy."""
    if fault == "500":
        proxy.rule = lambda method, number: "error"
        yield
        proxy.rule = lambda method, number: "pass"
        return
    server.stop()
    try:
        yield
    finally:
        server.start()
        server.wait()


@pytest.mark.parametrize("fault", ["500", "127.0.0.1"])
def test_a_server_that_fails_is_waited_out(
    server: Server, root: Path, experiment: str, tmp_path: Path, fault: str
) -> None:
    with proxy_to(server.uri) as proxy:
        uri = proxy.uri if fault == "500" else server.uri
        shipper = Shipper(Tracker(uri, tmp_path), root, experiment=experiment, parent=PARENT)
        shipper.ship_once()
        assert shipper.last_error is None
        with failing(server, proxy, fault):
            trials = live_through(shipper, root)
            assert shipper.last_error is not None
            assert fault in shipper.last_error
            assert not shipper.flush(0.0)
            afresh = Shipper(Tracker(uri, tmp_path), root, experiment=experiment, parent=PARENT)
            assert (afresh.ship_once(), afresh.last_error is None) == (0, False)
        assert shipper.flush(DEADLINE_S), shipper.last_error
    assert_all_there_once(Tracker(server.uri, tmp_path), experiment, trials)


def test_a_server_that_hangs_holds_up_its_own_thread_alone(
    server: Server, root: Path, experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1000")
    with proxy_to(server.uri) as proxy:
        tracker = Tracker(proxy.uri, tmp_path)
        tracker.prepare()
        shipper = Shipper(tracker, root, experiment=experiment, parent=PARENT, interval_s=0.02)
        trial = SimulatedRun(root / "trial-1")
        trial.start()
        shipper.ship_once()
        num_asked = len(proxy.answers)
        with server.hanging():
            trial.train(1)
            shipper.start()
            wait_until(lambda: len(proxy.answers) > num_asked)
            trial.train(2)
            # The writer is done, and the shipper still waits for its first answer.
            assert (len(proxy.answers), shipper.last_error) == (num_asked + 1, None)
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        wait_until(lambda: shipper.ship_once() == 0)
        with server.hanging():
            trial.train(1)
            wait_until(lambda: shipper.last_error is not None)
            trial.end()
            num_asked = len(proxy.answers)
            assert shipper.ship_once() == 0
            # Known to hang, it is asked no more than whether it is well.
            assert {path for _, path, _ in proxy.answers[num_asked:]} == {"/health"}
        log = EventLog(root / "events.jsonl")
        log.append(End(status="finished"))
        log.close()
        assert shipper.finish(DEADLINE_S), shipper.last_error
    assert_all_there_once(Tracker(server.uri, tmp_path), experiment, [trial])


def record_a_search(uri: str, folder: str, experiment: str, barrier: object) -> None:
    """What one of several searches does that begin at the same time."""
    root = Path(folder)
    tracker = Tracker(uri, root.parent / "artifacts")
    barrier.wait()  # type: ignore[attr-defined]  # a proxy of multiprocessing's Barrier
    tracker.prepare()
    shipper = Shipper(tracker, root, experiment=experiment, parent=PARENT)
    live_through(shipper, root)
    assert shipper.flush(DEADLINE_S), shipper.last_error


def test_searches_that_begin_together_on_a_new_store_are_all_recorded(tmp_path: Path, experiment: str) -> None:
    # The fork server imports MLflow once, for all of them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow", "mlflow.store.tracking.sqlalchemy_store", __name__])
    uri, barrier, names = f"sqlite:///{tmp_path}/mlflow.db", context.Barrier(4), [f"search-{i}" for i in range(4)]
    processes = [
        context.Process(target=record_a_search, args=(uri, str(tmp_path / name), experiment, barrier)) for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    tracker = Tracker(uri, tmp_path / "artifacts")
    assert sorted(each.name for each in tracker.client.search_experiments()) == sorted(["Default", experiment])
    found = runs(tracker, experiment)
    assert len(found) == 4 * 3
    parents = {run.id for run in found if run.name.startswith("search")}
    for run in found:
        if not run.name.startswith("search"):
            parent = run.tags["mlflow.parentRunId"]
            assert parent in parents
            folder = run.tags[RUN_KEY_TAG].partition("@")[0]
            assert assert_equals_log(tracker, run, tmp_path / folder / "events.jsonl") > 100


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
        began = time.monotonic()
        assert not shipper.finish(0.5)
        assert time.monotonic() - began < 5.0
        missing = Shipper(tracker, root / "missing", experiment=experiment, parent=ParentRun())
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
    (root / "trial" / "report.html").write_bytes(bytes(80 * 2**20))
    artifacts = Shipper(Tracker(sqlite_tracker.uri, small_disk), root, experiment=experiment)
    artifacts.ship_once()
    assert artifacts.last_error is not None
    assert re.search(f"the disk of {small_disk}.* is full: make room there", artifacts.last_error)


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
