from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.build import CONFIG, blobs, cross_entropy, mlp
from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.events import End, EventLog, LogError, Start, Tick
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.replay import reasons_grid, verdict
from triaccel_ray.service.runs.record import RunRecord

NUM_TICKS = 40


@pytest.fixture(scope="module")
def run() -> RunRecord:
    made = SimulatedRun(Path("run"))
    return RunRecord(
        folder=Path("run"),
        spec=RUN_SPEC,
        start=Start(control=CONTROL),
        ticks=tuple(made.make_tick() for _ in range(NUM_TICKS)),
        epochs=(),
        end=End(status="finished"),
    )


def test_its_own_configuration_decides_the_same(run: RunRecord) -> None:
    assert list(verdict(run, CONTROL)) == [
        f"{NUM_TICKS} ticks replayed under its own configuration: every decision is the same"
    ]


def test_the_log_of_a_loop_of_ones_own_is_reported_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(EventLog(Path("events.jsonl"))) as log:
        optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.05)
        loop = ControlLoop(model, optimizer, cross_entropy, blobs(64), config=CONFIG, on_tick=log.append)
        loop.train_epoch()
        loop.close()
    for words in ("report ./", "report events.jsonl", "replay events.jsonl"):
        with pytest.raises(SystemExit) as ended:
            main([*words.split(), "--storage-path", str(tmp_path)])
        said = capsys.readouterr()
        assert (ended.value.code, said.err) == (0, "")
    assert "replayed under its own configuration: every decision is the same" in said.out
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "figures" / "precision.png").exists()


def test_other_thresholds_that_change_nothing_say_so(run: RunRecord) -> None:
    other = replace(CONTROL, loss_scale=replace(CONTROL.loss_scale, growth_interval=7))
    assert "under the other thresholds: every decision is the same" in next(verdict(run, other))


def test_other_thresholds_say_where_and_why_they_differ(run: RunRecord) -> None:
    other = replace(CONTROL, batch=replace(CONTROL.batch, rho_low=0.01, rho_high=0.02))
    first, *details = verdict(run, other)
    assert first.startswith("first difference at tick 0 (step 50)")
    assert not any("own configuration" in line for line in details)
    assert any(line.startswith("  batch size: recorded 96, now 32") for line in details)
    assert any("because batch" in line and "rho_high 0.02" in line for line in details)


def test_another_precision_is_named_by_layer(run: RunRecord) -> None:
    other = replace(CONTROL, precision=replace(CONTROL.precision, tau_low=1e-30, tau_high=1e-29))
    lines = list(verdict(run, other))
    assert any(line.endswith("now fp32") and "recorded" in line for line in lines)


def test_another_alpha_differs_in_learning_rates(run: RunRecord) -> None:
    other = replace(CONTROL, curvature=replace(CONTROL.curvature, alpha=0.5))
    assert any("learning rate times" in line for line in verdict(run, other))


def test_a_changed_log_is_noticed(run: RunRecord) -> None:
    tick = run.ticks[5]
    plan = replace(tick.decision.plan, precision=dict.fromkeys(tick.decision.plan.precision, Precision.FP32))
    forged = replace(tick, decision=replace(tick.decision, plan=plan))
    lines = list(verdict(replace(run, ticks=(*run.ticks[:5], forged, *run.ticks[6:])), CONTROL))
    assert lines[0].startswith("first difference at tick 5")
    assert "written by another version, or was changed" in lines[1]


def test_a_run_without_ticks_cannot_be_replayed(run: RunRecord) -> None:
    with pytest.raises(LogError, match=r"run run made no tick: method triaccel .* shorter than 50 steps"):
        list(verdict(replace(run, ticks=()), CONTROL))


def reasons_of(ticks: tuple[Tick, ...]) -> int:
    return sum(len(tick.decision.reasons) for tick in ticks)


def test_reasons_are_listed_oldest_first_and_cut(run: RunRecord) -> None:
    total = reasons_of(run.ticks)
    assert total > 3
    grid = reasons_grid(run, most=3)
    assert len(grid.rows) == 3
    assert grid.note == f"{total - 3} more; --reasons {total} shows all"
    whole = reasons_grid(run, most=total)
    assert (len(whole.rows), whole.note) == (total, "")
    steps = [int(row[0]) for row in whole.rows]
    assert steps == sorted(steps)


def test_no_reasons_are_shown_on_request(run: RunRecord) -> None:
    assert list(reasons_grid(run, most=0).rows) == []


def test_a_negative_number_of_reasons_is_refused(run: RunRecord) -> None:
    with pytest.raises(ValueError, match="reasons = -1: must be"):
        reasons_grid(run, most=-1)


def test_a_search_is_no_run_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = tmp_path / "hunt" / "trials" / "one"
    trial.mkdir(parents=True)
    (trial / "events.jsonl").write_text("")
    (tmp_path / "hunt" / "search.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["replay", "hunt", "--storage-path", str(tmp_path)])
    assert ended.value.code == 2
    assert "holds many runs; name one of them, such as hunt/trials/one" in capsys.readouterr().err.replace("\n", " ")
