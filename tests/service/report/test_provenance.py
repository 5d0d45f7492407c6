"""The top of a page, and its list of what failed, was interrupted or is missing."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.service.browser import Tags
from tests.service.build import SimulatedRun
from tests.service.records import RUN_SPEC
from tests.service.search_folder import simulated_search
from triaccel_ray.records.events import End, Interruption, Start
from triaccel_ray.service.report.provenance import about, troubles
from triaccel_ray.service.report.report import REPORT
from triaccel_ray.service.report.run_page import write_run_page
from triaccel_ray.service.report.view import show
from triaccel_ray.service.report.views import missing_runs, view_search
from triaccel_ray.service.runs.environment import COMMIT_VARIABLE, commit_of, environment
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.storage.layout import ERROR, SPEC, write_value
from triaccel_ray.trainables.task import Purpose

INFO = {"hardware": "a GPU", "host": "box", "triaccel-ray": "0.1", "torch": "2.15", "python": "3.11"}


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    made = SimulatedRun(tmp_path / "one", info=INFO, parameters={"memory_limit_bytes": 2**31})
    made.complete(epochs=2)
    write_value(made.folder / SPEC, RUN_SPEC)
    return read_run(made.folder)


def facts_of(run: RunRecord) -> dict[str, str]:
    (section,) = about(run.spec, [run], {"seed": "3"}, "triaccel run x")
    assert dict(section.about)["to repeat"] == "triaccel run x"
    return dict(section.about)


def test_a_page_begins_with_where_it_comes_from(run: RunRecord) -> None:
    facts = facts_of(run)
    assert facts["task"] == "cifar10-resnet18"
    assert facts["seed"] == "3"
    assert facts["date"].endswith(" UTC, within 0 s")
    assert facts["date"].startswith("20")
    assert facts["hardware"] == "a GPU (host box)"
    assert facts["versions"] == "triaccel-ray 0.1, torch 2.15, python 3.11"
    assert facts["commit"] == "none recorded: triaccel-ray 0.1"
    for part in ("30 epochs, 5 of them warm-up", "learning rate 0.1", "batch 96, elastic from 32 to 512", "2 GiB"):
        assert part in facts["settings"]
    committed = replace(run, start=Start(control=run.start.control, info={**INFO, "commit": "abc-dirty"}))
    assert facts_of(committed)["commit"] == "abc-dirty"


def test_a_runs_page_holds_command_method_status_and_all_settings(run: RunRecord) -> None:
    final = replace(run, spec=replace(run.spec, purpose=Purpose.FINAL, seed=5))
    texts = Tags(write_run_page(final, []).read_text()).texts
    assert f"triaccel run --from {run.folder}" in texts
    assert {"triaccel: the full control loop", "finished", "5", "All settings"} <= set(texts)
    assert any("\nweight_decay = 0.0005\n" in text for text in texts)


def test_failures_say_when_why_and_where_the_traceback_is(run: RunRecord) -> None:
    (run.folder / ERROR).write_text("Traceback")
    died = replace(run, end=End(status="failed", cause="non_finite", message="the training loss is nan"))
    lost = replace(run, end=None, epochs=())
    back = replace(run, interruptions=(Interruption(cause="preempted", message="node lost", epoch=1),))
    (section,) = troubles({"a": died, "b": lost, "c": back, "d": run}, ["e"], {"f": "line 1"})
    assert section.lines == [
        f"a failed (non_finite) after epoch 2: the training loss is nan (traceback: {run.folder / ERROR})",
        "b is unfinished before its first epoch ended: it still trains, or its process was lost",
        "c was interrupted (preempted): node lost",
        "f is left out: line 1",
        "e is missing: it was asked for and has not begun",
    ]
    assert troubles({"d": run}) == []


def test_a_search_names_the_runs_that_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = simulated_search(tmp_path / "hunt", 2, has_pictures=True)
    for index in (0, 1):
        (folder / "trials" / f"trial{index:02}").rename(folder / "trials" / f"trial-00{2 * index}")
    record = read_search(folder)
    record = replace(record, spec=replace(record.spec, num_trials=4))
    assert missing_runs(record) == ["baseline probe", "trial-001", "trial-003"]
    show(view_search(record))
    assert "trial-003 is missing: it was asked for and has not begun" in capsys.readouterr().out
    assert "<td>trial-003</td><td>is missing</td>" in (folder / REPORT).read_text()


def test_the_commit_of_the_working_directory_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commit_of(tmp_path) == ""
    assert commit_of(tmp_path / "nowhere") == ""
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        (tmp_path / "file").write_text("one")
        subprocess.run([*own, *words], cwd=tmp_path, check=True)
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    monkeypatch.setenv(COMMIT_VARIABLE, commit)
    assert environment(torch.device("cpu"))["commit"] == commit
    monkeypatch.setenv(COMMIT_VARIABLE, "")
    assert "commit" not in environment(torch.device("cpu"))
