"""Working copies of commands, and readers of a store."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.service.storage.conftest import Machines, held, write
from tests.service.waiting import wait_until
from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.storage import mirror
from triaccel_ray.service.storage.layout import CHECKPOINT, EVENTS, PAGE_FILES, REPORT, SPEC, claiming_name
from triaccel_ray.service.storage.mirror import mirrored, pull_all, require_unused, upload
from triaccel_ray.service.storage.storage_path import StoragePath


def test_a_command_and_its_store_hold_the_same(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    place = StoragePath(machines.place.storage, "search")
    there, trial = machines.store / "search", place / "trials" / "t0"
    machines.monkeypatch.setattr(mirror, "INTERVAL_S", 0.1)
    with mirrored(place):
        write(place.folder, {"search.json": "{}", EVENTS: "of the search\n", "trials.jsonl": "t0\n"})
        upload(place, ["trials.jsonl"])
        assert (there / "trials.jsonl").exists()
        write(there / "trials" / "t0", {EVENTS: "1\n", SPEC: "s", CHECKPOINT: "after 1"})
        wait_until((trial.folder / EVENTS).exists)
        write(trial.folder, {"mlflow.json": "recorded"})
        write(there, {"trials.jsonl": "of somebody who does not know"})
        pull_all(place)  # another command here only looks
        assert held(place.folder)["trials.jsonl"] == "t0\n"
        machines.monkeypatch.setattr(mirror, "PATIENCE_S", 0.0)
        busy = "another process of this machine works on it"
        with pytest.raises(StoreError, match=busy), mirrored(trial):
            pass
    assert held(there / "trials" / "t0")["mlflow.json"] == "recorded"
    assert held(there) == {"search.json": "{}", EVENTS: "of the search\n", "trials.jsonl": "t0\n"}
    assert held(trial.folder) == {EVENTS: "1\n", SPEC: "s", "mlflow.json": "recorded"}

    machines.move_to("b")
    pull_all(place)
    assert held(place.folder) == held(there)
    write(place.folder, {"trials.jsonl": "t0\nt1\n", REPORT: "a page"})
    pull_all(place)  # what is newer here stays: the store was away, perhaps
    assert held(place.folder)["trials.jsonl"] == "t0\nt1\n"
    upload(place, PAGE_FILES)
    assert (held(there)[REPORT], held(there)["trials.jsonl"]) == ("a page", "t0\n")
    with machines.unreachable():
        upload(place, PAGE_FILES)
    assert "report.html, " in caplog.text or "report.html: on this machine alone for now" in caplog.text


def test_a_command_that_has_lost_its_search_leaves_the_store_alone(machines: Machines) -> None:
    machines.monkeypatch.setattr(mirror, "INTERVAL_S", 3600.0)

    def search_on() -> None:
        with mirrored(machines.place):
            write(machines.place.folder, {"search.json": "{}", EVENTS: "1\n"})
            raise TakenOverError("another process goes on with it")

    with pytest.raises(TakenOverError, match="goes on with it"):
        search_on()
    assert not machines.kept.exists()


def test_a_command_that_cannot_reach_the_store_at_its_end_says_so(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"triaccel resume run --storage-path {machines.place.storage}"
    said = f"`{words}` typed here uploads it once the store answers"
    away = machines.unreachable()
    with pytest.raises(StoreError, match=re.escape(said)), mirrored(machines.place):
        away.__enter__()
    away.__exit__(None, None, None)
    with suppress(KeyboardInterrupt), mirrored(machines.place):
        machines.unreachable().__enter__()
        raise KeyboardInterrupt
    assert said in caplog.text


def test_what_a_command_that_fails_has_written_is_brought_though_its_exchange_hangs(machines: Machines) -> None:
    machines.monkeypatch.setattr(mirror, "INTERVAL_S", 3600.0)
    end = mirror.RetryingThread.stop

    def hang(following: mirror.RetryingThread, at_most_s: float) -> None:
        end(following, at_most_s)
        raise StoreError("the store has not answered")

    machines.monkeypatch.setattr(mirror.RetryingThread, "stop", hang)
    with suppress(KeyboardInterrupt), mirrored(machines.place):
        write(machines.place.folder, {"search.json": "{}"})
        raise KeyboardInterrupt
    assert held(machines.kept) == {"search.json": "{}"}


def test_keys_that_lead_out_of_the_copy_are_left_in_the_store(machines: Machines) -> None:
    for folder in ("run/trials/.hidden", "run/a b", "run/trials/t0"):
        write(machines.store / folder, {EVENTS: "1\n"})
    pull_all(machines.place)
    assert [path.parent.name for path in machines.place.folder.rglob(EVENTS)] == ["t0"]


def test_of_two_commands_with_one_name_the_second_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with claiming_name(folder):
        with pytest.raises(ValueError, match=r"name = 'one': .* is empty: .* delete it then"), claiming_name(folder):
            pass
        assert folder.is_dir()
    assert not folder.exists()  # nothing was begun


@pytest.mark.parametrize("where", ["store", "working copy", "training folder"])
def test_a_name_is_used_once_by_all_machines(machines: Machines, where: str) -> None:
    place = machines.place
    folders = {"store": machines.kept, "working copy": place.folder, "training folder": place.training_folder}
    require_unused(place)
    write(folders[where], {EVENTS: "1\n"})
    with pytest.raises(ValueError, match=r"name = 'run': file://.*/store/run exists already and is left as it is"):
        require_unused(place)
