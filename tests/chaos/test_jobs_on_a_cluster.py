"""The commands that hand work to a cluster, on a real one with Ray's own Jobs API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.own_task import write_module
from tests.service.ray_head import ray_head
from tests.service.terminal import typed
from tests.service.test_jobs import SECRETS
from tests.service.waiting import wait_until
from triaccel_ray.records.events import read_events
from triaccel_ray.service.jobs import job_client
from triaccel_ray.service.runs.record import read_run


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_head() as address:
        yield address


@pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's own client, following logs
def test_work_is_handed_over_looked_after_and_stopped(
    cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # --address comes first
    secrets = {name: secret for name, secret in SECRETS.items() if name != "RAY_AUTH_TOKEN"}  # this cluster has none
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    project = tmp_path / "project"
    project.mkdir()
    module = write_module(project, monkeypatch)
    monkeypatch.chdir(project)
    at = ("--address", cluster)
    assert typed(capsys, "jobs", *at)[:2] == (0, "no jobs yet; `triaccel submit -- search digits` submits one\n")

    work = ("run", "digits", "--epochs", "1", "--tau-low", "0")  # a CPU emulates FP16 at a tenth of the speed
    status, out, said = typed(capsys, "submit", *at, "--name", "short", "--", *work)
    assert (status, out.splitlines()[:1]) == (0, ["submitted: short"]), said
    assert str(project / "triaccel-runs") in said
    status, out, said = typed(capsys, "logs", "short", "--follow", *at)
    assert (status, said) == (0, "short: SUCCEEDED\n"), out
    assert "digits, the full control loop, finished" in out
    assert read_run(project / "triaccel-runs" / "short").status == "finished"
    assert "finished" in typed(capsys, "logs", "short", *at)[1]

    # The task's module is in the working directory alone, and so has traveled if the job trains.
    typed(capsys, "submit", *at, "--name", "long", "--", "run", f"{module}:Blobs", "--epochs", "1000000")
    log = project / "triaccel-runs" / "long" / "events.jsonl"
    wait_until(
        lambda: log.exists() and len(log.read_bytes().splitlines()) > 2,
        say=lambda: typed(capsys, "logs", "long", *at),
    )
    status, out, _ = typed(capsys, "jobs", *at)
    assert status == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[1], row[3]) for row in rows] == [("long", "run", "RUNNING"), ("short", "run", "SUCCEEDED")]

    with job_client(cluster) as client:
        known = repr(client.list_jobs())  # all that Ray tells of them
    assert "run digits" in known
    assert not any(secret in known for secret in secrets.values())

    status, out, said = typed(capsys, "stop", "long", *at)
    assert (status, out.splitlines()[0].startswith("long has been asked to stop"), said) == (0, True, "")
    assert f"triaccel submit --address {cluster} -- resume long --storage-path {project / 'triaccel-runs'}" in out
    status, out, said = typed(capsys, "logs", "long", "--follow", *at)
    assert (status, said) == (1, "long: STOPPED\n")
    assert "stopped; to go on from the last checkpoint:" in out
    assert len(list(read_events(log))) > 2

    for words in (("logs", "nobody"), ("logs", "nobody", "--follow"), ("stop", "nobody")):
        status, _, said = typed(capsys, *words, *at)
        assert (status, "the cluster refuses: " in said, "nobody" in said) == (2, True, True), said
    status, _, said = typed(capsys, "submit", *at, "--name", "short", "--", *work)
    assert (status, "the cluster refuses: " in said, "already exists" in said) == (2, True, True), said
