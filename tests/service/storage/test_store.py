import errno
import shutil
import threading
import time
from io import BytesIO
from pathlib import Path

import pytest

from tests.service.storage.conftest import Machines
from tests.service.waiting import wait_until
from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import DiskFullError, StoreError
from triaccel_ray.service.storage.mirror import pull_run
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Stamp, Store
from triaccel_ray.service.storage.training_folder import RetryingThread, retry


def test_a_store_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    store = Store(StoragePath((tmp_path / "store" / "runs").as_uri()))
    with pytest.raises(StoreError, match=r"storage path = 'file:///.*/runs': .*; see that bucket or folder exist"):
        store.check(writable=True)  # whose parent is missing: a mount, perhaps
    (tmp_path / "store").mkdir()
    store.check(writable=True)
    with pytest.raises(StoreError, match="7 bytes are missing"):  # a file that was cut meanwhile
        store.write("x", BytesIO(b"123"), 10)
    assert store.files(recursive=True).keys() == {".x.partial"}
    for uri, said in {
        (tmp_path / "b").as_uri(): r"there is no .*/b; see that bucket or folder exist",
        "s3:///x": "Missing bucket name in S3 URI; must be a folder, or a URI",
        "file:///": "storage path = 'file:///': names no folder",
    }.items():
        with pytest.raises(StoreError, match=said):
            Store(StoragePath(uri)).check(writable=False)
    shutil.rmtree(tmp_path / "store")
    for work in (
        lambda: store.files(recursive=True),
        lambda: store.read("x", tmp_path / "x"),
        lambda: store.write("x", BytesIO()),
    ):
        with pytest.raises(StoreError, match=r"there is no .*/store/runs"):
            work()
    assert not (tmp_path / "store").exists()  # what is gone is not made anew: a mount would be hidden by it


def test_a_full_disk_is_this_machines_or_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(StoragePath(tmp_path.as_uri()))
    store.write("kept", BytesIO(b"123"), 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(DiskFullError, match=f"the disk of {tmp_path / 'here'} is full"):
        store.read("kept", tmp_path / "here" / "kept")
    monkeypatch.setattr("triaccel_ray.service.storage.store._copy", full)
    with pytest.raises(StoreError, match="No space left on device; see that bucket or folder exist"):
        store.write("kept", BytesIO(b"123"), 3)


def test_a_file_in_a_store_has_a_date_that_the_kernel_gives_no_other(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store, path = Store(StoragePath((tmp_path / "store").as_uri())), tmp_path / "store" / "kept"
    for _ in range(20):  # its ctime is that of the last write or renaming, by the kernel
        began_ns = time.time_ns()
        stamp = store.write("kept", BytesIO(b"same"), 4)
        assert stamp == store.files(recursive=False)["kept"] == Stamp.of(path.stat())
        assert began_ns - 20 * 10**6 < stamp.mtime_ns < path.stat().st_ctime_ns


def test_a_store_that_returns_in_time_was_never_away(machines: Machines) -> None:
    with machines.unreachable():
        with pytest.raises(StoreError, match="there is no"):
            pull_run(machines.place)
        threading.Timer(0.5, (machines.root / "out-of-reach").rename, [machines.store]).start()
        machines.give_up_after(60.0)
        retry(lambda: Store(machines.place.parent).check(writable=False))
        machines.store.rename(machines.root / "out-of-reach")


def test_work_in_the_background_is_done_once_the_store_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("triaccel_ray.service.storage.training_folder.RETRY_S", 0.05)
    errors: list[Exception | None] = [StoreError("storage path = 'x': out of reach")]
    done = threading.Event()

    def work() -> None:
        if errors[0] is not None:
            raise errors[0]
        done.set()

    background = RetryingThread(work, "a run")
    background.request()
    wait_until(lambda: caplog.records)
    errors[0] = None
    done.wait()
    wait_until(lambda: len(caplog.records) == 2)
    assert [record.getMessage() for record in caplog.records] == [
        "a run: storage path = 'x': out of reach. Training continues, and files are uploaded later",
        "a run: the store has everything again",
    ]
    errors[0] = TakenOverError("another process goes on")
    background.request()
    background._thread.join()
    with pytest.raises(TakenOverError, match="another process goes on"):
        background.request()
    assert len(caplog.records) == 2
    errors[0] = RuntimeError("nobody foresaw it")
    RetryingThread(work, "a search", interval_s=0.0)
    wait_until(lambda: len(caplog.records) == 3)
    assert caplog.records[-1].getMessage() == "a search: nothing more is uploaded in the background"
    hold = threading.Event()
    slow = RetryingThread(hold.wait, "another run", interval_s=0.0)
    with pytest.raises(StoreError, match="another run: the store has not answered for 0 s"):
        slow.stop(0.1)
    hold.set()
