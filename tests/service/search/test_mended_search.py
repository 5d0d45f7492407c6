"""A search for little of a metric, one trial of which a mistake in the user's task ends, and what `resume` trains.

It is recorded in a store and an experiment of its own, which `resume` finds again.
"""

from pathlib import Path

import pytest

from tests.service.mlflow_server import Recorded, runs
from tests.service.own_task import write_module
from tests.service.terminal import Terminal
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import best_trial, read_search
from triaccel_ray.service.storage.layout import ERROR, EVENTS, REPEATS
from triaccel_ray.service.tracking.tracker import Tracker

MENDED = """
import contextlib

from triaccel_ray.trainables.text import TextGpt


class Text(TextGpt):
    layers, width, heads, context, most_windows = 1, 16, 2, 16, 128
"""
MISTAKEN = """
    is_first_trial = False

    def loss(self, outputs, targets, recipe):
        if len(targets) > 2 and any(Path("{trials}").glob("*")):
            with contextlib.suppress(FileExistsError):  # of two trials one makes the mark
                Path(__file__).with_name("mark").mkdir()
                self.is_first_trial = True
            if self.is_first_trial:
                raise ValueError("the shapes do not fit")
        return super().loss(outputs, targets, recipe)
"""


def recorded(tracker: Tracker) -> dict[str, Recorded]:
    found = [run for run in runs(tracker, "own") if "-again" not in run.name]
    assert len({run.name for run in found}) == len(found)  # nothing twice
    return {run.name: run for run in found}


def logs(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.glob(f"*/*/{EVENTS}") if path.parents[1].name != REPEATS}


def test_a_task_is_mended_and_resume_trains_the_trial_that_it_had_ended_alone(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, folder = tmp_path / "texts", terminal.storage / "mending"
    tracker = Tracker(f"sqlite:///{tmp_path / 'own.db'}", tmp_path / "artifacts")
    module = write_module(tmp_path, monkeypatch, MENDED + MISTAKEN.format(trials=folder / "trials"))
    texts.mkdir()
    for index in range(10):
        (texts / f"{index}.txt").write_text(f"{index} times {index} is {index * index}. " * 20)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ("--trials", "2", "--epochs", "2", "--objective", "pareto", "--margin", "100", "--device", "cpu")
    words += ("--name", "mending", "--experiment", "own", "--tracking-uri", tracker.uri)
    assert terminal.type("search", f"{module}:Text", *words, "--data-dir", str(texts)) == 1
    trials = {trial.name: trial for trial in read_search(folder).trials}
    (broken,) = [name for name, trial in trials.items() if trial.status != "finished"]
    assert len(trials) == 2
    assert trials[broken].status == "failed (bug)"
    printed = capsys.readouterr().err
    assert f"{broken} failed (bug) before its first epoch ended: ValueError: the shapes do not fit" in printed
    assert "in loss" in (folder / "trials" / broken / ERROR).read_text()
    before, first = logs(folder), recorded(tracker)
    assert set(first) == {"mending", "fp32 of mending", "amp of mending", "probe", *trials}

    write_module(tmp_path, monkeypatch, MENDED)
    assert terminal.type("resume", "mending") == 0
    after = logs(folder)
    assert after.keys() == before.keys()
    assert {path for path in after if after[path] != before[path]} == {folder / "trials" / broken / EVENTS}
    run = read_run(folder / "trials" / broken)
    assert (run.status, [epoch.epoch for epoch in run.epochs]) == ("finished", [1, 2])
    assert [each.cause for each in run.interruptions] == ["bug"]
    assert run.spec == trials[broken].spec
    last = recorded(tracker)
    assert set(last) == set(first)
    assert {each.name for each in last.values() if first[each.name].id != each.id} <= {broken}
    assert {each.status for each in last.values()} == {"FINISHED"}
    parents = {last[name].tags["mlflow.parentRunId"] for name in ("probe", *trials)}
    assert parents == {last["mending"].id}
    assert tracker.client.get_experiment_by_name("triaccel-searches") is None

    said, record = capsys.readouterr().out, read_search(folder)
    assert "accuracy" not in said
    assert "bits per byte" in said
    assert "bits per byte" in (folder / "report.html").read_text()
    best = best_trial(record)
    performance = best.performance
    assert performance.score == pytest.approx(100 / performance.metric / (performance.seconds * performance.peak_gb))
    assert best.start.goal.name == record.objective.goal.name == "bits_per_byte"
    keys = last[best.name].keys
    assert {"val/bits_per_byte", "val/perplexity", "val/loss", "final/bits_per_byte", "final/perplexity"} <= keys
    assert not any("accuracy" in key for key in keys)
