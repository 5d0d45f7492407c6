from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import LogError
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import read_run, runs_below
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
    with (tmp_path / "mine" / EVENTS).open("ab") as file:
        file.write(b'{"sequence": 99, "kind": "ep')  # still being written
    assert read_run(tmp_path / "mine") == run


def test_figures_are_those_after_an_epoch_and_at_the_end_what_the_run_ended_with(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path).complete(epochs=7))
    seconds = sum(epoch.seconds for epoch in run.epochs[2:]) / 5
    peak_gb = run.epochs[-1].peak_bytes / 1e9
    expected = Figures(metric=91.5, seconds=seconds, peak_gb=peak_gb, score=91.5 / (seconds * peak_gb))
    assert run.figures is not None
    assert astuple(run.figures) == pytest.approx(astuple(expected))
    early, before = run.figures_after(2), run.epochs[1]
    assert early is not None
    assert (early.metric, early.peak_gb) == (before.held_out(Goal()), before.peak_bytes / 1e9)
    assert early.seconds == pytest.approx((run.epochs[0].seconds + before.seconds) / 2)
    assert run.figures_after(0) is None


@pytest.mark.parametrize("is_final", [False, True])
def test_a_run_under_way_has_figures_once_it_was_judged(tmp_path: Path, is_final: bool) -> None:
    run = simulated(tmp_path)
    run.start()
    assert read_run(tmp_path).figures is None
    unjudged = {"held_out_metrics": {}, "held_out_loss": None, "score": None} if is_final else {}
    run.append(run.make_tick(), replace(run.make_epoch(), **unjudged))
    read = read_run(tmp_path)
    assert read.status == "unfinished"
    assert (read.figures is None) == is_final
    assert is_final or read.figures.metric == read.epochs[-1].held_out(Goal())  # type: ignore[union-attr]
    for status, cause, told in (
        ("stopped", "", "stopped"),
        ("failed", "out_of_memory", "failed (out_of_memory)"),
    ):
        run.end(status, cause)
        assert read_run(tmp_path).status == told


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


def test_runs_are_found_at_any_depth_in_name_order(tmp_path: Path) -> None:
    folders = [tmp_path / "b" / "trials" / "1", tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        simulated(folder).start()
    assert list(runs_below(tmp_path)) == [tmp_path / "a", tmp_path / "b", tmp_path / "b" / "trials" / "1"]
