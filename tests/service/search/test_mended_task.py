"""What `triaccel resume` trains of a search in which a mistake in the user's task has ended one trial."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.service.own_task import write_module
from tests.service.stores import runs
from tests.service.test_end_to_end import Desk, desk  # noqa: F401  # the fixture
from triaccel_ray.service.runs.record import runs_below
from triaccel_ray.service.search.search import REPEATS, read_search
from triaccel_ray.service.storage.layout import ERROR, EVENTS

MENDED = """
from pathlib import Path

from {module} import Blobs


class Shaky(Blobs):
    name = "shaky"

"""
MISTAKEN = """
    num_losses = 0

    def model(self):
        with Path(__file__).with_name("models").open("ab", buffering=0) as models:
            models.write(b".")
            self.number = models.tell()  # two processes never have the same
        return super().model()

    def loss(self, outputs, targets, recipe):
        self.num_losses += 1
        # After FP32 and AMP, which make two models each: the model of the first trial, after one in each precision.
        if self.number in (6, 7) and self.num_losses > 25:
            raise ValueError("the shapes do not fit")
        return super().loss(outputs, targets, recipe)
"""


def test_a_task_is_mended_and_resume_trains_the_trial_that_it_had_ended_alone(
    desk: Desk,  # noqa: F811  # the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, mended = tmp_path / "shaky.py", MENDED.format(module=write_module(tmp_path, monkeypatch))
    file.write_text(mended + MISTAKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ("--space", "thresholds-absolute", "--objective", "pareto", "--margin", "100", "--device", "cpu")
    assert desk.type("search", "shaky:Shaky", "--trials", "2", "--epochs", "3", *words, "--name", "mending") == 1
    folder = desk.storage / "mending"
    trials = {trial.name: trial for trial in read_search(folder).trials}
    (broken,) = [name for name, trial in trials.items() if trial.status != "finished"]
    assert len(trials) == 2
    assert trials[broken].status == "failed (bug)"
    assert f"{broken} failed (bug): ValueError: the shapes do not fit" in capsys.readouterr().err
    assert "in loss" in (folder / "trials" / broken / ERROR).read_text()
    before = {path: path.read_bytes() for path in folder.glob(f"[bt]*/*/{EVENTS}")}  # the best may be another one then
    recorded = {run.id: run.name for run in runs(desk.tracker, "triaccel-searches") if "-again" not in run.name}
    assert sorted(recorded.values()) == sorted(["mending", "mending/fp32", "mending/amp", *trials])

    file.write_text(mended + "    pass\n")
    monkeypatch.delitem(sys.modules, "shaky")  # as in a terminal, where each command is a process of its own
    assert desk.type("resume", "mending") == 0
    after = {path: path.read_bytes() for path in folder.glob(f"[bt]*/*/{EVENTS}")}
    assert {path for path in after if after[path] != before.get(path)} == {folder / "trials" / broken / EVENTS}
    assert {path for path in runs_below(folder) if path.parent.name != REPEATS} == {
        folder,
        *(path.parent for path in before),
    }
    (run,) = [trial for trial in read_search(folder).trials if trial.name == broken]
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", [1, 2, 3])
    assert [each.cause for each in run.interruptions] == ["bug"]
    assert run.spec == trials[broken].spec
    resumed = [run for run in runs(desk.tracker, "triaccel-searches") if "-again" not in run.name]
    assert sorted(each.name for each in resumed) == sorted(recorded.values())
    assert {each.name for each in resumed if each.id not in recorded} <= {broken}
    assert {each.status for each in resumed} == {"FINISHED"}
