"""Logs that were cut back to a checkpoint, and what MLflow then holds."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import assert_equals_log, history, only_run, ship
from triaccel_ray.records.events import read_events
from triaccel_ray.service.tracking.shipper import Shipper
from triaccel_ray.service.tracking.tracker import Tracker


@pytest.mark.parametrize(("in_one_process", "seen_between"), [(True, False), (False, True)])
def test_a_resumed_run_is_recorded_as_its_log_is_now(
    sqlite_tracker: Tracker, root: Path, experiment: str, in_one_process: bool, seen_between: bool
) -> None:
    following = Shipper(sqlite_tracker, root, experiment=experiment)

    def look() -> None:
        if in_one_process:
            following.ship_once()
            assert following.last_error is None
        else:
            ship(sqlite_tracker, root, experiment)

    run = SimulatedRun(root / "trial")
    run.start(epochs=3)
    look()
    first = only_run(sqlite_tracker, experiment)
    sqlite_tracker.client.set_tag(first.id, "mlflow.note.content", "looks good")
    before = {point for key in first.keys for point in history(sqlite_tracker, first.id, key)}

    # The checkpoint holds the first epoch. Memory-driven decisions differ, and an epoch takes fewer steps.
    run.capacity, run.steps_per_epoch = 96, 150
    run.go_back(epochs=1)
    if seen_between:
        look()
        assert only_run(sqlite_tracker, experiment).tags["resumed_from_step"] == "200"
    run.train(2)
    look()
    assert only_run(sqlite_tracker, experiment).status == "RUNNING"
    run.end()
    look()
    found = only_run(sqlite_tracker, experiment)
    assert (found.name, found.status, found.tags["outcome"]) == ("trial", "FINISHED", "finished")
    assert found.tags["resumed_from_step"] == "200"
    assert found.tags["interrupted"] == "preempted: the process was lost"
    assert (found.tags["replaces"], found.tags["mlflow.note.content"]) == (first.id, "looks good")
    assert assert_equals_log(sqlite_tracker, found, run.path) > 100
    after = {point for key in found.keys for point in history(sqlite_tracker, found.id, key)}
    assert before - after  # what the first attempt alone had done
    old = sqlite_tracker.client.get_run(first.id)
    assert old.info.lifecycle_stage == "deleted"
    assert "superseded" in old.data.tags


@pytest.mark.parametrize("lost", ["the deletion", "the creation"])
def test_a_crash_while_a_run_is_recorded_anew_leaves_one_run(
    sqlite_tracker: Tracker, root: Path, experiment: str, lost: str
) -> None:
    run = SimulatedRun(root / "trial")
    run.start(epochs=2)
    ship(sqlite_tracker, root, experiment)
    note = root / "trial" / "mlflow.json"
    first = json.loads(note.read_text())
    run.go_back(epochs=1)
    fresh = {name: first[name] for name in ("store", "key", "experiment")} | {"replaces": first["run_id"]}
    if lost == "the creation":
        ship(sqlite_tracker, root, experiment)
    note.write_text(json.dumps(fresh))
    run.train(1)
    run.end()
    ship(sqlite_tracker, root, experiment)
    assert_equals_log(sqlite_tracker, only_run(sqlite_tracker, experiment), run.path)


def test_a_run_whose_end_alone_was_cut_off_continues_its_own_unless_it_had_a_result(
    sqlite_tracker: Tracker, root: Path, experiment: str
) -> None:
    run = SimulatedRun(root / "trial")
    run.start(epochs=2)
    run.end("failed", "bug", "KeyError")
    ship(sqlite_tracker, root, experiment)
    first = only_run(sqlite_tracker, experiment)
    assert (first.status, first.tags["outcome"], first.tags["failure"]) == ("FAILED", "failed", "bug: KeyError")
    run.go_back(epochs=2)
    ship(sqlite_tracker, root, experiment)
    going_on = only_run(sqlite_tracker, experiment)
    assert (going_on.status, going_on.tags["outcome"]) == ("RUNNING", "running")
    run.train(1)
    run.end()
    ship(sqlite_tracker, root, experiment)
    found = only_run(sqlite_tracker, experiment)
    assert (found.id, found.status, found.tags["resumed_from_step"]) == (first.id, "FINISHED", "400")
    assert "failure" not in found.tags
    assert_equals_log(sqlite_tracker, found, run.path)

    run.go_back(epochs=3)
    run.end("stopped")
    ship(sqlite_tracker, root, experiment)
    found = only_run(sqlite_tracker, experiment)
    assert found.id != first.id
    assert not any(key.startswith("final/") for key in found.keys)
    assert_equals_log(sqlite_tracker, found, run.path)


def test_a_run_that_begins_again_has_its_new_params(sqlite_tracker: Tracker, root: Path, experiment: str) -> None:
    run = SimulatedRun(root)
    run.start(epochs=1)
    ship(sqlite_tracker, root, experiment)
    first = only_run(sqlite_tracker, experiment)
    lost = run.resume(keep=0)
    time.sleep(0.002)  # the log's clock counts milliseconds
    run.parameters = {"recipe.lr": 0.2, "recipe.epochs": 4, "added": True}
    run.start()
    run.append(*lost[1:])
    ship(sqlite_tracker, root, experiment)
    found = only_run(sqlite_tracker, experiment)
    assert found.id != first.id
    assert (found.params["recipe.lr"], found.params["added"]) == ("0.2", "True")
    assert_equals_log(sqlite_tracker, found, run.path)


def test_a_log_in_the_place_of_one_with_the_same_size_and_time_is_recorded_anew(
    sqlite_tracker: Tracker, root: Path, experiment: str
) -> None:
    run = SimulatedRun(root / "trial")
    run.start(epochs=1)
    shipper = Shipper(sqlite_tracker, root, experiment=experiment)
    shipper.ship_once()
    first = only_run(sqlite_tracker, experiment)
    *_, last = read_events(run.path)
    other = run.path.read_text().replace(
        f'"time_ms":{last.time_ms},"kind":"epoch"', '"time_ms":1234567890123,"kind":"epoch"'
    )
    status = run.path.stat()
    (root / "new").write_text(other)
    os.utime(root / "new", ns=(status.st_atime_ns, status.st_mtime_ns))  # as where the file system's clock is coarse
    (root / "new").replace(run.path)
    assert run.path.stat().st_size == status.st_size
    assert shipper.ship_once() == len(list(read_events(run.path)))
    found = only_run(sqlite_tracker, experiment)
    assert found.id != first.id
    assert_equals_log(sqlite_tracker, found, run.path)
