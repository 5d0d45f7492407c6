import re
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import LogError
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.runs.objective import Performance
from triaccel_ray.service.runs.record import performance_of, read_run
from triaccel_ray.service.storage.layout import EVENTS, SPEC, write_value


def simulated(folder: Path) -> SimulatedRun:
    folder.mkdir(exist_ok=True)
    write_value(folder / SPEC, RUN_SPEC)
    return SimulatedRun(folder, has_pictures=False)


def test_a_run_is_read_back_from_its_folder(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path / "mine").complete(epochs=2))
    assert (run.name, run.status, run.spec) == ("mine", "finished", RUN_SPEC)
    assert run.start.control == CONTROL
    assert [epoch.epoch for epoch in run.epochs] == [1, 2]
    assert len(run.ticks) == 8
    assert run.end.results["accuracy"] == 91.5
    with (tmp_path / "mine" / EVENTS).open("ab") as file:
        file.write(b'{"sequence": 99, "kind": "ep')  # still being written
    assert read_run(tmp_path / "mine") == run


def test_figures_are_those_after_an_epoch_and_at_the_end_what_the_run_ended_with(tmp_path: Path) -> None:
    run = read_run(simulated(tmp_path).complete(epochs=2))
    last = replace(run.epochs[-1], typical_seconds=5.0)
    peak_gb = last.peak_bytes / 1e9
    expected = Performance(metric=91.5, seconds=5.0, peak_gb=peak_gb, score=91.5 / (5.0 * peak_gb))
    assert astuple(replace(run, epochs=(last,)).performance) == pytest.approx(astuple(expected))
    early, before = performance_of(run.epochs[0], Goal()), run.epochs[0]
    assert (early.metric, early.seconds) == (before.held_out(Goal()), before.seconds)


@pytest.mark.parametrize("is_final", [False, True])
def test_a_run_under_way_has_figures_once_it_was_judged(tmp_path: Path, is_final: bool) -> None:
    run = simulated(tmp_path)
    run.start()
    assert read_run(tmp_path).performance is None
    unjudged = {"held_out_metrics": {}, "held_out_loss": None, "score": None} if is_final else {}
    run.append(run.make_tick(), replace(run.make_epoch(), **unjudged))
    read = read_run(tmp_path)
    assert read.status == "unfinished"
    assert (read.performance is None) == is_final
    assert is_final or read.performance.metric == read.epochs[-1].held_out(Goal())  # type: ignore[union-attr]
    for status, cause, told in (("stopped", "", "stopped"), ("failed", "out_of_memory", "failed (out_of_memory)")):
        run.end(status, cause)
        assert read_run(tmp_path).status == told


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no log": (EVENTS, lambda old: None, "holds no run (events.jsonl is missing)"),
    "empty log": (EVENTS, lambda old: b"", "does not begin with a start record"),
    "no start": (EVENTS, lambda old: old.partition(b"\n")[2], "does not begin with a start record"),
    "not JSON": (EVENTS, lambda old: b"\x00\xff\n", "line 1: not an event"),
    "no spec": (SPEC, lambda old: None, "spec.json cannot be read"),
    "spec not UTF-8": (SPEC, lambda old: b"\xff\xfe", "spec.json cannot be read"),
    "unknown method": (SPEC, lambda old: old.replace(b'"triaccel"', b'"sgd"'), "method = 'sgd': must be one of"),
}


@pytest.mark.parametrize(("file", "act", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(tmp_path: Path, file: str, act: Callable[[bytes], bytes | None], message: str) -> None:
    path = simulated(tmp_path).complete() / file
    damaged = act(path.read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with pytest.raises(LogError, match=re.escape(message)) as caught:
        read_run(tmp_path)
    assert str(tmp_path) in str(caught.value)
