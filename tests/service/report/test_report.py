"""The parts of a page: what is written, where it comes from, and what failed or is missing."""

import base64
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.browser import Tags, needs_chromium, shown
from tests.service.build import SimulatedRun
from tests.service.records import RUN_SPEC, run_of
from triaccel_ray.records.events import End, Interruption
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Applied, Fault, FaultKind
from triaccel_ray.service.report.provenance import about, run_notes, troubles
from triaccel_ray.service.report.report import Part, View, with_page
from triaccel_ray.service.report.run import result_table, run_table
from triaccel_ray.service.report.tables import TextTable
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.storage.layout import ERROR, REPORT, SPEC, write_value
from triaccel_ray.service.storage.storage_path import StoragePath

PICTURE = b"\x89PNG\r\n\x1a\n not looked at"
INFO = {"hardware": "a GPU", "host": "box", "commit": "abc-dirty"}
INFO |= {"triaccel-ray": "0.1", "torch": "2.15", "python": "3.11"}


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    made = SimulatedRun(tmp_path / "one", info=INFO, parameters={"memory_limit_bytes": 2**31})
    made.complete(epochs=2)
    write_value(made.folder / SPEC, RUN_SPEC)
    return read_run(made.folder)


EVIL = "<script>document.title = 'taken over'</script>"


def page_of(folder: Path, *parts: Part, title: str = "a run", details: Sequence[Part] = ()) -> str:
    return with_page(View(folder=folder, title=title, parts=parts, details=details, rows=[])).page.read_text()


def test_a_page_holds_everything_in_order_and_can_be_sent_to_anybody(tmp_path: Path) -> None:
    picture = tmp_path / "it's.png"
    picture.write_bytes(PICTURE)
    table = TextTable(header=("a", "b"), rows=[("1", "2"), ("3", EVIL)], title="Result", note="of four")
    page = page_of(tmp_path, "all is well", table, "", picture, EVIL, title=EVIL, details=["more"])
    picture.unlink()
    tags = Tags(page)
    texts = [EVIL, EVIL, "all is well", "Result", "a", "b", "1", "2", "3", EVIL, "of four", EVIL, "more"]
    assert tags.texts[-len(texts) :] == texts
    assert [tags.count(name) for name in ("h2", "table", "img", "script")] == [1, 1, 1, 0]
    ((_, image),) = [tag for tag in tags.tags if tag[0] == "img"]
    assert base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")) == PICTURE
    assert image["alt"] == "it's"
    # It needs nothing from elsewhere.
    assert not re.search(r"https?:|//[a-z]|url\(|@import", re.sub(r"base64,[^']*", "", page))
    assert not {"link", "iframe", "object"} & {tag for tag, _ in tags.tags}


@needs_chromium
def test_a_page_runs_no_script(tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text(page_of(tmp_path, "Result").replace("</html>", f"{EVIL}</html>"))
    assert "<title>a run</title>" in shown(f"file://{tmp_path / 'evil.html'}", tmp_path)


def test_a_runs_page_says_where_it_comes_from_and_holds_all_settings(run: RunRecord) -> None:
    facts = dict(about(run.spec, [run], {"seed": "3"}, "triaccel run x").rows)
    assert (facts["task"], facts["seed"], facts["to repeat"]) == ("cifar10-resnet18", "3", "triaccel run x")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", facts["begun"])
    assert (facts["hardware"], facts["commit"]) == ("a GPU (host box)", "abc-dirty")
    assert facts["versions"] == "triaccel-ray 0.1, torch 2.15, python 3.11"

    view = view_at(StoragePath.of(run.folder))
    assert view.page == run.folder / REPORT
    texts = Tags(view.page.read_text()).texts
    title = "one: cifar10-resnet18, the full control loop, finished"
    assert {title, f"triaccel run --from {run.folder}", "result"} <= set(texts)
    assert texts[texts.index("weight_decay") + 1] == "0.0005"
    assert [row["epoch"] for row in view.rows] == [1, 2]


def test_failures_say_when_why_and_where_the_traceback_is(run: RunRecord) -> None:
    (run.folder / ERROR).write_text("Traceback")
    died = replace(run, end=End(status="failed", cause="non_finite", message="the training loss is nan"))
    back = Interruption(cause="preempted", message="node lost", epoch=1)
    lost = replace(run, end=None, epochs=(), interruptions=(back,))
    assert troubles({"a": died, "b": lost, "d": run}, ["e"], {"f": "line 1"}).splitlines() == [
        f"a failed (non_finite) after epoch 2: the training loss is nan (traceback: {run.folder / ERROR})",
        "b is unfinished before its first epoch ended: it still trains, or its process was lost; was interrupted "
        "(preempted): node lost",
        "f is left out: line 1",
        "e is missing: it was asked for and has not begun",
    ]


def with_faults(run: RunRecord, *faults: Fault) -> RunRecord:
    first = replace(run.ticks[0], observation=replace(run.ticks[0].observation, faults=faults))
    rest = [replace(tick, observation=replace(tick.observation, faults=())) for tick in run.ticks[1:]]
    return replace(run, ticks=(first, *rest))


def test_faults_are_counted(run: RunRecord) -> None:
    assert list(run_notes(with_faults(run))) == []
    sizes = {
        FaultKind.OUT_OF_MEMORY: (96, 96),
        FaultKind.CAPTURE_OUT_OF_MEMORY: (8, 9, 8),
        FaultKind.CAPTURE_FAILED: (7,),
    }
    a_fault = Fault(kind=FaultKind.OUT_OF_MEMORY, step=1, phase="any", detail="why")
    seen = [replace(a_fault, kind=kind, batch_size=size) for kind in sizes for size in sizes[kind]]
    assert list(run_notes(with_faults(run, *seen))) == [
        "out_of_memory (any, 2 times): why",
        "capture_out_of_memory (any, 3 times): why",
        "capture_failed (any): why",
    ]


def test_what_adapting_took_and_shared_gpus_are_told(run: RunRecord) -> None:
    quiet = with_faults(run)
    applied = Applied(plan=quiet.ticks[0].applied.plan, adapt_ms=1250.0)
    ticks = tuple(replace(tick, applied=applied) for tick in quiet.ticks[:2])
    shared = replace(quiet, ticks=ticks, spec=replace(run.spec, trials_per_gpu=3))
    sharing, adapting = run_notes(shared)
    assert "GPUs shared by 3 runs each" in sharing
    assert adapting.startswith("adapting took 2.5 s of the run")
    (ranks,) = run_notes(replace(quiet, spec=replace(run.spec, gpus="2..4")))
    assert ranks == "trained by 2 to 4 ranks together; seconds and memory are those of rank 0"


def test_a_table_can_be_had_as_numbers() -> None:
    cells = ["amp", "94.2 ± 0.15", "1,234", "47.27 *", "", "inf", "1.5e-07", "-3", "2 of 3", "1_0", "nan"]
    (row,) = TextTable(header=[str(place) for place in range(len(cells))], rows=[cells]).as_dicts()
    inf = float("inf")
    assert list(row.items()) == [
        *(("0", "amp"), ("1", 94.2), ("1 ±", 0.15), ("2", 1234), ("3", 47.27)),
        *(("4", None), ("5", inf), ("6", 1.5e-07), ("7", -3), ("8", "2 of 3"), ("9", "1_0"), ("10", "nan")),
    ]
    assert type(row["2"]) is int


def test_a_run_has_a_row_an_epoch() -> None:
    run = run_of("run", num_epochs=3)
    blind = replace(run.epochs[0], held_out_metrics={}, score=None)
    more = replace(run.epochs[1], held_out_metrics={"accuracy": 90.0, "top_5": 99.0})
    table = run_table(replace(run, epochs=(blind, more, run.epochs[2])))
    assert [row[0] for row in table.rows] == ["1", "2", "3"]
    assert table.header[2:4] == ("accuracy %", "top 5")
    assert [row[2:4] for row in table.rows] == [["", ""], ["90.00", "99"], ["90.00", ""]]
    assert table.rows[0][9] == ""
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_results_have_four_digits() -> None:
    results = {"accuracy": 98.7654, "seconds_per_epoch": 0.123456, "peak_gb": 1.0, "allocated_peak_gb": 0.5}
    table = result_table({**results, "score": 1234.5, "idle_gb": 0.4}, Goal())
    assert list(table.rows[0]) == ["98.77", "0.1235", "1", "0.5", "1234"]
    assert len(table.header) == 5
    assert "on a CPU in processor time" in table.note
    table = result_table({**results, "one_view_accuracy": 98.1}, Goal())
    assert (table.header[-1], table.rows[0][-1]) == ("by one view %", "98.1")
