"""Copies of what a store holds: a folder behind a file:// URI, and a cache folder for each simulated machine."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest
import torch

from tests.build import same
from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec
from tests.service.waiting import wait_until
from triaccel_ray.records.events import EventLog, TakenOverError, read_events
from triaccel_ray.service.compare import comparison
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.report.report import REPORT
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.search import finding, search
from triaccel_ray.service.storage import mirror
from triaccel_ray.service.storage.background import Background, insist
from triaccel_ray.service.storage.copies import COMMAND, PAGES
from triaccel_ray.service.storage.layout import CHECKPOINT, DAMAGED, ERROR, EVENTS, MODEL, PREVIOUS, SETTINGS, SPEC
from triaccel_ray.service.storage.mirror import bring, catch_up, mirrored, pull_all, require_unused
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store
from triaccel_ray.service.storage.training_folder import WRITER, TrainingFolder, edited
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
    def kept(self) -> Path:
        return self.store / "run"

    @property
    def place(self) -> StoragePath:
        return StoragePath(self.store.as_uri(), "run")

    def move_to(self, name: str) -> TrainingFolder:
        """Makes this process one of the machine `name`; returns the run's training folder there."""
        self.monkeypatch.setenv("XDG_CACHE_HOME", str(self.root / name))
        return TrainingFolder(self.place, patience_s=0.3)

    @contextmanager
    def unreachable(self) -> Iterator[None]:
        self.store.rename(self.root / "out-of-reach")
        yield
        (self.root / "out-of-reach").rename(self.store)


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines(tmp_path, monkeypatch)
    made.store.mkdir()
    made.move_to("a")
    return made


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def held(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


def test_the_files_of_a_command_are_those_that_its_modules_write() -> None:
    written = (search.SEARCH, comparison.COMPARISON, search.PREPARED, comparison.CHOICES, search.JOURNAL)
    assert set(COMMAND) == {*written, SETTINGS, finding.FOUND, shipment.SHIPPED, REPORT, "comparison.md"}


def test_a_run_goes_on_from_the_store_unless_its_own_folder_is_ahead(machines: Machines) -> None:
    first = machines.move_to("a")
    first.open()
    state = {SPEC: "s", EVENTS: "1\n2\n", CHECKPOINT: "after 2", MODEL: "of 2"}
    write(first.path, {**state, PREVIOUS: "after 1", f".{CHECKPOINT}.1.partial": "torn", "mlflow.db": "a database"})
    first.close()
    first.close()
    assert held(machines.kept) == state
    before = {path.name: path.stat().st_ino for path in machines.kept.iterdir()}
    first.push()
    assert {path.name: path.stat().st_ino for path in machines.kept.iterdir()} == before  # nothing is copied again
    write(first.path, {EVENTS: "1\n2\n3\n"})  # and the process is lost
    first.open()
    assert held(first.path) == {**state, EVENTS: "1\n2\n3\n", PREVIOUS: "after 1", "mlflow.db": "a database"}

    second = machines.move_to("b")
    second.open()
    assert held(second.path) == state
    write(second.path, {EVENTS: "1\n2\n3 elsewhere\n", CHECKPOINT: "after 3 elsewhere"})
    second.push()
    with pytest.raises(TakenOverError, match=r"another process has taken this run over"):
        first.push()
    with pytest.raises(TakenOverError, match=r"goes on with it \(.+\); this one has ended"):
        first.close()
    assert held(machines.kept)[EVENTS] == "1\n2\n3 elsewhere\n"
    second.close()

    again = machines.move_to("a")
    again.open()  # what was never brought from here is of a way that the run has not taken
    assert held(again.path) == {**held(machines.kept), "mlflow.db": "a database"}
    again.close()


def test_the_end_of_a_run_elsewhere_can_be_written_here_and_it_can_go_on_here(machines: Machines) -> None:
    there = machines.move_to("b")
    there.open()
    write(there.path, {EVENTS: "1\n2\n", CHECKPOINT: "after 2"})
    there.close()
    here = machines.move_to("a")
    with edited(machines.place) as folder:
        assert held(folder) == {EVENTS: "1\n2\n"}
        write(folder, {EVENTS: "1\nend\n"})
    assert held(machines.kept) == {EVENTS: "1\nend\n", CHECKPOINT: "after 2"}
    here.open()
    assert held(here.path) == held(machines.kept)
    here.close()


@pytest.mark.parametrize(("first", "last"), [(EVENTS, CHECKPOINT), (MODEL, EVENTS)])
def test_a_reader_never_finds_what_is_written_last_ahead_of_the_other(
    machines: Machines, first: str, last: str
) -> None:
    """A run writes on while it is pushed, and another machine takes what is there, the last file first."""
    here, stop = machines.move_to("a"), threading.Event()
    here.open()
    write(here.path, {EVENTS: "", SPEC: "s"})

    def append(name: str, number: int) -> None:
        if name == EVENTS:
            with (here.path / name).open("a") as log:
                log.write(f"{number}\n")
        else:
            (here.path / "new").write_text(str(number))
            (here.path / "new").replace(here.path / name)

    def train() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            append(first, number)
            append(last, number)

    def push() -> None:
        while not stop.is_set():
            here.push()

    def number_in(name: str) -> int:
        while True:  # unlike a store of objects, a folder is without a file while it is replaced
            with suppress(StoreError):
                Store(machines.place.storage).read(f"run/{name}", machines.root / name)
                break
        text = (machines.root / name).read_text()
        return len(text.splitlines()) if name == EVENTS else int(text)

    threads = [threading.Thread(target=work) for work in (train, push)]
    for thread in threads:
        thread.start()
    try:
        wait_until((machines.kept / last).exists)
        counts: set[int] = set()

        def look() -> bool:
            count = number_in(last)
            assert number_in(first) >= count
            counts.add(count)
            return len(counts) >= 20

        wait_until(look)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    here.close()


def test_a_store_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    store = Store((tmp_path / "store" / "runs").as_uri())
    with pytest.raises(StoreError, match=r"storage path = 'file:///.*/runs': .*; see that bucket or folder exist"):
        store.check(writable=True)  # whose parent is missing: a mount, perhaps
    (tmp_path / "store").mkdir()
    store.check(writable=True)
    with pytest.raises(StoreError, match="7 bytes are missing"):  # a file that was cut meanwhile
        store.write("x", BytesIO(b"123"), 10)
    assert store.files("", recursive=True).keys() == {".x.partial"}
    for uri, said in {
        (tmp_path / "b").as_uri(): r"there is no .*/b; see that bucket or folder exist",
        "ftp://host/x": "Unrecognized filesystem type in URI: ftp://host/x; must be a folder, or a URI",
        "mock://": "storage path = 'mock://': names no folder",
    }.items():
        with pytest.raises(StoreError, match=said):
            Store(uri).check(writable=False)
    shutil.rmtree(tmp_path / "store")
    for work in (
        lambda: store.files("", recursive=True),
        lambda: store.read("x", tmp_path / "x"),
        lambda: store.write("x", BytesIO()),
    ):
        with pytest.raises(StoreError, match=r"there is no .*/store/runs"):
            work()
    assert not (tmp_path / "store").exists()  # what is gone is not made anew: a mount would be hidden by it


def test_a_store_that_returns_in_time_was_never_away(machines: Machines) -> None:
    with machines.unreachable():
        with pytest.raises(StoreError, match="there is no"):
            catch_up(machines.place, patience_s=0.3)
        threading.Timer(0.5, (machines.root / "out-of-reach").rename, [machines.store]).start()
        insist(lambda: Store(machines.place.storage).check(writable=False))
        machines.store.rename(machines.root / "out-of-reach")


def test_work_in_the_background_is_done_once_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triaccel_ray.service.storage.background.RETRY_S", 0.05)
    errors: list[Exception | None] = [StoreError("storage path = 'x': out of reach")]
    done = threading.Event()

    def work() -> None:
        if errors[0] is not None:
            raise errors[0]
        done.set()

    background = Background(work, "a run")
    background.ask()
    wait_until(lambda: caplog.records)
    errors[0] = None
    done.wait()
    wait_until(lambda: len(caplog.records) == 2)
    assert [record.getMessage() for record in caplog.records] == [
        "a run: storage path = 'x': out of reach. Work goes on, and is brought there later",
        "a run: the store answers again, and has everything",
    ]
    errors[0] = TakenOverError("another process goes on")
    background.ask()
    background._thread.join()
    with pytest.raises(TakenOverError, match="another process goes on"):
        background.ask()
    hold = threading.Event()
    slow = Background(hold.wait, "another run", interval_s=0.0)
    with pytest.raises(StoreError, match="another run: the store has not answered for 0 s"):
        slow.stop(0.1)
    hold.set()


@pytest.fixture
def task(module: str) -> str:
    return f"{module}:Blobs"


def losses(log: Path) -> list[float]:
    return [event.record.train_loss for event in read_events(log) if hasattr(event.record, "train_loss")]


def test_a_run_goes_on_on_another_machine_and_equals_an_undisturbed_one(machines: Machines, task: str) -> None:
    spec = own_spec(task, keep="best")
    trained(local_run(spec, StoragePath.of(machines.root / "whole")))

    machines.move_to("a")
    first = local_run(spec, machines.place)
    assert first.step()["epoch"] == 1
    wait_until((machines.kept / CHECKPOINT).exists)
    there = machines.move_to("b")
    second = local_run(spec, machines.place)
    assert [second.step()["epoch"] for _ in range(2)] == [2, 3]
    second.cleanup()
    run = read_run(machines.kept)
    assert (run.status, [each.epoch for each in run.interruptions]) == ("finished", [1])
    assert losses(machines.kept / EVENTS) == losses(machines.root / "whole" / EVENTS)
    assert (machines.kept / EVENTS).read_bytes() == (there.path / EVENTS).read_bytes()
    kept, undisturbed = (torch.load(folder / MODEL) for folder in (machines.kept, machines.root / "whole"))
    assert same(kept, undisturbed)

    before = {path.name: path.read_bytes() for path in machines.kept.iterdir()}
    machines.move_to("a")  # whose process was given up for lost, and is not
    first.step()
    assert first._folder is not None
    assert first._folder._pushing is not None
    first._folder._pushing._thread.join()
    result = first.step()
    assert result["done"]
    assert "another process has taken this run over" in result["message"]
    first.cleanup()
    assert {path.name: path.read_bytes() for path in machines.kept.iterdir()} == before


def test_a_store_out_of_reach_loses_nothing(machines: Machines, task: str) -> None:
    here = machines.move_to("a")
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    wait_until((machines.kept / CHECKPOINT).exists)
    assert trial._folder is not None
    trial._folder._patience_s = 0.3
    with machines.unreachable():
        trial.step()
        with pytest.raises(
            StoreError, match=rf"not everything of file://.*/run is in the store \(.*{here.path} on this machine"
        ):
            trial.step()
        trial.cleanup()
    assert read_run(machines.kept).status == "unfinished"
    with mirrored(machines.place):  # as `triaccel resume` does
        pass
    for name in (SPEC, EVENTS, CHECKPOINT):
        assert (machines.kept / name).read_bytes() == (here.path / name).read_bytes()
    assert read_run(machines.kept).status == read_run(machines.place.folder).status == "finished"


def test_a_run_that_is_stopped_is_brought_to_the_store_unless_another_process_has_it(
    machines: Machines, task: str
) -> None:
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    trial.cleanup()
    assert read_run(machines.kept).status == "stopped"
    trial = local_run(own_spec(task), machines.place)
    trial.step()
    EventLog(machines.place.training_folder / EVENTS, keep=1).close()
    assert "another process has taken this run over" in trial.step()["message"]
    trial.cleanup()


def test_a_traceback_is_in_the_store_as_long_as_its_failure_counts(machines: Machines, module: str) -> None:
    spec, here = own_spec(f"{module}:Broken"), machines.move_to("a")
    trained(local_run(spec, machines.place))
    assert read_run(machines.kept).status == "failed (bug)"
    (here.path / DAMAGED).write_text("set aside")
    here.push()
    machines.move_to("b")
    pull_all(machines.place)
    assert "KeyError" in held(machines.place.folder)[ERROR]
    assert held(machines.place.folder)[DAMAGED] == "set aside"
    machines.move_to("a")
    here.open()
    again = Worker(spec, here.path)
    again.resume()  # the failure is an interruption from here on
    again.stop()
    again.close()
    here.close()
    assert held(machines.kept)[ERROR] == ""
    machines.move_to("b")
    catch_up(machines.place)
    assert ERROR not in held(machines.place.folder)
    assert read_run(machines.place.folder).status == "stopped"


def test_a_command_and_its_store_hold_the_same(machines: Machines, caplog: pytest.LogCaptureFixture) -> None:
    place = StoragePath(machines.place.storage, "search")
    there, trial = machines.store / "search", place / "trials" / "t0"
    machines.monkeypatch.setattr(mirror, "INTERVAL_S", 0.1)
    with mirrored(place):
        write(place.folder, {"search.json": "{}", EVENTS: "of the search\n", "trials.jsonl": "t0\n"})
        bring(place, ["trials.jsonl"])
        assert (there / "trials.jsonl").exists()
        write(there / "trials" / "t0", {EVENTS: "1\n", SPEC: "s", CHECKPOINT: "after 1"})
        wait_until((trial.folder / EVENTS).exists)
        write(trial.folder, {"mlflow.json": "recorded"})
        write(there, {"trials.jsonl": "of somebody who does not know"})
        pull_all(place)  # another command here only looks
        assert held(place.folder)["trials.jsonl"] == "t0\n"
        with (
            pytest.raises(StoreError, match="another process of this machine works on it"),
            mirrored(trial, patience_s=0),
        ):
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
    bring(place, PAGES)
    assert (held(there)[REPORT], held(there)["trials.jsonl"]) == ("a page", "t0\n")
    with machines.unreachable():
        bring(place, PAGES)
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
    said = f"`{words}` typed here brings it there once the store answers"
    away = machines.unreachable()
    with pytest.raises(StoreError, match=re.escape(said)), mirrored(machines.place, patience_s=0.3):
        away.__enter__()
    away.__exit__(None, None, None)
    with suppress(KeyboardInterrupt), mirrored(machines.place, patience_s=0.3):
        machines.unreachable().__enter__()
        raise KeyboardInterrupt
    assert said in caplog.text


def test_keys_that_lead_out_of_the_copy_are_left_in_the_store(machines: Machines) -> None:
    for folder in ("run/trials/.hidden", "run/a b", "run/trials/t0"):
        write(machines.store / folder, {EVENTS: "1\n"})
    pull_all(machines.place)
    assert [path.parent.name for path in machines.place.folder.rglob(EVENTS)] == ["t0"]


@pytest.mark.parametrize("where", ["store", "working copy", "training folder"])
def test_a_name_is_used_once_by_all_machines(machines: Machines, where: str) -> None:
    place = machines.place
    folders = {"store": machines.kept, "working copy": place.folder, "training folder": place.training_folder}
    require_unused(place)
    write(folders[where], {EVENTS: "1\n"})
    with pytest.raises(ValueError, match=r"name = 'run': file://.*/store/run exists already and is left as it is"):
        require_unused(place)


def test_a_run_that_was_refused_has_not_used_its_name(machines: Machines) -> None:
    folder = machines.move_to("a")
    folder.open()
    folder.close()
    assert not (machines.kept / WRITER).exists()
    require_unused(machines.place)
