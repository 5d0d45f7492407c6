"""The report of timed batch sizes: table, notes, curve and command."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import End, Throughput
from triaccel_ray.records.plan import Fault, FaultKind, Storage
from triaccel_ray.service.report.figures import draw_run
from triaccel_ray.service.report.run import batch_table
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.storage.layout import SPEC, write_value
from triaccel_ray.service.storage.storage_path import StoragePath

RESULTS = {"batch_size": 256.0, "lr": 0.16333, "samples_per_second": 9800.0, "best_samples_per_second": 1e4}
NOT_CAPTURED = Fault(kind=FaultKind.CAPTURE_FAILED, step=3, phase="capture", detail="the loss reads a file")


def timed(batch_size: int, rate: float | None, **plan: object) -> Throughput:
    step_ms = None if rate is None else 1e3 * batch_size / rate
    return Throughput(batch_size=batch_size, step_ms=step_ms, peak_bytes=10**9 + batch_size, **plan)


def run_with(folder: Path, *sizes: Throughput, end: End | None, maximum: int = 512) -> RunRecord:
    control = replace(CONTROL, batch=replace(CONTROL.batch, maximum=maximum))
    made = SimulatedRun(folder, control=control, info={"task": "cifar10-resnet18", "method": "tune-batch"})
    made.start()
    made.append(*sizes, *([end] if end else []))
    write_value(folder / SPEC, replace(RUN_SPEC, method="tune-batch"))
    return read_run(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    storage = {"a": Storage.RECOMPUTE, "b": Storage.RECOMPUTE, "c": Storage.OFFLOAD}
    sizes = [
        timed(32, 4000.0, faults=(NOT_CAPTURED,)),
        timed(128, 8000.0),
        timed(512, 10_000.0, num_micro_batches=2, storage=storage),
        timed(256, 9800.0),
    ]
    return run_with(tmp_path / "sizes", *sizes, end=End(status="finished", results=RESULTS))


def test_the_table_is_in_order_and_a_star_marks_the_efficient_size(run: RunRecord) -> None:
    table = batch_table(run)
    assert [list(row)[:4] for row in table.rows] == [
        ["32", "8.000", "4,000", "40.0"],
        ["128", "16.000", "8,000", "80.0"],
        ["256 *", "26.122", "9,800", "98.0"],
        ["512", "51.200", "10,000", "100.0"],
    ]
    assert table.rows[-1][4:] == ["1.000", "2 micro-batches; 2 regions to recompute; 1 region to offload"]
    assert table.note == "*: the smallest with 97% of the best samples/s"
    assert table.as_dicts()[2]["batch"] == 256


def test_the_report_ends_with_the_command_that_trains_at_that_size(run: RunRecord, tmp_path: Path) -> None:
    view = view_at(StoragePath(str(run.folder)))
    assert view.command == f"triaccel run --from {run.folder} --batch-size 256 --lr 0.1633 --adapt-batch off"
    _, advice, notes, _, picture = view.parts
    sentence, command = advice.splitlines()
    assert command == view.command
    assert sentence.startswith("A batch of 256 is efficient. Its learning rate is 0.1633 (lr_rule sqrt, from 0.1 at ")
    assert notes == "capture_failed (capture): the loss reads a file"
    assert f"triaccel tune-batch --from {run.folder}" in view.page.read_text()
    assert isinstance(picture, Path)
    assert picture.name == "batch_sizes.png"


def test_the_curve_shows_the_sizes_that_fit_and_the_efficient_one(run: RunRecord) -> None:
    unfit = replace(run, throughputs=(*run.throughputs, timed(1024, None)))
    (axes,) = draw_run(unfit)["batch_sizes"].axes
    curve, least, efficient = axes.lines
    assert curve.get_xydata().tolist() == [[32, 4000.0], [128, 8000.0], [256, pytest.approx(9800)], [512, 10_000.0]]
    assert efficient.get_xydata().tolist() == [[256, pytest.approx(9800)]]
    assert least.get_ydata()[0] == pytest.approx(9700)
    (axes,) = draw_run(replace(unfit, end=None))["batch_sizes"].axes
    assert len(axes.lines) == 2


@pytest.mark.parametrize(
    ("sizes", "maximum", "found", "note"),
    [
        ([timed(32, 4e3), timed(64, None)], 512, 32, "sizes above the one that does not fit were not tried"),
        ([timed(32, 4e3), timed(64, 8e3)], 512, 64, "no smaller size is efficient, so try a larger --batch-max"),
        ([timed(32, 8e3), timed(96, 8e3)], 100, 32, "sizes above 100 were not tried: there are 100 training samples"),
    ],
)
def test_a_note_says_why_the_ladder_ends(
    sizes: list[Throughput], maximum: int, found: int, note: str, tmp_path: Path
) -> None:
    end = End(status="finished", results={**RESULTS, "batch_size": float(found)})
    table = batch_table(run_with(tmp_path / "sizes", *sizes, end=end, maximum=maximum))
    assert table.note == f"*: the smallest with 97% of the best samples/s\n{note}"
    unfit = [row for row in table.rows if row[-1] == "does not fit"]
    assert [row[1:4] for row in unfit] == [["", "", ""]] * sum(each.step_ms is None for each in sizes)


def test_what_is_not_finished_has_no_command(tmp_path: Path) -> None:
    end = End(status="failed", cause="out_of_memory", message="not even the smallest fits")
    run_with(tmp_path / "sizes", end=end)
    view = view_at(StoragePath(str(tmp_path / "sizes")))
    assert view.command == ""
    assert any("failed (out_of_memory)" in part for part in view.parts if isinstance(part, str))
