"""What becomes of a trained model: where the command says it is, and MLflow's registry, whatever happens to that."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.proxy import Answer, proxy_to
from tests.build import same
from tests.service.own_task import own_spec, write_module
from tests.service.stores import Server, free_port, only_run, runs, ship
from tests.service.test_end_to_end import Desk, desk  # noqa: F401  # the fixture
from tests.service.worker_factory import WorkerFactory, train
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.model_delivery import deliver_model
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.storage.layout import MODEL
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.model_registry import ARTIFACT
from triaccel_ray.service.tracking.tracking import Tracker

WORDS = "triaccel resume trained"


@dataclass(frozen=True)
class Trained:
    """A finished run, and what its registered model is called."""

    run: RunRecord
    name: str

    @property
    def weights(self) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.run.folder / MODEL, weights_only=True)
        return found

    def deliver_model(self, tracker: Tracker) -> bool:
        return deliver_model(self.run, StoragePath.of(self.run.folder), tracker, WORDS)


@pytest.fixture
def trained(worker_factory: WorkerFactory, module: str, tmp_path: Path, experiment: str) -> Trained:
    spec = own_spec(f"{module}:Blobs", keep="last", register=experiment)
    train(worker_factory.start(spec, tmp_path / "trained")).finish()
    return Trained(run=read_run(tmp_path / "trained"), name=experiment)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a registered model as a user does."""

    def load_from(tracker: Tracker, name: str) -> torch.nn.Module:
        import mlflow.pytorch

        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
        model: torch.nn.Module = mlflow.pytorch.load_model(f"models:/{name}/1")
        return model

    return load_from


def versions(tracker: Tracker, name: str) -> list[tuple[int, str]]:
    """Number and run of each version of the registered model."""
    found = tracker.client.search_model_versions(f"name = '{name}'")
    return sorted((int(version.version), version.run_id) for version in found)


def test_a_model_is_registered_once_under_its_run(
    trained: Trained, sqlite_tracker: Tracker, load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(sqlite_tracker, trained.run.folder, trained.name)
    for _ in range(2):
        trained.deliver_model(sqlite_tracker)
        said = capsys.readouterr()
        assert f"model:    {trained.run.folder / MODEL} (epoch 3, the last)\n" in said.out
        assert f"models:/{trained.name}/1 in {sqlite_tracker.uri}\n" in said.out
        assert said.err == ""
    run_id = only_run(sqlite_tracker, trained.name).id
    assert versions(sqlite_tracker, trained.name) == [(1, run_id)]
    version = sqlite_tracker.client.get_model_version(trained.name, "1")
    assert version.tags == {"task": trained.run.spec.task, "epoch": "3"}
    artifacts = [item.path for item in sqlite_tracker.client.list_artifacts(run_id, ARTIFACT)]
    requirements = sqlite_tracker.client.download_artifacts(run_id, f"{ARTIFACT}/requirements.txt")
    assert f"{ARTIFACT}/MLmodel" in artifacts
    assert f"torch=={torch.__version__.partition('+')[0]}" in Path(requirements).read_text().splitlines()
    model = load(sqlite_tracker, trained.name)
    assert not model.training
    assert same(dict(model.state_dict()), dict(trained.weights))


def test_what_is_not_asked_for_is_neither_said_nor_done(
    trained: Trained, sqlite_tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(sqlite_tracker, trained.run.folder, trained.name)
    run, place = replace(trained.run, spec=replace(trained.run.spec, register=None)), StoragePath.of(trained.run.folder)
    assert run.end is not None
    deliver_model(run, place, sqlite_tracker, WORDS)
    assert capsys.readouterr().out.splitlines() == [f"model:    {run.folder / MODEL} (epoch 3, the last)"]
    for end in (None, replace(run.end, kept_epoch=None)):  # of a run that goes on, and of a trial
        deliver_model(replace(run, end=end), place, sqlite_tracker, WORDS)
    assert capsys.readouterr() == ("", "")
    assert versions(sqlite_tracker, trained.name) == []


def assert_not_registered(capsys: pytest.CaptureFixture[str], trained: Trained, why: str) -> None:
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(rf"the model is not registered as {re.escape(trained.name)} \(.*{why}", said)
    assert f"Nothing is lost: `{WORDS}` registers it" in said


def test_a_registry_out_of_reach_is_told_with_the_way_out(
    trained: Trained, sqlite_tracker: Tracker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.deliver_model(Tracker(f"http://127.0.0.1:{free_port()}", tmp_path))
    assert_not_registered(capsys, trained, "no MLflow server answers there")
    trained.deliver_model(sqlite_tracker)
    assert_not_registered(capsys, trained, "the run is not yet recorded in sqlite:///")
    ship(sqlite_tracker, trained.run.folder, trained.name)
    (trained.run.folder / MODEL).rename(tmp_path / "elsewhere")
    trained.deliver_model(sqlite_tracker)
    assert_not_registered(capsys, trained, f"FileNotFoundError: .*{MODEL}")
    (tmp_path / "elsewhere").rename(trained.run.folder / MODEL)
    trained.deliver_model(sqlite_tracker)
    assert capsys.readouterr().err == ""
    assert len(versions(sqlite_tracker, trained.name)) == 1


def test_a_model_in_a_store_is_registered_from_there_and_another_run_makes_another_version(
    trained: Trained,
    sqlite_tracker: Tracker,
    load: Any,
    worker_factory: WorkerFactory,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ship(sqlite_tracker, trained.run.folder, trained.name)
    (tmp_path / "store" / "trained").mkdir(parents=True)
    (trained.run.folder / MODEL).rename(tmp_path / "store" / "trained" / MODEL)  # trained on another machine
    deliver_model(trained.run, StoragePath((tmp_path / "store").as_uri(), "trained"), sqlite_tracker, WORDS)
    assert f"{tmp_path}/store/trained/{MODEL} (epoch 3" in capsys.readouterr().out
    model = load(sqlite_tracker, trained.name)
    assert same(dict(model.state_dict()), dict(torch.load(tmp_path / "store" / "trained" / MODEL)))

    train(worker_factory.start(replace(trained.run.spec, seed=1), tmp_path / "second")).finish()
    second = Trained(run=read_run(tmp_path / "second"), name=trained.name)
    ship(sqlite_tracker, second.run.folder, f"{trained.name} second")
    second.deliver_model(sqlite_tracker)
    ids = [only_run(sqlite_tracker, name).id for name in (trained.name, f"{trained.name} second")]
    assert versions(sqlite_tracker, trained.name) == [(1, ids[0]), (2, ids[1])]


@pytest.fixture
def served(server: Server, tmp_path: Path) -> Iterator[tuple[Any, Tracker]]:
    with proxy_to(server.uri) as proxy:
        yield proxy, Tracker(proxy.uri, tmp_path)


def test_answers_that_are_lost_leave_one_version(
    trained: Trained, served: tuple[Any, Tracker], load: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, tracker = served
    ship(tracker, trained.run.folder, trained.name)

    def lose_first(method: str, number: int) -> Answer:
        return "lose" if method == "POST" and number == 0 else "pass"

    proxy.answers.clear()
    proxy.rule = lose_first
    for _ in range(3):  # until MLflow has asked for each thing again, by itself or by another command
        trained.deliver_model(tracker)
    lost = {path.rpartition("/")[2] for _, path, answer in proxy.answers if answer == "lose"}
    assert {"create"} <= lost
    capsys.readouterr()
    trained.deliver_model(tracker)
    assert capsys.readouterr().err == ""
    (version,) = versions(tracker, trained.name)
    assert version[1] == only_run(tracker, trained.name).id
    assert same(dict(load(tracker, trained.name).state_dict()), dict(trained.weights))


def test_a_server_that_has_a_bad_day_gets_the_model_on_the_next(
    trained: Trained, served: tuple[Any, Tracker], capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, tracker = served
    ship(tracker, trained.run.folder, trained.name)
    proxy.rule = lambda method, number: "error" if method in ("POST", "PUT") else "pass"
    assert not trained.deliver_model(tracker)
    assert_not_registered(capsys, trained, "")
    proxy.rule = lambda method, number: "pass"
    assert trained.deliver_model(tracker)
    assert capsys.readouterr().err == ""
    assert [number for number, _ in versions(tracker, trained.name)] == [1]


def test_a_command_trains_keeps_the_best_and_registers_it(
    desk: Desk,  # noqa: F811  # the fixture
    load: Any,
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
    assert f"models:/of-blobs/1 in {desk.tracker.uri}\n" in said
    assert "keep = &quot;best&quot;" in (folder / "report.html").read_text()
    (recorded,) = [each.id for each in runs(desk.tracker, "triaccel-runs") if each.name == "kept"]
    assert versions(desk.tracker, "of-blobs") == [(1, recorded)]
    assert same(dict(load(desk.tracker, "of-blobs").state_dict()), dict(torch.load(folder / MODEL)))

    assert desk.type("resume", "kept") == 0
    assert "models:/of-blobs/1" in capsys.readouterr().out
    assert versions(desk.tracker, "of-blobs") == [(1, recorded)]
    desk.tracker.client.delete_registered_model("of-blobs")  # as if the registry had been out of reach
    assert desk.type("resume", "kept") == 0
    assert versions(desk.tracker, "of-blobs") == [(1, recorded)]
