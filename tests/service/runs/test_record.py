from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import LogError
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import read_run, read_spec, runs_below
from triaccel_ray.service.storage.layout import EVENTS, SPEC


def simulated(folder: Path) -> SimulatedRun:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SPEC).write_text(json.dumps(encode(RUN_SPEC)))
    return SimulatedRun(folder, has_pictures=False)


def test_a_run_is_read_back_from_its_folder(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path / "mine").complete(epochs=2))
    assert (run.name, run.status, run.spec) == ("mine", "finished", RUN_SPEC)
    assert run.start.control == CONTROL
    assert [epoch.epoch for epoch in run.epochs] == [1, 2]
    assert len(run.ticks) == 8
    assert run.end is not None
    assert run.end.results["accuracy"] == 91.5


def test_figures_are_those_of_the_last_epoch(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path).complete(epochs=7))
    figures, last = run.figures, run.epochs[-1]
    seconds = sum(epoch.seconds for epoch in run.epochs[2:]) / 5
    assert figures is not None
    assert figures.metric == 91.5  # what the run ended with
    assert (figures.seconds, figures.peak_gb) == pytest.approx((seconds, last.peak_bytes / 1e9))
    assert figures.score == pytest.approx(91.5 / (seconds * last.peak_bytes / 1e9))


def test_figures_can_be_had_as_they_were_after_any_epoch(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path).complete(epochs=7))
    early, before = run.figures_after(2), run.epochs[1]
    assert early is not None
    assert (early.metric, early.score) == (before.held_out(Goal()), pytest.approx(before.score, rel=0.5))
    assert early.seconds == pytest.approx((run.epochs[0].seconds + before.seconds) / 2)
    assert early.peak_gb == before.peak_bytes / 1e9
    assert run.figures_after(0) is None


def test_a_run_under_way_has_the_figures_of_its_last_epoch(tmp_path: Path) -> None:
    run = simulated(tmp_path)
    run.start()
    assert read_run(tmp_path).figures is None
    run.train(1)
    read = read_run(tmp_path)
    assert read.status == "unfinished"
    assert isinstance(read.figures, Figures)
    assert read.figures.metric == read.epochs[-1].held_out(Goal())


def test_a_final_run_under_way_has_no_figures(tmp_path: Path) -> None:
    run = simulated(tmp_path)
    run.start()
    run.append(run.make_tick(), replace(run.make_epoch(), held_out_metrics={}, held_out_loss=None, score=None))
    assert read_run(tmp_path).figures is None


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (("finished", ""), "finished"),
        (("stopped", ""), "stopped"),
        (("failed", "out_of_memory"), "failed (out_of_memory)"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, end: tuple[str, str], status: str) -> None:
    run = simulated(tmp_path)
    run.start()
    run.end(*end)
    assert read_run(tmp_path).status == status


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    simulated(tmp_path).complete()
    complete = read_run(tmp_path)
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b'{"sequence": 99, "kind": "ep')
    assert read_run(tmp_path) == complete


def cut_start(folder: Path) -> None:
    lines = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    (folder / EVENTS).write_bytes(b"".join(lines[1:]))


def spec_with(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / SPEC).write_text(json.dumps({**json.loads((folder / SPEC).read_text()), **changes}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no log": (lambda folder: (folder / EVENTS).unlink(), "holds no run (events.jsonl is missing)"),
    "empty log": (lambda folder: (folder / EVENTS).write_bytes(b""), "does not begin with a start record"),
    "no start": (cut_start, "does not begin with a start record"),
    "not JSON": (lambda folder: (folder / EVENTS).write_bytes(b"\x00\xff\n"), "line 1: not an event"),
    "not an event": (lambda folder: (folder / EVENTS).write_text('{"kind": "tock"}\n'), "kind = 'tock'"),
    "no spec": (lambda folder: (folder / SPEC).unlink(), "spec.json cannot be read"),
    "spec not JSON": (lambda folder: (folder / SPEC).write_text("{"), "spec.json cannot be read"),
    "spec not UTF-8": (lambda folder: (folder / SPEC).write_bytes(b"\xff\xfe"), "spec.json cannot be read"),
    "spec a list": (lambda folder: (folder / SPEC).write_text("[]"), "must be an object"),
    "unknown method": (spec_with(method="sgd"), "method = 'sgd': must be one of"),
    "unknown field": (spec_with(colour="red"), "must be only the fields"),
    "wrong type": (spec_with(seed="zero"), "must be an integer"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    act, message = DAMAGE[damage]
    act(simulated(tmp_path).complete())
    with pytest.raises(LogError, match=re.escape(message)) as caught:
        read_run(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_spec_alone_can_be_read(tmp_path: Path) -> None:
    simulated(tmp_path)
    assert read_spec(tmp_path) == RUN_SPEC


def test_runs_are_found_at_any_depth_in_name_order(tmp_path: Path) -> None:
    folders = [tmp_path / "b" / "trials" / "1", tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        simulated(folder).start()
    assert list(runs_below(tmp_path)) == [tmp_path / "a", tmp_path / "b", tmp_path / "b" / "trials" / "1"]
