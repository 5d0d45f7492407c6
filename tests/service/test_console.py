"""What is shown while work goes on: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, Start
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.progress import RunProgress, TrialProgress
from triaccel_ray.service.reports.tables import Grid
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.runs import Glance, how_it_goes_on
from triaccel_ray.service.runs.worker import Status
from triaccel_ray.service.storage.layout import EVENTS

STATUS = Status(
    epoch=1.5,
    num_epochs=3,
    images_per_second=1234.0,
    batch_size=96,
    used_bytes=2**30,
    limit_bytes=2**31,
    layers_per_precision={"fp16": 1, "bf16": 2, "fp32": 0},
    judged="97.50 %",
)
RESULTS = {"score": 702.24, "accuracy": 97.49, "seconds_per_epoch": 0.1322, "peak_gb": 1.05}


def epoch_record(epoch: int, accuracy: float = 91.25) -> Epoch:
    return Epoch(
        epoch=epoch,
        step=10 * epoch,
        train_loss=0.1,
        held_out_metrics={"accuracy": accuracy},
        held_out_loss=0.3,
        seconds=1.5,
        images_per_second=100.0,
        batch_size=64,
        peak_bytes=10**9,
        allocated_peak_bytes=0,
        num_skipped=0,
        score=60.83,
    )


def write_trial(folder: Path, end: End, accuracy: float = 91.25) -> None:
    log = EventLog(folder / EVENTS)
    for record in (Start(control=ControlConfig()), epoch_record(2, accuracy), end):
        log.append(record)
    log.close()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error as a terminal of 120 columns."""
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=True, width=120))
    return written


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error as a file."""
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=False, width=80))
    return written


def test_a_terminal_shows_the_title_and_who_waits_at_once(terminal: StringIO) -> None:
    with RunProgress("training", ["one"]):
        shown = terminal.getvalue()
    assert all(part in shown for part in ("training", "one", "starting"))


def test_a_run_shows_epochs_speed_batch_memory_and_precisions(terminal: StringIO) -> None:
    with RunProgress("training", ["one", "two"]) as progress:
        progress.update(Glance(name="one", status=STATUS))
    shown = terminal.getvalue()
    for part in ("1.5/3", "1,234", "96", "1 GiB of 2 GiB", "1 fp16 2 bf16", "97.50 %", "two", "starting"):
        assert part in shown


def test_a_search_shows_its_trials_from_their_logs(terminal: StringIO, tmp_path: Path) -> None:
    for name, status in (("good", "finished"), ("ahead", "stopped")):
        write_trial(tmp_path / name, End(status=status))
    with TrialProgress("searching", 5, tmp_path, Objective()):
        wait_until(lambda: "2 of 5 trials done" in terminal.getvalue())
    shown = terminal.getvalue()
    assert shown.rindex("good") < shown.rindex("ahead")  # of the same score, but of an early epoch
    for part in ("good", "ahead", "finished", "stopped", "91.25", "60.83", "2 of 5 trials done"):
        assert part in shown


def test_without_a_terminal_a_run_has_a_line_for_each_epoch(piped: StringIO) -> None:
    with RunProgress("training", ["one"], each_epoch=True) as progress:
        assert piped.getvalue() == "training\n"
        progress.update(Glance(name="one", status=STATUS))
        progress.update(Glance(name="one", last=epoch_record(2)))
        progress.update(Glance(name="one", results=RESULTS))
    assert piped.getvalue().splitlines()[1:] == [
        "epoch 2/3, loss 0.1000, accuracy 91.25 %, batch 64, 1 fp16 2 bf16, 954 MiB of 2 GiB, 1.5 s"
    ]


@pytest.mark.parametrize(("num_epochs", "num_lines"), [(7, 7), (100, 100), (101, 51), (1000, 101)])
def test_a_long_run_has_a_hundred_lines(piped: StringIO, num_epochs: int, num_lines: int) -> None:
    with RunProgress("training", ["one"], each_epoch=True) as progress:
        progress.update(Glance(name="one", status=replace(STATUS, num_epochs=num_epochs)))
        for epoch in range(1, num_epochs + 1):
            progress.update(Glance(name="one", last=epoch_record(epoch)))
    lines = piped.getvalue().splitlines()[1:]
    assert lines[0].startswith(f"epoch 1/{num_epochs},")
    assert lines[-1].startswith(f"epoch {num_epochs}/{num_epochs},")
    assert num_lines <= len(lines) <= num_lines + 1


def test_without_a_terminal_each_of_several_runs_has_a_line_at_its_end(piped: StringIO) -> None:
    with RunProgress("baselines") as progress:
        progress.update(Glance(name="fp32", status=STATUS))
        progress.update(Glance(name="fp32", last=epoch_record(1)))
        progress.update(Glance(name="fp32", results=RESULTS))
        progress.update(Glance(name="amp", error=RuntimeError("no memory is left\nat all")))
    assert piped.getvalue().splitlines() == [
        "baselines",
        "fp32 finished: score 702.2, accuracy 97.49 %, 0.132 s/epoch, 1.05 GB",
        "amp failed: no memory is left",
    ]


def test_without_a_terminal_each_trial_has_a_line_with_score_and_reason(piped: StringIO, tmp_path: Path) -> None:
    write_trial(tmp_path / "a", End(status="finished", results=RESULTS))
    write_trial(tmp_path / "b", End(status="stopped"))
    write_trial(tmp_path / "c", End(status="finished"), accuracy=80.0)
    write_trial(tmp_path / "d", End(status="failed", cause="out_of_memory", message="not even one sample fits"))
    with TrialProgress("searching", 5, tmp_path, Objective(margin=1.0, reference=(92.0, 92.0))):
        pass  # the logs are read to their ends
    figures = "score 60.83, accuracy 91.25 %, 1.5 s/epoch, 1 GB, batch 64"
    assert piped.getvalue().splitlines() == [
        "searching",
        "1/5 a finished: score 702.2, accuracy 97.49 %, 0.132 s/epoch, 1.05 GB, batch 64",
        f"2/5 b stopped after epoch 2: {figures}; others had more at epoch 2",
        f"3/5 c finished: {figures.replace('91.25', '80.00')}; 11.00 points of accuracy beyond the margin",
        "4/5 d failed: not even one sample fits",
    ]


@pytest.mark.parametrize(("width", "left_out"), [(40, ""), (15, "second"), (8, "second, third")])
def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch, width: int, left_out: str) -> None:
    monkeypatch.setattr(console, "out", Console(file=StringIO(), width=width))
    header = ("first", "second", "third")
    table = rich_table(Grid(header=header, rows=[("a", "b", "c")], spare=("second", "third")))
    assert [column.header for column in table.columns] == [name for name in header if name not in left_out]
    assert table.caption == (f"left out for want of width: {left_out}; the page has them" if left_out else None)


def test_how_a_run_goes_on_that_was_broken_off_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "the process or its node was lost; begins again; what was recorded is in events.replaced.jsonl"
    with contextlib.closing(EventLog(tmp_path / EVENTS)) as log:
        log.append(Start(control=ControlConfig()))
        assert how_it_goes_on(tmp_path) == ""
        log.append(Interruption(cause="preempted", message=message, epoch=0))
    assert how_it_goes_on(tmp_path / "elsewhere") == ""
    with RunProgress("a run") as progress:
        progress.update(Glance(name="hunt", notice=how_it_goes_on(tmp_path)))
    assert f"hunt: {message}" in " ".join(capsys.readouterr().err.split())
