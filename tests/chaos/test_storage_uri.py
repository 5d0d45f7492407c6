"""The commands with the URI of a store as storage path, each in a process of its own; and a real S3 server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import fs

from tests.chaos.mortal import DOOM, HOLD
from tests.chaos.shell import Shell, alive, done, still_runs
from tests.chaos.test_crashes import HELD
from tests.service.local_trial import local_run, trained
from tests.service.mlflow_server import assert_equals_log, free_port, runs
from tests.service.own_task import MODULE, own_spec
from tests.service.runs.several import NUM_SAMPLES, samples_of_epochs
from tests.service.terminal import typed
from tests.service.waiting import answers, wait_until
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.storage.layout import CHECKPOINT, EVENTS, MODEL, SPEC, WRITER
from triaccel_ray.service.storage.mirror import pull_all
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.store import Store
from triaccel_ray.service.storage.training_folder import TrainingFolder
from triaccel_ray.service.tracking.tracker import Tracker

CPU = ("--device", "cpu", "--memory-budget", "8GiB")


@dataclass(frozen=True)
class StoreShell(Shell):
    """With a store, and machines from which commands are typed."""

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def where(self) -> tuple[str, ...]:
        return ("--storage-path", self.store.as_uri(), "--tracking-uri", self.tracker.uri)

    @property
    def tracker(self) -> Tracker:
        return Tracker(f"sqlite:///{self.folder / 'mlflow.db'}", self.folder / "artifacts")

    def at(self, machine: str, *words: str) -> subprocess.Popen[str]:
        return self.type(*words, XDG_CACHE_HOME=str(self.folder / machine))


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[StoreShell]:
    (tmp_path / "held_task.py").write_text(MODULE + HELD)
    (tmp_path / "store").mkdir()
    (tmp_path / "held").mkdir()
    made = StoreShell(tmp_path)
    yield made
    made.clear()


def test_a_run_whose_machine_is_lost_goes_on_on_another_one(shell: StoreShell) -> None:
    (shell.folder / "hold").touch()
    words = ("run", "held_task:Held", "--name", "one", "--epochs", "3", "--tau-low", "0", *CPU)
    command = shell.at("a", *words, *shell.where)
    still_runs(command, (shell.store / "one" / CHECKPOINT).exists)
    command.kill()
    command.wait()
    for pid in map(int, os.listdir(shell.folder / "held")):
        wait_until(lambda pid=pid: not alive(pid))  # Ray ends them with their driver
    shell.release()
    shutil.rmtree(shell.folder / "a")
    said = done(shell.at("b", "resume", "one", *shell.where))
    assert "one: held_task:Held, the full control loop, finished" in said
    assert f"model:    {shell.store.as_uri()}/one/{MODEL} (epoch 3, the last)" in said
    assert (shell.store / "one" / MODEL).stat().st_size > 0
    run = read_run(shell.store / "one")
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", [1, 2, 3])
    assert [(each.cause, each.epoch) for each in run.interruptions] == [("preempted", 1)]
    (recorded,) = runs(shell.tracker, "triaccel-runs")
    assert recorded.status == "FINISHED"
    said = done(shell.at("c", "replay", "one", *shell.where))
    assert "every decision is the same" in said


def test_a_run_on_several_ranks_survives_losses_and_an_interrupt_at_a_store(shell: StoreShell) -> None:
    """The log and the MLflow run stay one, and each epoch trains on each sample once."""
    data = shell.folder / "data"
    data.mkdir()
    (data / HOLD).touch()
    (data / DOOM).write_text("0 4\n1 19\n")
    words = ("run", "tests.chaos.mortal:Mortal", "--name", "both", "--gpus", "2", "--data-dir", str(data))
    settings = "--epochs 8 --batch-min 16 --batch-size 32 --batch-max 64 --tau-low 0"
    command = shell.at("a", *words, *settings.split(), *CPU, *shell.where)
    log = shell.store / "both" / EVENTS
    still_runs(command, lambda: log.exists() and log.read_text().count('"kind":"epoch"') == 2)
    command.send_signal(signal.SIGINT)
    (data / HOLD).unlink()  # the ranks end after the epoch
    said = done(command, status=130)
    assert "triaccel resume both" in said
    shutil.rmtree(shell.folder / "a")
    said = done(shell.at("b", "resume", "both", *shell.where))
    assert "both: tests.chaos.mortal:Mortal, the full control loop, finished" in said
    run = read_run(shell.store / "both")
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", list(range(1, 9)))
    assert [each.cause for each in run.interruptions] == ["preempted", "stopped", "preempted"]
    assert samples_of_epochs(data) == {epoch: list(range(NUM_SAMPLES)) for epoch in range(8)}
    (recorded,) = runs(shell.tracker, "triaccel-runs")
    assert recorded.status == "FINISHED"
    assert assert_equals_log(shell.tracker, recorded, log) > 50


def test_a_search_reaches_the_store_and_is_reported_and_resumed_elsewhere(shell: StoreShell) -> None:
    words = ("search", "held_task:Blobs", "--name", "hunt", "--trials", "2", "--epochs", "2", "--margin", "100", *CPU)
    command = shell.at("a", *words, *shell.where)
    wait_until(lambda: (shell.store / "hunt" / "prepared.json").exists() or command.poll() is not None)
    shell.store.rename(shell.folder / "out-of-reach")
    time.sleep(3.0)  # whatever is done meanwhile, nothing may be lost; how much it is does not matter
    (shell.folder / "out-of-reach").rename(shell.store)
    said = done(command)
    assert f"files:    {shell.store.as_uri()}/hunt (working copy: {shell.folder / 'a'}" in said
    record = read_search(shell.store / "hunt")
    assert [trial.status for trial in record.trials].count("finished") >= 1
    assert len(record.trials) == 2
    assert (shell.store / "hunt" / "trials.jsonl").read_text().count("sample") == 2
    for trial in record.trials:  # nothing was lost while the store was out of reach
        (log,) = (shell.folder / "a" / "triaccel-ray").glob(f"*/.training/hunt/trials/{trial.name}/{EVENTS}")
        assert log.read_bytes() == (trial.folder / EVENTS).read_bytes()
    before = {path: path.read_bytes() for path in shell.store.rglob(EVENTS)}
    page = shell.store / "hunt" / "report.html"
    page.unlink()
    said = done(shell.at("b", "report", "hunt", "--storage-path", shell.store.as_uri()))
    assert "The best trial" in said
    assert page.exists()
    done(shell.at("b", "resume", "hunt", *shell.where))
    after = {path: path.read_bytes() for path in shell.store.rglob(EVENTS)}
    own = shell.store / "hunt" / EVENTS
    assert {path: text for path, text in after.items() if path != own} == {
        path: text for path, text in before.items() if path != own
    }
    recorded = runs(shell.tracker, "triaccel-searches")
    names = {"hunt", "amp of hunt", "fp32 of hunt", "probe", "trial-000", "trial-001"}
    assert {run.name for run in recorded} == names | {run.name for again in record.repeats.values() for run in again}
    assert next(run.status for run in recorded if run.name == "hunt") == "FINISHED"


def test_a_store_needs_a_tracking_store_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tracking, none = "give --tracking-uri http://HOST:PORT of an MLflow server", "there is no folder file:///"
    for words, needle in {
        "run digits": tracking,
        "ui": tracking,
        "submit -- run digits": tracking,
        "report nobody": none,
        "resume nobody": none,  # what is resumed knows its tracking store
        "report a/../../b": "name = '..'",
    }.items():
        status, _, said = typed(capsys, *words.split(), "--storage-path", tmp_path.as_uri())
        assert (status, needle in " ".join(said.split())) == (2, True), said
    assert not (tmp_path / "cache").exists()


KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URI of a bucket on an S3 server of our own."""
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("needs an S3 server: `pip install 'moto[server]'`, in any environment, and moto_server on the PATH")
    port = free_port()
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = (tmp_path / "s3.log").open("wb")
    process = subprocess.Popen([server, "-H", "127.0.0.1", "-p", str(port)], env=environment, stdout=log, stderr=log)
    try:
        endpoint = f"127.0.0.1:{port}"
        wait_until(lambda: answers(f"http://{endpoint}/"))
        fs.S3FileSystem(
            endpoint_override=endpoint, scheme="http", region="us-east-1", allow_bucket_creation=True
        ).create_dir("bucket")
        yield f"s3://bucket/runs?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    finally:
        process.terminate()
        process.wait()
        log.close()


def test_a_run_goes_on_from_a_bucket(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_task_in_a_bucket.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    place = StoragePath(bucket, "one")

    Store(place.parent).check(writable=True)
    spec = own_spec("own_task_in_a_bucket:Blobs")
    first = local_run(spec, place)
    first.step()
    first.cleanup()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    second = local_run(spec, place)
    assert second.step()["epoch"] == 2
    trained(second)
    assert sorted(Store(place).files(recursive=True)) == sorted([CHECKPOINT, EVENTS, SPEC, WRITER])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    status, out, _ = typed(capsys, "report", "one", "--storage-path", bucket)
    assert (status, "the full control loop, finished" in out) == (0, True)
    assert "report.html" in Store(place).files(recursive=False)
    pull_all(place)
    assert [each.epoch for each in read_run(place.folder).interruptions] == [1]
    with pytest.raises(StoreError, match="there is no bucket 'elsewhere'"):
        Store(StoragePath(bucket.replace("bucket/", "elsewhere/", 1))).check(writable=True)


def test_an_s3_server_that_nobody_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uri = f"s3://bucket/x?endpoint_override=127.0.0.1:{free_port()}&scheme=http&region=us-east-1"
    monkeypatch.setattr("triaccel_ray.service.storage.training_folder.PATIENCE_S", 0.0)
    with pytest.raises(StoreError, match="NETWORK_CONNECTION") as refusal:
        TrainingFolder(StoragePath(uri, "run")).open()
    assert "\n" not in str(refusal.value)
    assert "s3cr3t" not in str(refusal.value)
