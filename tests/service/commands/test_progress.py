"""What is shown while work goes on: a table on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.build import SimulatedRun
from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, Record, Start, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.service import console
from triaccel_ray.service.commands.progress import MAX_ROWS, Progress
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.storage.layout import EVENTS

START = Start(control=ControlConfig(), parameters={"recipe.epochs": 3, "memory_limit_bytes": 2**31})
FINISHED = End(status="finished", results={"accuracy": 97.49, "seconds_per_epoch": 0.1322})


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


def write(folder: Path, *told: Record, keep: int | None = None) -> None:
    """Adds the records to the log, after its first `keep`."""
    with contextlib.closing(EventLog(folder / EVENTS, keep=keep)) as log:
        for record in told:
            log.append(record)


def raiser(error: BaseException) -> Any:
    def raise_() -> None:
        raise error

    return raise_


@pytest.fixture(params=[False])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error as a file, or as a terminal of 120 columns."""
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=request.param, width=120))
    return written


on_a_terminal = pytest.mark.parametrize("screen", [True], indirect=True)


@on_a_terminal
def test_a_run_shows_epochs_speed_batch_memory_and_precisions(screen: StringIO, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "one")
    run.start()
    run.train(1)
    run.append(run.make_tick())
    with Progress("training", tmp_path, ["one", "two"]):
        assert all(part in screen.getvalue() for part in ("training", "one", "starting"))  # at once
    *_, epoch, tick = [event.record for event in read_events(run.path)]
    assert isinstance(tick, Tick)
    assert isinstance(epoch, Epoch)
    judged, plan = epoch.held_out(Goal()), tick.decision.plan
    assert judged is not None
    levels = [level.value for level in plan.precision.values()]
    for part in ("1.2/4", str(plan.batch_size), Goal().named(judged), "two", "starting", *levels):
        assert part in screen.getvalue()


@on_a_terminal
def test_ctrl_c_while_it_starts_leaves_no_table_behind(
    screen: StringIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress("training", tmp_path, ["one"])
    monkeypatch.setattr(progress._thread, "start", raiser(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), progress:
        pass
    assert progress._live is not None
    assert not progress._live.is_started


@on_a_terminal
def test_a_search_shows_its_trials_from_their_logs(screen: StringIO, tmp_path: Path) -> None:
    for name in (*(f"trial-{number:02}" for number in range(MAX_ROWS)), "z-good"):
        status = "finished" if name == "z-good" else "stopped"
        write(tmp_path / name, START, epoch_record(2), End(status=status))
    with Progress("searching", tmp_path, num_trials=20):
        wait_until(lambda: "16 of 20 done" in screen.getvalue())
    for part in ("z-good", "trial-00", "finished", "stopped", "91.25", "60.83"):
        assert part in screen.getvalue()
    assert f"trial-{MAX_ROWS - 1}" not in screen.getvalue()  # of the same score, but of an early epoch


def test_without_a_terminal_a_run_has_a_line_for_each_epoch_once(screen: StringIO, tmp_path: Path) -> None:
    write(tmp_path / "one", START, epoch_record(1))
    with Progress("training", tmp_path, ["one"], each_epoch=True):
        assert screen.getvalue() == "training\n"
        write(tmp_path / "one", Interruption(cause="preempted", message="the process was lost", epoch=1))
        write(tmp_path / "one", epoch_record(2))
        wait_until(lambda: "epoch 2" in screen.getvalue())
        write(tmp_path / "one", epoch_record(3), FINISHED, keep=2)  # cut back, as where a run goes on
    figures = "samples/s 100, batch 64, memory 954 MiB of 2 GiB, loss 0.1000, held out accuracy"
    assert screen.getvalue().splitlines()[1:] == [
        "one: the process was lost",
        f"epoch 2.0/3, {figures} 91.25 %, score 60.83",
        f"epoch 3.0/3, {figures} 91.25 %, score 60.83",
        f"one finished: epoch 3.0/3, {figures} 97.49 %, score 737.44",
    ]


@pytest.mark.parametrize(("num_epochs", "num_lines"), [(7, 7), (100, 100), (101, 51), (1000, 101)])
def test_a_long_run_has_a_hundred_lines(screen: StringIO, tmp_path: Path, num_epochs: int, num_lines: int) -> None:
    start = Start(control=ControlConfig(), parameters={"recipe.epochs": num_epochs})
    with Progress("training", tmp_path, ["one"], each_epoch=True):
        write(tmp_path / "one", start, *map(epoch_record, range(1, num_epochs + 1)))
    lines = screen.getvalue().splitlines()[1:]
    assert lines[0].startswith(f"epoch 1.0/{num_epochs},")
    assert lines[-1].startswith(f"epoch {num_epochs}.0/{num_epochs},")
    assert num_lines <= len(lines) <= num_lines + 1


def test_without_a_terminal_each_of_several_runs_has_a_line_at_its_end(screen: StringIO, tmp_path: Path) -> None:
    write(tmp_path / "before", START, epoch_record(2), End(status="stopped"))
    with Progress("searching", tmp_path, num_trials=6):
        write(tmp_path / "a", START, epoch_record(2), FINISHED)
        write(tmp_path / "b", START, epoch_record(2), End(status="stopped"))
        write(tmp_path / "c", START, End(status="stopped"))
        for name in ("d", "e"):
            write(tmp_path / name, START, End(status="failed", cause="bug", message="RuntimeError: no memory\nis left"))
    figures = "epoch 2.0/3, samples/s 100, batch 64, memory 954 MiB of 2 GiB, loss 0.1000, held out accuracy"
    assert screen.getvalue().splitlines() == [
        "searching",
        f"2/6 a finished: {figures} 97.49 %, score 737.44",
        f"3/6 b stopped: {figures} 91.25 %, score 60.83",
        "4/6 c stopped",
        "5/6 d failed: RuntimeError: no memory",
        "6/6 e failed: likewise",
    ]


@pytest.mark.parametrize(("width", "left_out"), [(40, ""), (15, "second"), (8, "second, third")])
def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch, width: int, left_out: str) -> None:
    monkeypatch.setattr(console, "out", Console(file=StringIO(), width=width))
    header = ("first", "second", "third")
    table = rich_table(Grid(header=header, rows=[("a", "b", "c")], spare=("second", "third")))
    assert [column.header for column in table.columns] == [name for name in header if name not in left_out]
    assert table.caption == (f"left out for want of width: {left_out}; the page has them" if left_out else None)
