"""The commands that a message gives to type next are whole: they find what they speak of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import free_port
from tests.service.records import run_of
from triaccel_ray.records.events import End
from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.commands import recording as recorder
from triaccel_ray.service.commands.next_steps import command_to_resume, print_model, print_next_steps, resumable
from triaccel_ray.service.commands.recording import CommandContext, recording
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.tracker import Tracker


def test_a_run_of_a_comparison_is_named_in_its_storage_folder(tmp_path: Path) -> None:
    storage = StoragePath(str(tmp_path))
    other = tmp_path / "other" / "versus"
    for place, name in ((storage / "versus" / "amp-seed0", "versus/amp-seed0"), (StoragePath.of(other), other)):
        words = command_to_resume(place, Locations(storage_path=storage))
        assert words == f"triaccel resume {name} --storage-path {tmp_path}"


def test_ctrl_c_before_anything_has_begun_says_so(tmp_path: Path) -> None:
    said = f"stopped; nothing was trained, and there is no {tmp_path.name} yet"
    with pytest.raises(KeyboardInterrupt, match=said), resumable("triaccel resume hunt", StoragePath.of(tmp_path)):
        raise KeyboardInterrupt


def test_what_could_not_be_recorded_comes_with_the_whole_command_that_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_TIMEOUT_S", 0.1)
    place = StoragePath.of(SimulatedRun(tmp_path / "hunt").complete(epochs=1))
    tracker = Tracker(f"http://127.0.0.1:{free_port()}", tmp_path)
    words = f"triaccel resume hunt --storage-path {tmp_path}"
    where = Locations(storage_path=StoragePath(str(tmp_path)))
    with recording(CommandContext(place=place, where=where, tracker=tracker, experiment="x", resume=False)):
        pass
    assert f"Nothing is lost: `{words}` records them once the store answers" in capsys.readouterr().err


def test_what_to_type_next_names_the_result_and_its_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = StoragePath(str(tmp_path))
    print_next_steps(storage / "hunt", Locations(storage_path=storage))
    said = capsys.readouterr().out
    for command in ("report hunt", "ui"):
        assert f"triaccel {command} --storage-path {tmp_path}\n" in said


@pytest.mark.parametrize(
    ("keep", "kept", "said"),
    [
        ("last", 2, "model:    {}/model.pt (epoch 2, the last)\n"),
        ("best", 1, "model:    {}/model.pt (epoch 1, the best of 2: accuracy 90.00 %)\n"),
        (None, None, ""),
    ],
)
def test_a_trained_model_is_named_with_its_epoch(
    keep: Any, kept: int | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of("run")
    run = replace(run, spec=replace(run.spec, keep=keep), end=End(status="finished", kept_epoch=kept))
    print_model(run, StoragePath.of(tmp_path))
    assert capsys.readouterr().out == said.format(tmp_path)
