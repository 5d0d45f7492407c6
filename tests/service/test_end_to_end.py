"""The commands as a user types them, on a real Ray cluster and a real MLflow store."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.mlflow_server import history, runs
from tests.service.own_task import own_spec, write_module
from tests.service.terminal import Terminal
from triaccel_ray.records.events import End, Start, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.search_spaces.tuned import TunedThresholds
from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.cli.spec_builder import spec_of
from triaccel_ray.service.compare.comparison import read_comparison
from triaccel_ray.service.report.search import recommendation
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import best_trial, read_search
from triaccel_ray.service.storage.layout import ERROR, EVENTS, MODEL, SPEC, TUNED_THRESHOLDS, read_value, write_value
from triaccel_ray.trainables.task import Purpose

NO_FP16 = ("--tau-low", "0")
"""A CPU emulates FP16 at a tenth of the speed."""
PICTURES = {"overview.png", "precision.png"}


@pytest.fixture(autouse=True)
def this_folder_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's processes find the tests' own modules wherever a command is given."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a user's own tasks, in the folder where commands are typed."""
    monkeypatch.chdir(tmp_path)
    return write_module(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def trained(terminal: Terminal) -> Path:
    """The folder of a finished run, for which the command started Ray on this machine itself.

    In a process of its own, as a user's is, which has no other Ray beside it.
    """
    words = ("--name", "one", "--epochs", "2", "--t-curv", "8", *NO_FP16, "--storage-path", str(terminal.storage))
    subprocess.run([sys.executable, "-m", "triaccel_ray.service", "run", "digits", *words], check=True)
    return terminal.storage / "one"


def test_a_run_is_trained_and_recorded(terminal: Terminal, trained: Path) -> None:
    run = read_run(trained)
    assert (run.status, len(run.epochs)) == ("finished", 2)
    assert run.ticks
    (recorded,) = [each for each in runs(terminal.tracker, "triaccel-runs") if each.name == "one"]
    assert recorded.status == "FINISHED"
    assert recorded.params["precision.tau_low"] == "0"
    assert recorded.params["recipe.epochs"] == "2"
    assert {"val/accuracy", "train/loss", "final/score", "control/batch_size"} <= recorded.keys
    assert {EVENTS, "spec.json", "report.html", *(f"figures/{name}" for name in PICTURES)} <= terminal.artifacts(
        recorded
    )


def test_a_finished_run_is_shown_replayed_and_not_trained_again(
    terminal: Terminal, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / "report.html").unlink()
    assert terminal.type("report", "one") == 0
    said = capsys.readouterr().out
    assert "digits, the full control loop, finished" in said
    assert f"{read_run(trained).epochs[-1].held_out(Goal()):.2f}" in said
    assert (trained / "report.html").read_text().count("data:image/png;base64") == len(PICTURES)

    assert terminal.type("replay", str(trained), "--alpha", "3.0") == 0  # a CPU may have one precision only
    assert "first difference at tick" in capsys.readouterr().out

    before = (trained / EVENTS).read_bytes()
    assert terminal.type("resume", "one") == 0
    assert "one is finished" in capsys.readouterr().out
    assert (trained / EVENTS).read_bytes() == before
    assert len([run for run in runs(terminal.tracker, "triaccel-runs") if run.name == "one"]) == 1


def test_batch_sizes_are_timed_and_the_efficient_one_is_trained_with(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.type("tune-batch", "digits", "--name", "sizes", "--device", "cpu", "--batch-max", "128") == 0
    said = capsys.readouterr()
    run = read_run(terminal.storage / "sizes")
    timed = {each.batch_size: each for each in run.throughputs}
    assert list(timed) == [32, 64, 96, 128]
    size = int(run.end.results["batch_size"])
    assert f"A batch of {size} is efficient" in said.out
    assert all(f"batch {each}, memory" in said.err for each in timed)

    (recorded,) = [each for each in runs(terminal.tracker, "triaccel-runs") if each.name == "sizes"]
    assert [step for step, _, _ in history(terminal.tracker, recorded.id, "samples_per_second")] == list(timed)
    assert {EVENTS, "report.html"} <= terminal.artifacts(recorded)

    (pasted,) = [line for line in said.out.splitlines() if line.startswith("triaccel run")]
    spec = spec_of(parse(shlex.split(pasted)[1:]))
    batch = spec.control.batch
    assert (spec.method, spec.keep, batch.start, batch.enabled) == ("triaccel", "last", size, False)
    assert spec.recipe.lr == pytest.approx(run.end.results["lr"], rel=1e-3)
    assert terminal.type(*shlex.split(pasted)[1:], "--epochs", "1", "--name", "efficient") == 0
    assert read_run(terminal.storage / "efficient").epochs[-1].batch_size == size


def test_a_search_end_to_end(terminal: Terminal, own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--trials", "3", "--epochs", "3", "--name", "hunt", "--margin", "100", "--device", "cpu")
    assert terminal.type("search", f"{own}:Blobs", *words) == 0
    said = capsys.readouterr().out
    record = read_search(terminal.storage / "hunt")
    assert len(record.trials) == 3
    assert not list(record.folder.rglob(MODEL))  # a hundred trials must not fill the disk

    best = best_trial(record)
    (pasted,) = [line for line in said.splitlines() if line.startswith("triaccel run")]
    assert pasted == recommendation(record)[1]
    (recommended,) = [run for run in (best, *record.baselines.values()) if str(run.folder) in pasted]
    assert spec_of(parse(shlex.split(pasted)[1:])) == replace(recommended.spec, keep="last")
    kept = read_value(TunedThresholds, terminal.storage / "hunt" / TUNED_THRESHOLDS, "")
    precision = replace(best.spec.control.precision, initial_layers={})  # acts until the first tick alone
    assert kept.onto(record.spec.base.control) == replace(best.spec.control, precision=precision)
    assert record.repeats.keys() == {best.name, "amp", "fp32"}

    recorded = {run.name: run for run in runs(terminal.tracker, "triaccel-searches")}
    parent = recorded.pop("hunt")
    baselines = {"fp32 of hunt", "amp of hunt"}
    repeats = {run.name for runs in record.repeats.values() for run in runs}
    assert set(recorded) == {*baselines, *repeats, "probe", *(trial.name for trial in record.trials)}
    assert parent.status == "FINISHED"
    assert (parent.tags["best_trial"], parent.params["margin"]) == (best.name, f"{record.spec.margin:g}")
    assert {"figures/pareto.png", EVENTS, TUNED_THRESHOLDS} <= terminal.artifacts(parent)
    pruned = {trial.name for trial in record.trials if trial.status == "stopped"}
    assert {name for name, run in recorded.items() if run.tags["outcome"] == "pruned"} == pruned
    for name, run in recorded.items():
        # a baseline is seen beside its search, not folded away under it
        assert run.tags.get("mlflow.parentRunId") == (None if name in baselines else parent.id)
        assert run.status == "FINISHED"
        assert {"val/accuracy", "score", "seconds_per_epoch", "memory/peak_gb"} <= run.keys
        assert {EVENTS, "spec.json", "figures/overview.png"} <= terminal.artifacts(run)

    # what has ended is not touched
    before = {path: path.read_bytes() for path in (terminal.storage / "hunt").glob(f"*/*/{EVENTS}")}
    assert terminal.type("resume", "hunt") == 0
    assert {path: path.read_bytes() for path in (terminal.storage / "hunt").glob(f"*/*/{EVENTS}")} == before
    assert len(runs(terminal.tracker, "triaccel-searches")) == 1 + len(recorded)


def test_a_mistake_in_a_task_is_told_by_its_own_lines_and_its_traceback_is_kept(
    terminal: Terminal, own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.type("run", f"{own}:Unbuildable", "--name", "unbuildable", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "Unbuildable.model() raised TypeError" in said
    assert 'return nn.Linear("eight", 4)' in said
    assert "Traceback" not in said
    assert not (terminal.storage / "unbuildable").exists()

    assert terminal.type("search", f"{own}:Mistaken", "--trials", "1", "--name", "mistaken", "--device", "cpu") == 1
    said = capsys.readouterr().err
    folder = terminal.storage / "mistaken" / "baselines"
    name, *_ = [path.name for path in folder.iterdir() if f"{path.name} failed: " in said]
    assert f"{name} failed: ValueError: the shapes do not fit; its log" in said
    assert f"{folder / name}, the traceback in error.txt" in said
    assert "in forward" in (folder / name / ERROR).read_text()
    last = [event.record for event in read_events(folder.parent / EVENTS)][-1]
    assert (last.status, last.cause) == ("failed", "bug")
    assert name in last.message
    recorded = {run.name: run for run in runs(terminal.tracker, "triaccel-searches")}
    assert recorded["mistaken"].status == "FAILED"
    assert ERROR in terminal.artifacts(recorded[f"{name} of mistaken"])


def test_a_comparison_end_to_end(
    terminal: Terminal, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = terminal.storage / "versus"
    words = ("--methods", "amp", "--fixed", "1", "--seeds", "1", "--epochs", "2")
    assert terminal.type("compare", f"{own}:Guarded", *words, "--name", "versus", "--device", "cpu") == 0
    said = capsys.readouterr().out
    record = read_comparison(folder)
    (tried,) = set(record.trials) - {"amp"}
    assert re.fullmatch(r"fixed-(bf16|fp32)-\d+", tried)  # a CPU may have one precision only
    assert {run.status for run in (*record.trials.values(), *record.runs.values())} == {"finished"}
    assert not list(folder.rglob(MODEL))
    assert all(run.spec.purpose is Purpose.SEARCH for run in record.trials.values())
    for name in ("amp-seed0", "fixed-seed0"):
        run = record.runs[name]
        assert [epoch.held_out(Goal()) for epoch in run.epochs] == [None, None]
        assert f"{run.end.results['accuracy']:.4g}" in said
    assert record.fixed.name == tried
    # two final runs have read the 50 test samples once, and no trial has touched them: they would have raised
    assert sum(map(int, (tmp_path / "read.txt").read_text().split())) == 2 * 50
    # read once for both trials, by the command, and by each final run for itself
    assert sorted((tmp_path / "data.txt").read_text().split()) == ["final", "final", "search"]

    recorded = {run.name: run for run in runs(terminal.tracker, "triaccel-comparisons")}
    parent = recorded.pop("versus")
    assert set(recorded) == {*record.trials, *record.runs}
    assert {run.tags["mlflow.parentRunId"] for run in recorded.values()} == {parent.id}
    assert {run.status for run in (parent, *recorded.values())} == {"FINISHED"}
    assert {"final/amp/accuracy_mean", "final/fixed/score_mean"} <= parent.keys
    files = {"comparison.json", "fixed.json", "report.html", "figures/accuracy_against_cost.png"}
    assert files <= terminal.artifacts(parent)

    # cut off: the choice and one trial are missing; the logs of a final run and of the whole never got their beginning
    (folder / "fixed.json").unlink()
    kept = {name: (folder / name / EVENTS).read_bytes() for name in ("trials/amp", "amp-seed0")}
    shutil.rmtree(folder / "trials" / tried)
    for name in (".", "fixed-seed0"):
        (folder / name / EVENTS).write_bytes(b"")
    assert set(read_comparison(folder).unfinished()) == {"fixed-seed0"}
    assert terminal.type("resume", "versus") == 0
    assert {name: (folder / name / EVENTS).read_bytes() for name in kept} == kept
    resumed = read_comparison(folder)
    assert resumed.fixed == record.fixed
    assert resumed.unfinished() == {}
    assert [type(event.record) for event in read_events(folder / EVENTS)] == [Start, End]


def test_a_run_that_was_lost_in_its_first_record_begins_again(terminal: Terminal, own: str) -> None:
    spec, folder = own_spec(f"{own}:Blobs", keep="last"), terminal.storage / "begun"
    folder.mkdir()
    write_value(folder / SPEC, spec)
    (folder / EVENTS).write_bytes(b'{"sequence":0,')  # the disk was full
    assert terminal.type("resume", "begun") == 0
    run = read_run(folder)
    assert (run.status, run.spec, run.interruptions) == ("finished", spec, ())
    assert (folder / MODEL).exists()


def test_what_only_the_actor_can_know_is_bad_input_too(
    terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cifar10-resnet18", "--data-dir", str(tmp_path / "nowhere"), "--device", "cpu")
    before = set(terminal.storage.iterdir())
    assert terminal.type("run", *words, "--name", "impossible") == 2
    assert set(terminal.storage.iterdir()) == before
    assert terminal.type("compare", *words, "--methods", "fp32,amp", "--seeds", "1", "--name", "groundless") == 2
    said = capsys.readouterr()
    assert said.err.count("nowhere is not an existing folder") == 2
    assert "Traceback" not in said.err
    assert "Table 1" not in said.out
    recorded = {run.name: run for run in runs(terminal.tracker, "triaccel-comparisons")}
    assert recorded["groundless"].status == "FAILED"
