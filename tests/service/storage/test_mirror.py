"""Working copies and the store: a folder behind a file:// URI, and a cache folder for each simulated machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.build import same
from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec
from tests.service.waiting import DEADLINE_S, wait_until
from triaccel_ray.records.events import EventLog, TakenOverError, read_events
from triaccel_ray.service.compare import comparison
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.report.report import REPORT
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.search import finding, search
from triaccel_ray.service.storage import mirroring
from triaccel_ray.service.storage.layout import CHECKPOINT, DAMAGED, ERROR, EVENTS, MODEL, PREVIOUS, SETTINGS, SPEC
from triaccel_ray.service.storage.mirror import (
    COMMAND,
    LOG,
    RUN,
    Mirror,
    pull_all,
    pull_logs,
    push_commands,
    require_unused,
    sync_runs,
)
from triaccel_ray.service.storage.mirroring import Background, RunCopy, bring_notes, catch_up, edited, insist, mirrored
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store
from triaccel_ray.service.tracking import shipment


@dataclass(frozen=True)
class Machines:
    """Machines that know of each other by the store alone."""

    root: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def place(self) -> StoragePath:
        return StoragePath(self.store.as_uri(), "run")

    def move_to(self, name: str) -> Path:
        """Makes this process one of the machine `name`; returns its copy of the run."""
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.root / name))
        return self.place.folder

    def is_gone(self, gone: bool) -> None:
        """Takes the store out of reach, or back."""
        here, there = self.store, self.root / "out-of-reach"
        (here if gone else there).rename(there if gone else here)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines(tmp_path, monkeypatch)
    made.store.mkdir()
    made.move_to("a")
    return made


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / NAMES[name]).write_text(text)


NAMES = {
    "spec": SPEC,
    "log": EVENTS,
    "checkpoint": CHECKPOINT,
    "previous": PREVIOUS,
    "model": MODEL,
    "recorded": "mlflow.json",
}


def test_the_files_of_a_command_are_those_that_its_modules_write() -> None:
    written = (search.SEARCH, comparison.COMPARISON, search.PREPARED, comparison.CHOICES, search.JOURNAL)
    assert set(COMMAND.files) == {*written, SETTINGS, finding.FOUND, shipment.SHIPPED, REPORT, "comparison.md"}


def test_a_copy_becomes_what_another_machine_brought(machines: Machines) -> None:
    here = machines.move_to("a")
    write(here, spec="s", log="1\n2\n", checkpoint="after 2", previous="after 1", model="of 2")
    (here / f".{CHECKPOINT}.1.partial").write_text("torn")
    (here / "mlflow.db").write_text("a database")
    mirror = Mirror(machines.place, RUN)
    assert mirror.push()
    assert not mirror.push()  # nothing has changed
    brought = {SPEC, EVENTS, CHECKPOINT, MODEL}
    assert set(os.listdir(machines.store / "run")) == brought
    there = machines.move_to("b")
    assert mirror.pull(RUN.files)
    assert {name: (there / name).read_text() for name in brought} == {
        SPEC: "s",
        EVENTS: "1\n2\n",
        CHECKPOINT: "after 2",
        MODEL: "of 2",
    }
    assert not mirror.pull(RUN.files)
    write(there, log="1\n2\n3\n4\n")
    mirror.push()
    assert (machines.store / "run" / EVENTS).read_text() == "1\n2\n3\n4\n"
    machines.move_to("a")
    write(here, log="1\n2\nelsewhere it went on\n", checkpoint="never brought there")
    assert mirror.pull(RUN.files)  # the store has changed since: that is the run
    assert (here / EVENTS).read_text() == "1\n2\n3\n4\n"
    assert (here / CHECKPOINT).read_text() == "after 2"
    assert not (here / PREVIOUS).exists()  # of the other way that the run has not taken


def test_a_copy_that_is_ahead_of_the_store_stays_and_is_brought_there(machines: Machines) -> None:
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    write(here, log="1\n", checkpoint="after 1")
    mirror.push()
    write(here, log="1\n2\n", checkpoint="after 2", previous="after 1")
    assert not mirror.pull(RUN.files)
    assert (here / PREVIOUS).exists()
    sync_runs(machines.place)
    assert (machines.store / "run" / CHECKPOINT).read_text() == "after 2"


def test_who_only_looks_takes_logs_and_drops_a_checkpoint_that_no_longer_fits(machines: Machines) -> None:
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    write(here, spec="s", log="1\n")
    mirror.push()
    write(here, checkpoint="of a process that was lost", model="likewise")
    there = machines.move_to("b")
    mirror.pull(RUN.files)
    write(there, log="1 anew\n")
    mirror.push()
    machines.move_to("a")
    pull_logs(StoragePath(machines.place.storage))
    assert (here / EVENTS).read_text() == "1 anew\n"
    assert not (here / CHECKPOINT).exists()
    assert not (here / MODEL).exists()


def test_a_reader_never_finds_a_checkpoint_ahead_of_its_log(machines: Machines) -> None:
    """A run writes on while it is pushed, and another machine takes what is there, again and again."""
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    write(here, log="", spec="s")
    store, stop = Store(machines.place.storage), threading.Event()

    def train() -> None:
        number = 0
        while not stop.is_set():
            with (here / EVENTS).open("a") as log:
                log.write(f"{number}\n")
            number += 1
            (here / "new").write_text(str(number))
            (here / "new").replace(here / CHECKPOINT)

    def push() -> None:
        while not stop.is_set():
            mirror.push()

    threads = [threading.Thread(target=work) for work in (train, push)]
    for thread in threads:
        thread.start()
    taken = machines.root / "taken"
    taken.mkdir()
    try:
        wait_until(lambda: (machines.store / "run" / CHECKPOINT).exists())
        counts = set()
        deadline = time.monotonic() + DEADLINE_S
        while len(counts) < 20:
            assert time.monotonic() < deadline
            for name in (CHECKPOINT, EVENTS):
                store.read(f"run/{name}", taken / name)
            num_records = int((taken / CHECKPOINT).read_text())
            assert len((taken / EVENTS).read_text().splitlines()) >= num_records
            counts.add(num_records)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_reader_never_finds_the_end_of_a_run_without_its_model(machines: Machines) -> None:
    """A run writes on while it is pushed, each time a model before the record that speaks of it."""
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    write(here, log="", spec="s")
    store, stop = Store(machines.place.storage), threading.Event()

    def train() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            (here / "new").write_text(str(number))
            (here / "new").replace(here / MODEL)
            with (here / EVENTS).open("a") as log:
                log.write(f"{number}\n")

    def push() -> None:
        while not stop.is_set():
            mirror.push()

    threads = [threading.Thread(target=work) for work in (train, push)]
    for thread in threads:
        thread.start()
    taken = machines.root / "taken"
    taken.mkdir()
    try:
        wait_until((machines.store / "run" / EVENTS).exists)
        counts = set()
        deadline = time.monotonic() + DEADLINE_S
        while len(counts) < 20:
            assert time.monotonic() < deadline
            try:
                for name in (EVENTS, MODEL):
                    store.read(f"run/{name}", taken / name)
            except StoreError as error:  # unlike a store of objects, a folder is without a file while it is replaced
                if isinstance(error.__cause__, FileNotFoundError):
                    continue
                raise
            last = len((taken / EVENTS).read_text().splitlines())
            assert int((taken / MODEL).read_text()) >= last
            counts.add(last)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_what_a_process_of_this_machine_works_on_is_left_alone(machines: Machines) -> None:
    here = machines.move_to("a")
    write(here, log="1\n", recorded="{}")
    Mirror(machines.place, RUN).push()
    push_commands(machines.place)
    copy = RunCopy(machines.place)
    copy.open()
    (machines.store / "run" / EVENTS).write_text("of somebody who does not know\n")
    (machines.store / "run" / "mlflow.json").write_text("likewise")
    pull_all(machines.place)
    pull_logs(machines.place)
    assert ((here / EVENTS).read_text(), (here / "mlflow.json").read_text()) == ("1\n", "{}")
    copy.close()
    pull_all(machines.place)
    assert "does not know" in (here / EVENTS).read_text()


def test_a_run_is_not_trained_twice_on_one_machine(machines: Machines) -> None:
    copy = RunCopy(machines.place)
    copy.open()
    with pytest.raises(StoreError, match="store/run: another process of this machine works on it; wait for it"):
        RunCopy(machines.place, patience_s=0.1).open()
    copy.close()
    second = RunCopy(machines.place)
    second.open()
    second.close()
    second.close()


def test_keys_that_lead_out_of_the_copy_are_left_in_the_store(machines: Machines) -> None:
    from triaccel_ray.service.storage import mirror

    for folder in ("run/trials/.hidden", "run/a b"):
        write(machines.store / folder, log="1\n")
    write(machines.store / "run" / "trials" / "t0", log="1\n")
    assert [place.name for place, _ in mirror._folders(machines.place)] == ["run/trials/t0"]


def test_a_name_is_used_once_by_all_machines(machines: Machines) -> None:
    require_unused(machines.place)
    write(machines.store / "run", log="1\n")
    with pytest.raises(ValueError, match=r"name = 'run': file://.*/store/run exists already and is left as it is"):
        require_unused(machines.place)


def test_a_damaged_note_costs_nothing_that_the_store_has(machines: Machines) -> None:
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    write(here, log="1\n")
    mirror.push()
    (here / ".mirror-run.json").write_text("{")
    (here / EVENTS).write_text("torn")
    assert mirror.pull(LOG)
    assert (here / EVENTS).read_text() == "1\n"


def test_the_end_of_a_run_elsewhere_can_be_written_here(machines: Machines) -> None:
    here, mirror = machines.move_to("b"), Mirror(machines.place, RUN)
    write(here, spec="s", log="1\n2\n")
    mirror.push()
    here = machines.move_to("a")
    with edited(machines.place):
        assert (here / EVENTS).read_text() == "1\n2\n"
        write(here, log="1\nend\n")
    assert (machines.store / "run" / EVENTS).read_text() == "1\nend\n"


def test_a_store_that_cannot_be_used_says_so(machines: Machines, tmp_path: Path) -> None:
    store = Store((tmp_path / "store" / "runs").as_uri())
    store.check(writable=True)  # which makes the folder
    assert os.listdir(tmp_path / "store" / "runs") == []
    with pytest.raises(StoreError, match=r"storage path = 'file:///.*/a/b': .*; see that bucket or folder exist"):
        Store((tmp_path / "a" / "b").as_uri()).check(writable=True)
    with pytest.raises(StoreError, match=r"there is no .*/b; see that bucket or folder exist"):
        Store((tmp_path / "b").as_uri()).check(writable=False)
    with pytest.raises(
        StoreError, match="Unrecognized filesystem type in URI: ftp://host/x; must be a folder, or a URI"
    ):
        Store("ftp://host/x").check(writable=False)
    with pytest.raises(StoreError, match="storage path = 'mock://': names no folder"):
        Store("mock://").check(writable=False)
    shutil.rmtree(tmp_path / "store")
    for work in (lambda: store.files("", recursive=True), lambda: store.read("x", tmp_path / "x")):
        with pytest.raises(StoreError, match="store/runs"):
            work()
    with (tmp_path / "empty").open("w+b") as empty, pytest.raises(StoreError, match=r"there is no .*/store/runs"):
        store.write("x", empty, 0)
    assert not (tmp_path / "store").exists()  # what is gone is not made anew: a mount would be hidden by it


def test_a_file_that_is_cut_while_it_is_copied_is_not_taken_for_whole(machines: Machines, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"123")
    store = Store(machines.place.storage)
    with (tmp_path / "short").open("rb") as file, pytest.raises(StoreError, match="7 bytes are missing"):
        store.write("x", file, 10)
    assert not (machines.store / "x").exists()


def test_a_store_that_returns_in_time_was_never_away(machines: Machines) -> None:
    machines.is_gone(True)
    returning = threading.Timer(0.5, machines.is_gone, [False])
    returning.start()
    insist(lambda: Store(machines.place.storage).check(writable=False), 60.0)
    returning.join()
    machines.is_gone(True)
    with pytest.raises(StoreError, match="there is no"):
        catch_up(machines.place, patience_s=0.3)


def test_work_in_the_background_is_done_once_the_store_is_back(caplog: pytest.LogCaptureFixture) -> None:
    done, away = [], [True]

    def work() -> None:
        if away[0]:
            raise StoreError("storage path = 'x': out of reach")
        done.append(None)

    background = Background(work, "a run")
    background.ask()
    wait_until(lambda: caplog.records)
    assert [record.getMessage() for record in caplog.records] == [
        "a run: storage path = 'x': out of reach. Work goes on, and is brought there once the store answers"
    ]
    away[0] = False
    wait_until(lambda: done)
    background.end()
    assert caplog.records[1].getMessage() == "a run: the store answers again, and has everything"
    away[0] = True
    with pytest.raises(StoreError, match="out of reach"):
        Background(work, "another run").end(0.2)


@pytest.fixture
def task(module: str) -> str:
    return f"{module}:Blobs"


def losses(log: Path) -> list[float]:
    return [event.record.train_loss for event in read_events(log) if hasattr(event.record, "train_loss")]


def test_a_run_goes_on_on_another_machine_and_equals_an_undisturbed_one(machines: Machines, task: str) -> None:
    spec = own_spec(task, keep="best")
    trained(local_run(spec, StoragePath.of(machines.root / "whole")))
    expected = losses(machines.root / "whole" / EVENTS)

    machines.move_to("a")
    first = local_run(spec, machines.place)
    assert first.step()["epoch"] == 1
    wait_until((machines.store / "run" / CHECKPOINT).exists)
    there = machines.move_to("b")
    second = local_run(spec, machines.place)
    assert [second.step()["epoch"] for _ in range(2)] == [2, 3]
    second.cleanup()
    run = read_run(machines.store / "run")
    assert (run.status, [epoch.train_loss for epoch in run.epochs]) == ("finished", expected)
    assert [each.epoch for each in run.interruptions] == [1]
    assert (machines.store / "run" / EVENTS).read_bytes() == (there / EVENTS).read_bytes()
    kept, undisturbed = (torch.load(folder / MODEL) for folder in (machines.store / "run", machines.root / "whole"))
    assert same(kept, undisturbed)
    first._copy = None  # the machine is lost
    first._broken = True
    first.cleanup()


def test_a_store_out_of_reach_while_a_run_trains_loses_nothing(machines: Machines, task: str) -> None:
    here = machines.move_to("a")
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    wait_until((machines.store / "run" / CHECKPOINT).exists)
    machines.is_gone(True)
    trial.step()
    machines.is_gone(False)
    assert trial.step()["done"]
    trial.cleanup()
    for name in (SPEC, EVENTS, CHECKPOINT):
        assert (machines.store / "run" / name).read_bytes() == (here / name).read_bytes()
    assert read_run(machines.store / "run").status == "finished"


def test_a_run_that_cannot_be_brought_to_the_store_says_where_it_is(machines: Machines, task: str) -> None:
    here = machines.move_to("a")
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    assert trial._copy is not None
    trial._copy._patience_s = 0.3
    machines.is_gone(True)
    trial.step()
    with pytest.raises(
        StoreError, match=rf"not everything of file://.*/run is in the store \(.*{here} on this machine"
    ):
        trial.step()
    trial.cleanup()
    assert read_run(here).status == "finished"
    machines.is_gone(False)
    with mirrored(machines.place, has_own_log=False):  # as `triaccel resume` does
        pass
    assert read_run(machines.store / "run").status == "finished"


def test_a_run_that_fails_is_brought_to_the_store(machines: Machines, task: str) -> None:
    trained(local_run(own_spec(task.replace("Blobs", "Broken")), machines.place))
    assert read_run(machines.store / "run").status == "failed (bug)"


def test_a_traceback_is_in_the_store_as_long_as_its_failure_counts(machines: Machines, module: str) -> None:
    here, there = machines.move_to("a"), machines.move_to("b")
    machines.move_to("a")
    trained(local_run(own_spec(f"{module}:Broken"), machines.place))
    assert "KeyError" in (machines.store / "run" / ERROR).read_text()
    (here / DAMAGED).write_text("set aside")
    Mirror(machines.place, RUN).push()
    machines.move_to("b")
    pull_all(machines.place)
    assert "KeyError" in (there / ERROR).read_text()
    assert (there / DAMAGED).read_text() == "set aside"
    machines.move_to("a")
    copy = RunCopy(machines.place)
    copy.open()
    again = Worker(own_spec(f"{module}:Broken"), here)
    again.resume()  # the failure is an interruption from here on
    again.stop()
    again.close()
    copy.close()
    assert (machines.store / "run" / ERROR).read_bytes() == b""
    assert not Mirror(machines.place, RUN).push()  # and that is known
    machines.move_to("b")
    catch_up(machines.place)
    assert not (there / ERROR).exists()
    assert read_run(there).status == "stopped"
    machines.move_to("a")
    (here / ERROR).write_text("another traceback")
    Mirror(machines.place, RUN).push()
    machines.move_to("b")
    catch_up(machines.place)
    assert (there / ERROR).read_text() == "another traceback"


@pytest.mark.parametrize("work", ["step", "cleanup"])
def test_who_has_lost_a_run_to_another_process_leaves_the_store_alone(machines: Machines, task: str, work: str) -> None:
    """A log is taken over by its path, which no lock of the store's copy prevents."""
    here, mirror = machines.move_to("a"), Mirror(machines.place, RUN)
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    wait_until(lambda: CHECKPOINT in mirror._known().files)  # the last one to be brought
    before = {path.name: path.read_bytes() for path in (machines.store / "run").iterdir()}
    EventLog(here / EVENTS, keep=1).close()
    result = getattr(trial, work)()
    assert work == "cleanup" or "another process has taken this run over" in result["message"]
    assert {path.name: path.read_bytes() for path in (machines.store / "run").iterdir()} == before
    with mirror.locked(0.0) as is_free:
        assert is_free
    trial.cleanup()


def test_a_command_that_has_lost_its_search_leaves_the_store_alone(machines: Machines) -> None:
    machines.monkeypatch.setattr(mirroring, "INTERVAL_S", 3600.0)

    def search_on() -> None:
        with mirrored(machines.place, has_own_log=True):
            write(machines.move_to("a"), log="1\n")
            raise TakenOverError("another process goes on with it")

    with pytest.raises(TakenOverError, match="goes on with it"):
        search_on()
    assert not (machines.store / "run" / EVENTS).exists()
    with Mirror(machines.place, RUN).locked(0.0) as is_free:
        assert is_free


def test_a_run_that_is_stopped_is_brought_to_the_store(machines: Machines, task: str) -> None:
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    trial.cleanup()
    assert read_run(machines.store / "run").status == "stopped"


def test_a_command_and_its_store_hold_the_same(machines: Machines) -> None:
    place = StoragePath(machines.place.storage, "search")
    trial = place / "trials" / "t0"
    machines.move_to("b")
    with mirrored(place, has_own_log=True):
        write(place.folder, log="of the search\n", recorded="{}")
        bring_notes(place)
        assert (machines.store / "search" / "mlflow.json").exists()
        (machines.store / "search" / "trials" / "t0").mkdir(parents=True)
        (machines.store / "search" / "trials" / "t0" / EVENTS).write_text("1\n")
        wait_until((trial.folder / EVENTS).exists)
        (trial.folder / "mlflow.json").write_text(json.dumps({"cursor": 1}))
    assert json.loads((machines.store / "search" / "trials" / "t0" / "mlflow.json").read_text()) == {"cursor": 1}
    assert (machines.store / "search" / EVENTS).read_text() == "of the search\n"


def test_a_command_that_cannot_reach_the_store_at_its_end_says_so(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    words = f"triaccel resume run --storage-path {machines.place.storage}"
    said = f"`{words}` typed here brings it there once the store answers"
    with pytest.raises(StoreError, match=re.escape(said)), mirrored(machines.place, has_own_log=True, patience_s=0.3):
        machines.is_gone(True)
    machines.is_gone(False)
    with (
        contextlib.suppress(KeyboardInterrupt),
        mirrored(machines.place, has_own_log=True, patience_s=0.3),
    ):
        machines.is_gone(True)
        raise KeyboardInterrupt
    assert said in caplog.text
