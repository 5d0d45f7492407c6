"""What is shown while work goes on."""

import contextlib
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.build import SimulatedRun
from tests.service.records import run_of
from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, Record, Start, read_events
from triaccel_ray.records.plan import Precision
from triaccel_ray.service import console
from triaccel_ray.service.commands import progress
from triaccel_ray.service.commands.progress import ProgressPrinter
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import TextTable
from triaccel_ray.service.storage.layout import EVENTS

START = Start(control=ControlConfig(), parameters={"recipe.epochs": 3, "memory_limit_bytes": 2**31})
FINISHED = End(status="finished", results={"accuracy": 97.49, "seconds_per_epoch": 0.1322})


LEARNED: Any = {"train_loss": 0.1, "held_out_metrics": {"accuracy": 91.25}, "score": 60.83}
SPENT: Any = {"seconds": 1.5, "images_per_second": 100.0, "batch_size": 64, "peak_bytes": 10**9}


def epoch_record(epoch: int) -> Epoch:
    return replace(run_of("any").epochs[0], epoch=epoch, step=10 * epoch, **LEARNED, **SPENT)


def write(folder: Path, *told: Record, keep: int | None = None) -> None:
    """Adds the records to the log, after its first `keep`."""
    with contextlib.closing(EventLog(folder / EVENTS, keep=keep)) as log:
        for record in told:
            log.append(record)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error."""
    written = StringIO()
    monkeypatch.setattr(progress, "err", Console(file=written, width=120))
    return written


def test_a_line_names_the_precisions_of_the_layers(screen: StringIO, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "one")
    with ProgressPrinter("training", tmp_path):
        assert screen.getvalue() == "training\n"  # at once
        run.complete(epochs=1)
    *_, tick, _, _ = [event.record for event in read_events(run.path)]
    levels = Counter(tick.decision.plan.precision.values())
    layers = " ".join(f"{levels[level]} {level.value}" for level in Precision if levels[level])
    (_, line, _) = screen.getvalue().splitlines()
    assert line.startswith("one: epoch 1/4, samples/s ")
    assert f"layers {layers}, loss" in line


def test_a_run_has_a_line_for_each_epoch_once(screen: StringIO, tmp_path: Path) -> None:
    write(tmp_path / "one", START, epoch_record(1))
    with ProgressPrinter("training", tmp_path, ["one"]):
        assert screen.getvalue() == "training\n"
        write(tmp_path / "one", Interruption(cause="preempted", message="the process was lost", epoch=1))
        write(tmp_path / "one", epoch_record(2))
        wait_until(lambda: "epoch 2" in screen.getvalue())
        write(tmp_path / "one", epoch_record(3), FINISHED, keep=2)  # cut back, as where a run goes on
    figures = "samples/s 100, batch 64, memory 954 MiB of 2 GiB, loss 0.1000, held out accuracy"
    assert screen.getvalue().splitlines()[1:] == [
        "one: the process was lost",
        f"epoch 2/3, {figures} 91.25 %, score 60.83",
        f"epoch 3/3, {figures} 91.25 %, score 60.83",
        "one finished after epoch 3/3: held out accuracy 97.49 %, score 737.44",
    ]


def test_what_a_final_run_is_judged_on_is_called_test_samples(screen: StringIO, tmp_path: Path) -> None:
    with ProgressPrinter("training", tmp_path, ["one"]):
        write(tmp_path / "one", replace(START, info={"purpose": "final"}), epoch_record(3), FINISHED)
    assert screen.getvalue().splitlines()[-1].startswith("one finished after epoch 3/3: test accuracy 97.49 %")


@pytest.mark.parametrize(("num_epochs", "num_lines"), [(7, 7), (100, 100), (101, 51), (1000, 101)])
def test_a_long_run_has_a_hundred_lines(screen: StringIO, tmp_path: Path, num_epochs: int, num_lines: int) -> None:
    start = Start(control=ControlConfig(), parameters={"recipe.epochs": num_epochs})
    with ProgressPrinter("training", tmp_path, ["one"]):
        write(tmp_path / "one", start, *map(epoch_record, range(1, num_epochs + 1)))
    lines = screen.getvalue().splitlines()[1:]
    assert lines[0].startswith(f"epoch 1/{num_epochs},")
    assert lines[-1].startswith(f"epoch {num_epochs}/{num_epochs},")
    assert num_lines <= len(lines) <= num_lines + 1


def test_each_of_several_runs_has_a_line_at_its_end(screen: StringIO, tmp_path: Path) -> None:
    write(tmp_path / "before", START, epoch_record(2), End(status="stopped"))
    with ProgressPrinter("searching", tmp_path, num_trials=6):
        write(tmp_path / "a", START, epoch_record(2), FINISHED)
        write(tmp_path / "b", START, epoch_record(2), End(status="stopped"))
        write(tmp_path / "c", START, End(status="stopped"))
        write(tmp_path / "d", START, End(status="failed", cause="bug", message="RuntimeError: no memory\nis left"))
    figures = "epoch 2/3, samples/s 100, batch 64, memory 954 MiB of 2 GiB, loss 0.1000, held out accuracy"
    assert screen.getvalue().splitlines() == [
        "searching",
        f"a: {figures} 91.25 %, score 60.83",
        "2/6 a finished after epoch 2/3: held out accuracy 97.49 %, score 737.44",
        f"b: {figures} 91.25 %, score 60.83",
        "3/6 b stopped after epoch 2/3: held out accuracy 91.25 %, score 60.83",
        "4/6 c stopped",
        "5/6 d failed: RuntimeError: no memory",
    ]


@pytest.mark.parametrize(("width", "left_out"), [(40, ""), (15, "second"), (8, "second, third")])
def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch, width: int, left_out: str) -> None:
    monkeypatch.setattr(console, "out", Console(file=StringIO(), width=width))
    header = ("first", "second", "third")
    table = rich_table(TextTable(header=header, rows=[("a", "b", "c")], droppable=("second", "third")))
    assert [column.header for column in table.columns] == [name for name in header if name not in left_out]
    assert table.caption == (
        f"too wide for this terminal, so left out: {left_out}; the page has them" if left_out else None
    )


def test_columns_of_numbers_alone_are_on_the_right() -> None:
    rows = [("a", "1,635", "90.1 ± 0.2", "", "12 steps were skipped"), ("b", "inf", "-3 *", "", "the batch grows")]
    table = rich_table(TextTable(header=("run", "samples/s", "accuracy", "note", "reason"), rows=rows))
    assert [column.justify for column in table.columns] == ["left", "right", "right", "left", "left"]
