"""What becomes of a trained model: where the command says it is, and MLflow's registry, whatever happens to that."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import same
from tests.service.own_task import own_spec, write_module
from tests.service.proxy import Answer, proxy_to
from tests.service.stores import Server, free_port, only_run, runs, ship
from tests.service.test_end_to_end import Desk, desk  # noqa: F401  # the fixture
from tests.service.worker_factory import WorkerFactory, train
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.commands.model_delivery import deliver_model
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.storage.layout import MODEL
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.model_registry import ARTIFACT
from triaccel_ray.service.tracking.tracking import Tracker

WORDS = "triaccel resume trained"


@pytest.fixture
def trained(worker_factory: WorkerFactory, module: str, tmp_path: Path, experiment: str) -> RunRecord:
    """A finished run, whose model is to be registered under the name of the test's experiment."""
    spec = own_spec(f"{module}:Blobs", keep="last", register=experiment)
    train(worker_factory.start(spec, tmp_path / "trained")).finish()
    return read_run(tmp_path / "trained")


def delivered(run: RunRecord, tracker: Tracker) -> bool:
    return deliver_model(run, StoragePath.of(run.folder), tracker, WORDS)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tracker, str, Path], bool]:
    """Whether the registered model, loaded as a user does, has the weights of a file, and is ready for use."""

    def compare(tracker: Tracker, name: str, weights: Path) -> bool:
        import mlflow.pytorch

        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
        model = mlflow.pytorch.load_model(f"models:/{name}/1")
        return not model.training and same(dict(model.state_dict()), dict(torch.load(weights, weights_only=True)))

    return compare


def versions(tracker: Tracker, name: str) -> list[tuple[int, str]]:
    """Number and run of each version of the registered model."""
    found = tracker.client.search_model_versions(f"name = '{name}'")
    return sorted((int(version.version), version.run_id) for version in found)


def test_a_model_is_registered_once_under_its_run(
    trained: RunRecord, sqlite_tracker: Tracker, experiment: str, loads: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(sqlite_tracker, trained.folder, experiment)
    for _ in range(2):
        assert delivered(trained, sqlite_tracker)
        said = capsys.readouterr()
        assert f"model:    {trained.folder / MODEL} (epoch 3, the last)\n" in said.out
        assert f"models:/{experiment}/1 in {sqlite_tracker.uri}\n" in said.out
        assert said.err == ""
    run_id = only_run(sqlite_tracker, experiment).id
    assert versions(sqlite_tracker, experiment) == [(1, run_id)]
    assert sqlite_tracker.client.get_model_version(experiment, "1").tags == {"task": trained.spec.task, "epoch": "3"}
    requirements = sqlite_tracker.client.download_artifacts(run_id, f"{ARTIFACT}/requirements.txt")
    assert f"torch=={torch.__version__.partition('+')[0]}" in Path(requirements).read_text().splitlines()
    assert loads(sqlite_tracker, experiment, trained.folder / MODEL)


def test_what_is_not_asked_for_is_neither_said_nor_done(
    trained: RunRecord, sqlite_tracker: Tracker, experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(trained, spec=replace(trained.spec, register=None))
    assert run.end is not None
    for each, said in (
        (run, f"model:    {run.folder / MODEL} (epoch 3, the last)\n"),
        (replace(run, end=None), ""),  # goes on
        (replace(run, end=replace(run.end, kept_epoch=None)), ""),  # a trial
    ):
        assert delivered(each, sqlite_tracker)
        assert capsys.readouterr() == (said, "")
    assert versions(sqlite_tracker, experiment) == []


def test_a_registry_out_of_reach_is_told_with_the_way_out(
    trained: RunRecord,
    sqlite_tracker: Tracker,
    server: Server,
    experiment: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def assert_not_registered(tracker: Tracker, why: str) -> None:
        assert not delivered(trained, tracker)
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(rf"the model is not registered as {re.escape(experiment)} \(.*{why}", said)
        assert f"Nothing is lost: `{WORDS}` registers it" in said

    assert_not_registered(Tracker(f"http://127.0.0.1:{free_port()}", tmp_path), "no MLflow server answers there")
    assert_not_registered(sqlite_tracker, "the run is not yet recorded in sqlite:///")
    with proxy_to(server.uri) as proxy:
        tracker = Tracker(proxy.uri, tmp_path)
        ship(tracker, trained.folder, experiment)
        weights = (trained.folder / MODEL).rename(tmp_path / "elsewhere")
        assert_not_registered(tracker, f"FileNotFoundError: .*{MODEL}")
        weights.rename(trained.folder / MODEL)
        proxy.rule = lambda method, number: "error" if method in ("POST", "PUT") else "pass"
        assert_not_registered(tracker, "")
        proxy.rule = lambda method, number: "pass"
        assert delivered(trained, tracker)
        assert capsys.readouterr().err == ""
        assert [number for number, _ in versions(tracker, experiment)] == [1]


def test_a_model_in_a_store_is_registered_from_there_and_another_run_makes_another_version(
    trained: RunRecord,
    sqlite_tracker: Tracker,
    experiment: str,
    loads: Any,
    worker_factory: WorkerFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ship(sqlite_tracker, trained.folder, experiment)
    weights = tmp_path / "store" / "trained" / MODEL
    weights.parent.mkdir(parents=True)
    (trained.folder / MODEL).rename(weights)  # trained on another machine
    deliver_model(trained, StoragePath((tmp_path / "store").as_uri(), "trained"), sqlite_tracker, WORDS)
    assert f"{weights} (epoch 3" in capsys.readouterr().out
    assert loads(sqlite_tracker, experiment, weights)

    train(worker_factory.start(replace(trained.spec, seed=1), tmp_path / "second")).finish()
    ship(sqlite_tracker, tmp_path / "second", f"{experiment} second")
    assert delivered(read_run(tmp_path / "second"), sqlite_tracker)
    ids = [only_run(sqlite_tracker, name).id for name in (experiment, f"{experiment} second")]
    assert versions(sqlite_tracker, experiment) == [(1, ids[0]), (2, ids[1])]


def test_answers_that_are_lost_leave_one_version(
    trained: RunRecord,
    server: Server,
    experiment: str,
    loads: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose_first(method: str, number: int) -> Answer:
        return "lose" if method == "POST" and number == 0 else "pass"

    with proxy_to(server.uri) as proxy:
        tracker = Tracker(proxy.uri, tmp_path)
        ship(tracker, trained.folder, experiment)
        proxy.answers.clear()
        proxy.rule = lose_first
        for _ in range(3):  # until MLflow has asked for each thing again, by itself or by another command
            delivered(trained, tracker)
        assert {"create"} <= {path.rpartition("/")[2] for _, path, answer in proxy.answers if answer == "lose"}
        capsys.readouterr()
        delivered(trained, tracker)
        assert capsys.readouterr().err == ""
        assert versions(tracker, experiment) == [(1, only_run(tracker, experiment).id)]
        assert loads(tracker, experiment, trained.folder / MODEL)


def test_a_command_trains_keeps_the_best_and_registers_it(
    desk: Desk,  # noqa: F811  # the fixture
    loads: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    task, folder = f"{write_module(tmp_path, monkeypatch)}:Blobs", desk.storage / "kept"
    words = ("--epochs", "4", "--device", "cpu", "--name", "kept", "--keep", "best", "--register", "of-blobs")
    assert desk.type("run", task, *words) == 0
    said = capsys.readouterr().out
    run = read_run(folder)
    figures = [epoch.held_out(Goal()) for epoch in run.epochs]
    assert run.end is not None
    assert run.end.kept_epoch == figures.index(max(figures)) + 1  # the first of equals
    best = f"epoch {run.end.kept_epoch}, the best of 4: accuracy {max(figures):.2f} %"
    assert f"model:    {folder / MODEL} ({best})\n" in said
    (recorded,) = [each.id for each in runs(desk.tracker, "triaccel-runs") if each.name == "kept"]
    assert loads(desk.tracker, "of-blobs", folder / MODEL)

    for gone in (False, True):
        if gone:
            desk.tracker.client.delete_registered_model("of-blobs")  # as if the registry had been out of reach
        assert desk.type("resume", "kept") == 0
        assert "models:/of-blobs/1" in capsys.readouterr().out
        assert versions(desk.tracker, "of-blobs") == [(1, recorded)]
