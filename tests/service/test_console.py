"""What a terminal shows while work goes on; elsewhere nothing."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.service.waiting import wait_until
from triaccel_ray.config import ControlConfig
from triaccel_ray.events import End, Epoch, EventLog, Start
from triaccel_ray.service import console
from triaccel_ray.service.console import RunProgress, TrialProgress, rich_table
from triaccel_ray.service.reports.tables import Grid
from triaccel_ray.service.runs.runs import Glance
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
    accuracy=97.5,
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """Standard error as a terminal of 120 columns."""
    written = StringIO()
    monkeypatch.setattr(console, "err", Console(file=written, force_terminal=True, width=120))
    return written


def test_a_run_shows_epochs_speed_batch_memory_and_precisions(terminal: StringIO) -> None:
    with RunProgress("training", ["one", "two"]) as progress:
        progress.update(Glance(name="one", status=STATUS))
    shown = terminal.getvalue()
    for part in ("1.5/3", "1,234", "96", "1 GiB of 2 GiB", "1 fp16 2 bf16", "97.50 %", "two", "waiting"):
        assert part in shown


def test_a_search_shows_its_trials_from_their_logs(terminal: StringIO, tmp_path: Path) -> None:
    for name, status in (("good", "finished"), ("ahead", "stopped")):
        log = EventLog(tmp_path / name / EVENTS)
        log.append(Start(control=ControlConfig()))
        log.append(
            Epoch(
                epoch=2,
                step=20,
                train_loss=0.1,
                held_out_accuracy=91.25,
                held_out_loss=0.3,
                seconds=1.5,
                images_per_second=100.0,
                batch_size=64,
                peak_bytes=10**9,
                allocated_peak_bytes=0,
                num_skipped=0,
                score=60.83,
            )
        )
        log.append(End(status=status))
        log.close()
    with TrialProgress("searching", 5, tmp_path):
        wait_until(lambda: "2 of 5 trials done" in terminal.getvalue())
    shown = terminal.getvalue()
    assert shown.rindex("good") < shown.rindex("ahead")  # of the same score, but of an early epoch
    for part in ("good", "ahead", "finished", "stopped", "91.25", "60.83", "2 of 5 trials done"):
        assert part in shown


def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunProgress("training", ["one"]) as progress:
        progress.update(Glance(name="one", status=STATUS))
    with TrialProgress("searching", 1, tmp_path):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("width", "left_out"), [(40, ""), (15, "second"), (8, "second, third")])
def test_a_narrow_terminal_goes_without_columns(monkeypatch: pytest.MonkeyPatch, width: int, left_out: str) -> None:
    monkeypatch.setattr(console, "out", Console(file=StringIO(), width=width))
    header = ("first", "second", "third")
    table = rich_table(Grid(header=header, rows=[("a", "b", "c")], spare=("second", "third")))
    assert [column.header for column in table.columns] == [name for name in header if name not in left_out]
    assert table.caption == (f"left out for want of width: {left_out}; the page has them" if left_out else None)
