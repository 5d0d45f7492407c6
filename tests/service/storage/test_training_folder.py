"""Runs that are trained on one machine and go on on another."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO

import pytest
import torch

from tests.build import same
from tests.service.local_trial import local_run, trained
from tests.service.own_task import own_spec
from tests.service.storage.conftest import Machines, held, write
from tests.service.waiting import wait_until
from triaccel_ray.records.events import EventLog, TakenOverError
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT, DAMAGED, ERROR, EVENTS, MODEL, PREVIOUS, SPEC, WRITER
from triaccel_ray.service.storage.mirror import mirrored, pull_all, pull_run, require_unused
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store
from triaccel_ray.service.storage.training_folder import editing_log


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
    write(again.path, {EVENTS: "1\n2\n3 elsewhere\n4\n"})
    again.close()
    with pytest.raises(TakenOverError):
        second.push()


def test_a_writer_whose_first_push_fails_halfway_is_fenced_off_by_the_one_before(machines: Machines) -> None:
    first = machines.move_to("a")
    first.open()
    write(first.path, {SPEC: "s", EVENTS: "1\n"})
    first.push()
    second = machines.move_to("b")
    second.open()
    write(second.path, {EVENTS: "1\n2 elsewhere\n"})

    def only_the_writer(store: Store, path: str, content: BinaryIO, num_bytes: int) -> Stamp:
        if not path.endswith(WRITER):
            raise StoreError("out of reach")
        return whole(store, path, content, num_bytes)

    whole = Store.write
    with machines.monkeypatch.context() as patched:
        patched.setattr(Store, "write", only_the_writer)
        with pytest.raises(StoreError, match="out of reach"):
            second.push()
    again = machines.move_to("a")
    again.open()
    write(again.path, {EVENTS: "1\n2\n"})
    again.push()
    with pytest.raises(TakenOverError):
        second.push()
    assert held(machines.kept)[EVENTS] == "1\n2\n"


def test_the_log_of_a_run_elsewhere_is_read_without_taking_it_over_and_can_be_ended_here(machines: Machines) -> None:
    there = machines.move_to("b")
    there.open()
    write(there.path, {EVENTS: "1\n2\n", CHECKPOINT: "after 2", ERROR: "what it failed by"})
    there.close()
    writer = (machines.kept / WRITER).read_text()
    here = machines.move_to("a")
    with editing_log(machines.place) as folder:
        assert held(folder) == {EVENTS: "1\n2\n", ERROR: "what it failed by"}
    assert (machines.kept / WRITER).read_text() == writer
    with editing_log(machines.place) as folder:
        (folder / ERROR).unlink()
        write(folder, {EVENTS: "1\nend\n"})
    assert (machines.kept / WRITER).read_text() != writer
    assert held(machines.kept) == {EVENTS: "1\nend\n", CHECKPOINT: "after 2", ERROR: ""}
    here.open()
    assert held(here.path) == {EVENTS: "1\nend\n", CHECKPOINT: "after 2"}
    here.close()


@pytest.mark.parametrize(("first", "last"), [(EVENTS, CHECKPOINT), (MODEL, EVENTS)])
def test_a_reader_never_finds_what_is_written_last_ahead_of_the_other(
    machines: Machines, first: str, last: str
) -> None:
    """A run writes on while it is pushed, and another machine takes what is there, the last file first."""
    here, stop = machines.move_to("a"), threading.Event()
    here.open()
    write(here.path, {EVENTS: "", SPEC: "s"})

    def train() -> None:
        numbers = itertools.count(1)
        while not stop.is_set():
            number = next(numbers)
            for name in (first, last):
                if name == EVENTS:
                    with (here.path / name).open("a") as log:
                        log.write(f"{number}\n")
                else:
                    (here.path / "new").write_text(str(number))
                    (here.path / "new").replace(here.path / name)

    def push() -> None:
        while not stop.is_set():
            here.push()

    def number_in(name: str) -> int:
        while True:  # unlike a store of objects, a folder is without a file while it is replaced
            with suppress(StoreError):
                Store(machines.place).read(name, machines.root / name)
                break
        text = (machines.root / name).read_text()
        return len(text.splitlines()) if name == EVENTS else int(text)

    def look() -> bool:
        count = number_in(last)
        assert number_in(first) >= count
        counts.add(count)
        return len(counts) >= 20

    counts: set[int] = set()
    with ThreadPoolExecutor() as pool:
        works = [pool.submit(train), pool.submit(push)]
        try:
            wait_until((machines.kept / last).exists)
            wait_until(look)
        finally:
            stop.set()
    assert [work.result() for work in works] == [None, None]
    here.close()


def test_a_run_goes_on_on_another_machine_and_equals_an_undisturbed_one(machines: Machines, module: str) -> None:
    spec = own_spec(f"{module}:Blobs", keep="best")
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
    whole = read_run(machines.root / "whole")
    assert [epoch.train_loss for epoch in run.epochs] == [epoch.train_loss for epoch in whole.epochs]
    assert (machines.kept / EVENTS).read_bytes() == (there.path / EVENTS).read_bytes()
    kept, undisturbed = (torch.load(folder / MODEL) for folder in (machines.kept, whole.folder))
    assert same(kept, undisturbed)

    before = {path.name: path.read_bytes() for path in machines.kept.iterdir()}
    machines.move_to("a")  # whose process is still alive
    first.step()
    first._folder._pushing._thread.join()
    result = first.step()
    assert result["done"]
    assert "another process has taken this run over" in result["message"]
    first.cleanup()
    assert {path.name: path.read_bytes() for path in machines.kept.iterdir()} == before


def test_a_run_that_is_stopped_is_brought_to_the_store_unless_another_process_has_it(
    machines: Machines, spec: RunSpec
) -> None:
    trial = local_run(spec, machines.place)
    trial.step()
    trial.cleanup()
    assert read_run(machines.kept).status == "stopped"
    trial = local_run(spec, machines.place)
    trial.step()
    EventLog(machines.place.training_folder / EVENTS, keep=1).close()
    assert "another process has taken this run over" in trial.step()["message"]
    trial.cleanup()


def test_a_run_that_the_store_has_never_seen_is_found_where_it_trained(machines: Machines) -> None:
    write(machines.move_to("a").path, {SPEC: "s", EVENTS: "1\n", CHECKPOINT: "after 1"})
    pull_all(machines.place)
    assert held(machines.place.folder) == {SPEC: "s", EVENTS: "1\n"}
    assert held(machines.kept)[CHECKPOINT] == "after 1"


def test_a_run_that_was_refused_has_not_used_its_name(machines: Machines) -> None:
    folder = machines.move_to("a")
    folder.open()
    folder.close()
    assert not (machines.kept / WRITER).exists()
    require_unused(machines.place)


def test_a_traceback_is_in_the_store_as_long_as_its_failure_counts(machines: Machines, module: str) -> None:
    spec, here = own_spec(f"{module}:Mistaken"), machines.move_to("a")
    trained(local_run(spec, machines.place))
    assert read_run(machines.kept).status == "failed (bug)"
    (here.path / DAMAGED).write_text("set aside")
    here.push()
    machines.move_to("b")
    pull_all(machines.place)
    assert "ValueError" in held(machines.place.folder)[ERROR]
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
    pull_run(machines.place)
    assert ERROR not in held(machines.place.folder)
    assert read_run(machines.place.folder).status == "stopped"


def test_a_store_out_of_reach_loses_nothing(machines: Machines, spec: RunSpec) -> None:
    here = machines.move_to("a")
    trial = local_run(spec, machines.place)
    trial.step()
    wait_until((machines.kept / CHECKPOINT).exists)
    with machines.unreachable():
        trial.step()
        here_it_is = f"it is in {here.path} on this machine"
        with pytest.raises(StoreError, match=rf"not everything of file://.*/run is in the store \(.*{here_it_is}"):
            trial.step()
        trial.cleanup()
    assert read_run(machines.kept).status == "unfinished"
    with mirrored(machines.place):  # as `triaccel resume` does
        pass
    for name in (SPEC, EVENTS, CHECKPOINT):
        assert (machines.kept / name).read_bytes() == (here.path / name).read_bytes()
    assert read_run(machines.kept).status == read_run(machines.place.folder).status == "finished"
