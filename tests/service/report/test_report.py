"""The parts of a page: what is written, where it comes from, and what failed or is missing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.browser import Tags, needs_chromium, shown
from tests.service.build import SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import End, Interruption, Start
from triaccel_ray.records.plan import Applied, Fault, FaultKind
from triaccel_ray.service.report.provenance import about, run_notes, troubles
from triaccel_ray.service.report.report import REPORT, Section, write_page
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.storage.layout import ERROR, SPEC, write_value
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose

PICTURE = b"\x89PNG\r\n\x1a\n not looked at"
INFO = {"hardware": "a GPU", "host": "box", "triaccel-ray": "0.1", "torch": "2.15", "python": "3.11"}


def page_of(tmp_path: Path, *sections: Section, title: str = "a run") -> str:
    return write_page(tmp_path, title, sections).read_text()


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    made = SimulatedRun(tmp_path / "one", info=INFO, parameters={"memory_limit_bytes": 2**31})
    made.complete(epochs=2)
    write_value(made.folder / SPEC, RUN_SPEC)
    return read_run(made.folder)


def test_a_page_holds_everything_in_order_and_can_be_sent_to_anybody(tmp_path: Path) -> None:
    picture = tmp_path / "it's.png"
    picture.write_bytes(PICTURE)
    grid = Grid(header=("a", "b"), rows=[("1", "2"), ("3", "4")], note="of four")
    first = Section(title="Result", facts={"seed": "0"}, text="all is well", table=grid)
    empty = Section(title="nothing", table=Grid(header=("a",), rows=[]))
    page = page_of(tmp_path, first, Section(title="Next", command="triaccel run", pictures=[picture]), empty)
    picture.unlink()
    tags = Tags(page)
    texts = ["Result", "seed", "0", "all is well", "a", "b", "1", "2", "3", "4", "of four", "Next", "triaccel run"]
    assert tags.texts[-len(texts) - 2 : -1] == [*texts, "nothing"]  # before the script
    assert [tags.count(name) for name in ("h2", "table", "pre", "img")] == [3, 2, 1, 1]
    ((_, image),) = [tag for tag in tags.tags if tag[0] == "img"]
    assert base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")) == PICTURE
    assert image["alt"] == "it's"


def test_texts_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    grid = Grid(header=(evil,), rows=[(evil,)], note=evil)
    section = Section(title=evil, text=evil, table=grid, command=evil, notice=evil, facts={evil: evil})
    tags = Tags(page_of(tmp_path, section, title=evil))
    assert tags.count("script") == 1  # the page's own
    assert tags.texts.count(evil) == 11


@needs_chromium
def test_a_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    page = page_of(tmp_path, Section(title="Result"))
    script = "<script>document.title = 'taken over'</script></html>"
    (tmp_path / "evil.html").write_text(page.replace("</html>", script))
    assert "<title>a run</title>" in shown(f"file://{tmp_path / 'evil.html'}", tmp_path)
    policy, own = re.search("'sha256-(.*?)'", page), re.search("<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert own is not None
    assert base64.b64decode(policy[1]) == hashlib.sha256(own[1].encode()).digest()


@needs_chromium
def test_a_click_on_a_heading_sorts_the_table(tmp_path: Path) -> None:
    rows = [("amp", "1,200", "98.5 ± 1"), ("fp32", "90", ""), ("triaccel", "<0.5", "97.2 *"), ("mine", "", "99")]
    page = page_of(tmp_path, Section(title="Result", table=Grid(header=("method", "score", "accuracy"), rows=rows)))

    def first_cells(*headings: int) -> list[str]:
        """What a browser shows after clicks; the page itself would not run the script that clicks."""
        clicks = "".join(f"document.querySelectorAll('th')[{heading}].click();" for heading in headings)
        open_page = re.sub("<meta http-equiv[^>]*>", "", page).replace("</html>", f"<script>{clicks}</script></html>")
        path = tmp_path / "clicked.html"
        path.write_text(open_page)
        return re.findall("<tr><td>(.*?)</td>", shown(f"file://{path}", tmp_path))

    assert first_cells(1) == ["amp", "fp32", "triaccel", "mine"]
    assert first_cells(1, 1) == ["triaccel", "fp32", "amp", "mine"]
    assert first_cells(2) == ["mine", "amp", "triaccel", "fp32"]
    assert first_cells(0, 0) == ["amp", "fp32", "mine", "triaccel"]


def test_a_page_begins_with_where_it_comes_from(run: RunRecord) -> None:
    facts = about(run.spec, [run], {"seed": "3"}, "triaccel run x").facts
    assert (facts["task"], facts["seed"], facts["to repeat"]) == ("cifar10-resnet18", "3", "triaccel run x")
    assert facts["date"].startswith("20")
    assert facts["date"].endswith(" UTC, within 0 s")
    assert facts["hardware"] == "a GPU (host box)"
    assert facts["versions"] == "triaccel-ray 0.1, torch 2.15, python 3.11"
    assert facts["commit"] == "none recorded: triaccel-ray 0.1"
    for part in ("30 epochs, 5 of them warm-up", "learning rate 0.1", "batch 96, elastic from 32 to 512", "2 GiB"):
        assert part in facts["settings"]
    committed = replace(run, start=Start(control=run.start.control, info={**INFO, "commit": "abc-dirty"}))
    assert about(run.spec, [committed], {}, "").facts["commit"] == "abc-dirty"


def test_a_runs_page_holds_command_method_status_and_all_settings(run: RunRecord) -> None:
    write_value(run.folder / SPEC, replace(run.spec, purpose=Purpose.FINAL, seed=5))
    view = view_at(StoragePath.of(run.folder))
    assert view.page == run.folder / REPORT
    texts = Tags(view.page.read_text()).texts
    assert f"triaccel run --from {run.folder}" in texts
    assert {"triaccel: the full control loop", "finished", "5", "All settings", "Result", "Epochs"} <= set(texts)
    assert any("\nweight_decay = 0.0005\n" in text for text in texts)
    assert [row["epoch"] for row in view.rows] == [1, 2]


def test_failures_say_when_why_and_where_the_traceback_is(run: RunRecord) -> None:
    (run.folder / ERROR).write_text("Traceback")
    died = replace(run, end=End(status="failed", cause="non_finite", message="the training loss is nan"))
    back = Interruption(cause="preempted", message="node lost", epoch=1)
    lost = replace(run, end=None, epochs=(), interruptions=(back,))
    assert troubles({"a": died, "b": lost, "d": run}, ["e"], {"f": "line 1"}) == {
        "a": f"failed (non_finite) after epoch 2: the training loss is nan (traceback: {run.folder / ERROR})",
        "b": "is unfinished before its first epoch ended: it still trains, or its process was lost; was interrupted "
        "(preempted): node lost",
        "f": "is left out: line 1",
        "e": "is missing: it was asked for and has not begun",
    }


def with_faults(run: RunRecord, *faults: Fault) -> RunRecord:
    first = replace(run.ticks[0], observation=replace(run.ticks[0].observation, faults=faults))
    rest = [replace(tick, observation=replace(tick.observation, faults=())) for tick in run.ticks[1:]]
    return replace(run, ticks=(first, *rest))


def fault(kind: FaultKind, phase: str, detail: str = "", batch_size: int = 0) -> Fault:
    return Fault(kind=kind, step=1, phase=phase, detail=detail, batch_size=batch_size)


@pytest.mark.parametrize(
    ("faults", "notes"),
    [
        ([], []),
        ([fault(FaultKind.OUT_OF_MEMORY, "forward_backward")] * 2, ["2 times memory ran out; no sample was lost"]),
        (
            [fault(FaultKind.CAPTURE_OUT_OF_MEMORY, "capture", batch_size=size) for size in (128, 96, 128)],
            ["3 times a step of batch 96, 128 found no memory as a CUDA graph and ran eagerly"],
        ),
        (
            [fault(FaultKind.CAPTURE_FAILED, "capture", "the step waits for the device")] * 2,
            ["steps ran eagerly, without CUDA graphs: the step waits for the device"],
        ),
        (
            [fault(FaultKind.DATA_STREAMED, "data", "CUDA out of memory")],
            ["the data set did not fit on the GPU and was read from the host: CUDA out of memory"],
        ),
    ],
)
def test_faults_are_counted_or_explained_once(run: RunRecord, faults: Sequence[Fault], notes: list[str]) -> None:
    assert list(run_notes(with_faults(run, *faults))) == notes


def test_what_adapting_took_and_shared_gpus_are_told(run: RunRecord) -> None:
    quiet = with_faults(run)
    applied = Applied(plan=quiet.ticks[0].applied.plan, adapt_ms=1250.0, evicted=("batch 96", "batch 64"))
    ticks = tuple(replace(tick, applied=applied) for tick in quiet.ticks[:2])
    shared = replace(quiet, ticks=ticks, spec=replace(run.spec, trials_per_gpu=3))
    sharing, adapting = run_notes(shared)
    assert "GPUs shared by 3 runs each" in sharing
    assert adapting.startswith("adapting took 2.5 s of the run")
    assert adapting.endswith("4 captured steps were dropped")
