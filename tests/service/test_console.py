"""What is shown while work goes on: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.service.build import SimulatedRun
from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, Record, Start, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.progress import MAX_ROWS, Progress
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.storage.layout import EVENTS

RESULTS = {"score": 702.24, "accuracy": 97.49, "seconds_per_epoch": 0.1322, "peak_gb": 1.05}


def epoch_record(epoch: int) -> Epoch:
    return Epoch(
        epoch=epoch,
        step=10 * epoch,
        train_loss=0.1,
        held_out_metrics={"accuracy": 91.25},
        held_out_loss=0.3,
        seconds=1.5,
        images_per_second=100.0,
        batch_size=64,
        peak_bytes=10**9,
        allocated_peak_bytes=0,
        num_skipped=0,
        score=60.83,
    )


def start_record(num_epochs: int = 3) -> Start:
    return Start(control=ControlConfig(), parameters={"recipe.epochs": num_epochs, "memory_limit_bytes": 2**31})


def write(folder: Path, *told: Record, keep: int | None = None) -> None:
    """Adds the records to the log, after its first `keep`."""
    with contextlib.closing(EventLog(folder / EVENTS, keep=keep)) as log:
        for record in told:
            log.append(record)


def write_trial(folder: Path, end: End) -> None:
    write(folder, start_record(), epoch_record(2), end)


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


def test_a_run_shows_epochs_speed_batch_memory_and_precisions(terminal: StringIO, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "one")
    run.start()
    run.train(1)
    with Progress("training", tmp_path, ["one", "two"]):
        assert all(part in terminal.getvalue() for part in ("training", "one", "starting"))  # at once
    shown, told = terminal.getvalue(), [event.record for event in read_events(run.path)]
    tick, epoch = told[-2:]
    assert isinstance(tick, Tick)
    assert isinstance(epoch, Epoch)
    judged, plan = epoch.held_out(Goal()), tick.decision.plan
    assert judged is not None
    for part in ("1.0/4", str(plan.batch_size), Goal().text(judged), "two", "starting"):
        assert part in shown
    assert all(level.value in shown for level in plan.precision.values())


def test_a_search_shows_its_trials_from_their_logs(terminal: StringIO, tmp_path: Path) -> None:
    others = {f"trial-{number:02}": "stopped" for number in range(MAX_ROWS)}
    for name, status in {**others, "z-good": "finished"}.items():
        write_trial(tmp_path / name, End(status=status))
    with Progress("searching", tmp_path, num_trials=20):
        wait_until(lambda: "16 of 20 done" in terminal.getvalue())
    shown = terminal.getvalue()
    for part in ("z-good", "trial-00", "finished", "stopped", "91.25", "60.83"):
        assert part in shown
    assert f"trial-{MAX_ROWS - 1}" not in shown  # of the same score, but of an early epoch; the table has its bounds


def test_without_a_terminal_a_run_has_a_line_for_each_epoch(piped: StringIO, tmp_path: Path) -> None:
    write(tmp_path / "one", start_record(), epoch_record(1))
    with Progress("training", tmp_path, ["one"], each_epoch=True):
        assert piped.getvalue() == "training\n"
        message = "the process or its node was lost; goes on after epoch 1"
        write(tmp_path / "one", Interruption(cause="preempted", message=message, epoch=1), epoch_record(2))
        wait_until(lambda: "epoch 2" in piped.getvalue())
        write(tmp_path / "one", epoch_record(3), End(status="finished", results=RESULTS))
    assert piped.getvalue().splitlines()[1:] == [
        "one: the process or its node was lost; goes on after epoch 1",
        "epoch 2/3, loss 0.1000, accuracy 91.25 %, batch 64, 954 MiB of 2 GiB, 1.5 s",
        "epoch 3/3, loss 0.1000, accuracy 91.25 %, batch 64, 954 MiB of 2 GiB, 1.5 s",
    ]


def test_a_line_is_said_once_though_the_log_is_cut_back(piped: StringIO, tmp_path: Path) -> None:
    with Progress("training", tmp_path, ["one"], each_epoch=True):
        write(tmp_path / "one", start_record(), epoch_record(1), epoch_record(2))
        wait_until(lambda: "epoch 2" in piped.getvalue())
        write(tmp_path / "one", epoch_record(2), keep=2)
    assert [line.partition(",")[0] for line in piped.getvalue().splitlines()[1:]] == ["epoch 1/3", *["epoch 2/3"] * 2]


@pytest.mark.parametrize(("num_epochs", "num_lines"), [(7, 7), (100, 100), (101, 51), (1000, 101)])
def test_a_long_run_has_a_hundred_lines(piped: StringIO, tmp_path: Path, num_epochs: int, num_lines: int) -> None:
    with Progress("training", tmp_path, ["one"], each_epoch=True):
        write(tmp_path / "one", start_record(num_epochs), *map(epoch_record, range(1, num_epochs + 1)))
    lines = piped.getvalue().splitlines()[1:]
    assert lines[0].startswith(f"epoch 1/{num_epochs},")
    assert lines[-1].startswith(f"epoch {num_epochs}/{num_epochs},")
    assert num_lines <= len(lines) <= num_lines + 1


def test_without_a_terminal_each_of_several_runs_has_a_line_at_its_end(piped: StringIO, tmp_path: Path) -> None:
    with Progress("baselines", tmp_path):
        write(tmp_path / "a-fp32", start_record(), epoch_record(1), End(status="finished", results=RESULTS))
        for name in ("amp", "probe"):
            end = End(status="failed", cause="bug", message="RuntimeError: no memory is left\nat all")
            write(tmp_path / name, start_record(), end)
    assert piped.getvalue().splitlines() == [
        "baselines",
        "a-fp32 finished: score 702.2, accuracy 97.49 %, 0.132 s/epoch, 1.05 GB",
        "amp failed: RuntimeError: no memory is left",
        "probe failed: likewise",
    ]


def test_without_a_terminal_each_trial_has_a_line_with_score_and_reason(piped: StringIO, tmp_path: Path) -> None:
    write_trial(tmp_path / "before", End(status="stopped"))
    with Progress("searching", tmp_path, num_trials=5):
        write_trial(tmp_path / "a", End(status="finished", results=RESULTS))
        write_trial(tmp_path / "b", End(status="stopped"))
        write(tmp_path / "c", start_record(), End(status="stopped"))
        write_trial(tmp_path / "d", End(status="failed", cause="out_of_memory", message="not even one sample fits"))
    assert piped.getvalue().splitlines() == [
        "searching",
        "2/5 a finished: score 702.2, accuracy 97.49 %, 0.132 s/epoch, 1.05 GB",
        "3/5 b stopped after epoch 2: score 60.83, accuracy 91.25 %, 1.5 s/epoch, 1 GB",
        "4/5 c stopped",
        "5/5 d failed: not even one sample fits",
    ]


@pytest.mark.parametrize(("width", "left_out"), [(40, ""), (15, "second"), (8, "second, third")])
def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch, width: int, left_out: str) -> None:
    monkeypatch.setattr(console, "out", Console(file=StringIO(), width=width))
    header = ("first", "second", "third")
    table = rich_table(Grid(header=header, rows=[("a", "b", "c")], spare=("second", "third")))
    assert [column.header for column in table.columns] == [name for name in header if name not in left_out]
    assert table.caption == (f"left out for want of width: {left_out}; the page has them" if left_out else None)
