"""A search for little of a metric: what is drawn, said and recorded of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.service.own_task import MODULE
from tests.service.stores import runs
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import best_trial, ranked, read_search
from triaccel_ray.service.tracking.tracking import Tracker

TEXT = (
    MODULE
    + """
from triaccel_ray.trainables.text import TextGpt


class Text(TextGpt):
    layers, width, heads, context, most_windows = 1, 16, 2, 16, 128
"""
)


def test_a_search_finds_little_of_what_is_minimised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster_address: str
) -> None:
    name = f"own_text_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(TEXT)
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(10):
        (texts / f"{index}.txt").write_text(f"{index} times {index} is {index * index}. " * 20)
    monkeypatch.chdir(tmp_path)
    paths = [str(tmp_path), str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    storage = tmp_path / "runs"
    words = ("--trials", "2", "--epochs", "2", "--name", "hunt", "--margin", "100", "--objective", "metric")
    where = ("--device", "cpu", "--data-dir", str(texts), "--storage-path", str(storage), "--address", cluster_address)
    with pytest.raises(SystemExit) as ended:
        main(["search", f"{name}:Text", *words, *where])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "accuracy" not in said
    assert "bits per byte" in said

    record = read_search(storage / "hunt")
    assert record.objective.goal.name == "bits_per_byte"
    figures = [run.figures for _, run in ranked(record) if run.status == "finished" and run.figures]
    assert figures
    assert [each.metric for each in figures] == sorted(each.metric for each in figures)
    best = best_trial(record)
    assert best is not None
    assert best.figures == figures[0]
    assert best.figures.score == pytest.approx(100 / figures[0].metric / (figures[0].seconds * figures[0].peak_gb))
    run = read_run(best.folder)
    assert run.start.goal == record.objective.goal
    assert set(run.epochs[-1].held_out_metrics) == {"bits_per_byte", "perplexity"}

    page = (storage / "hunt" / "report.html").read_text()
    assert "Bits per byte against time and memory" in page
    tracker = Tracker(f"sqlite:///{storage / 'mlflow.db'}", storage / "artifacts")
    recorded = {run.name: run for run in runs(tracker, "triaccel-searches")}
    keys = recorded[best.name].keys
    assert {"val/bits_per_byte", "val/perplexity", "val/loss", "final/bits_per_byte", "final/perplexity"} <= keys
    assert not any("accuracy" in key for key in keys)
