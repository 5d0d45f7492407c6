import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build import CONFIG, blobs, cross_entropy, mlp
from tests.service.build import CONTROL, SimulatedRun
from tests.service.records import run_of
from tests.service.terminal import typed
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.events import EventLog, LogError
from triaccel_ray.records.plan import Precision, Reason, ReasonCode, Storage
from triaccel_ray.service.commands.replay import reasons_table, verdict
from triaccel_ray.service.runs.record import RunRecord


@pytest.fixture(scope="module")
def run() -> RunRecord:
    made = SimulatedRun(Path("run"))
    return replace(run_of("run"), ticks=tuple(made.make_tick() for _ in range(40)), epochs=())


def with_decision(run: RunRecord, **changes: Any) -> RunRecord:
    """The run with another decision at tick 5."""
    tick = run.ticks[5]
    changed = replace(tick, decision=replace(tick.decision, **changes))
    return replace(run, ticks=(*run.ticks[:5], changed, *run.ticks[6:]))


def train_an_epoch(folder: Path, config: ControlConfig, **options: int) -> None:
    """Writes a log by a loop of one's own."""
    with contextlib.closing(EventLog(folder / "events.jsonl")) as log:
        optimizer = torch.optim.SGD((model := mlp()).parameters(), lr=0.05)
        loop = ControlLoop(model, optimizer, cross_entropy, blobs(64), config=config, on_tick=log.append, **options)
        loop.train_epoch()
        loop.close()
        loop.close()


def test_the_log_of_a_loop_of_ones_own_is_reported_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train_an_epoch(tmp_path, CONFIG)
    for words in ("report ./", "report events.jsonl", "replay events.jsonl"):
        status, said, errors = typed(capsys, *words.split(), "--storage-path", str(tmp_path))
        assert (status, errors) == (0, "")
        assert "report" not in words or "the full control loop, finished" in said
    assert "replayed under its own configuration: every decision is the same" in said
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "figures" / "precision.png").exists()


def test_the_form_of_the_weights_has_its_reasons_and_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = PrecisionConfig(enabled=False, initial=Precision.BF16, allow_slow_precisions=True)
    config = replace(CONFIG, weights="auto", step_in_backward="auto", clip_norm=1.0, precision=precision)
    train_an_epoch(tmp_path, config, memory_headroom=1)
    status, said, _ = typed(capsys, "replay", str(tmp_path / "events.jsonl"), "--storage-path", str(tmp_path))
    assert (status, said.count("weight_form")) == (0, 2)
    assert "replayed under its own configuration: every decision is the same" in said


def test_other_thresholds_say_where_and_why_they_differ(run: RunRecord) -> None:
    def under(**changes: dict[str, float]) -> list[str]:
        parts = {name: replace(getattr(CONTROL, name), **values) for name, values in changes.items()}
        return list(verdict(run, replace(CONTROL, **parts)))

    (same,) = under(loss_scale={"growth_interval": 7})
    assert "under the other thresholds: every decision is the same" in same
    first, *details = under(batch={"rho_low": 0.01, "rho_high": 0.02})
    assert first.startswith("first difference at tick 0 (step 50)")
    assert not any("own configuration" in line for line in details)
    assert any(line.startswith("  batch_size: recorded 96, now 32") for line in details)
    assert any("because batch" in line and "rho_high 0.02" in line for line in details)
    precise = under(precision={"tau_low": 1e-30, "tau_high": 1e-29})
    assert any(line.endswith("now fp32") and "recorded" in line for line in precise)
    assert any("learning rate times" in line for line in under(curvature={"alpha": 0.5}))


def test_a_changed_log_is_noticed(run: RunRecord) -> None:
    plan = run.ticks[5].decision.plan
    plan = replace(plan, precision=dict.fromkeys(plan.precision, Precision.FP32))
    reason = next(reason for tick in run.ticks for reason in tick.decision.reasons)
    changes: dict[str, dict[str, Any]] = {
        "first difference at tick 5": {"plan": plan},
        "plans are the same, but at tick 5": {"reasons": (reason,)},
    }
    for said, change in changes.items():
        lines = list(verdict(with_decision(run, **change), CONTROL))
        assert lines[0].startswith(said)
        assert "written by another version, or was changed" in lines[1]


def test_a_memory_plan_that_differs_is_told_by_region(run: RunRecord) -> None:
    plan = replace(run.ticks[5].decision.plan, storage={"body": Storage.OFFLOAD}, num_micro_batches=2)
    lines = list(verdict(with_decision(run, plan=plan), CONTROL))
    assert "  storage of body: recorded offload, now the default" in lines
    assert "  num_micro_batches: recorded 2, now 1" in lines


def test_reasons_are_listed_oldest_first_and_cut(run: RunRecord) -> None:
    table, whole = reasons_table(run, max_rows=3), reasons_table(run, max_rows=10**6)
    total = len(whole.rows)
    assert total > 10
    assert (table.rows, table.note) == (whole.rows[:3], f"{total - 3} more; --reasons {total} shows all")
    assert whole.note == ""
    firsts = [int(row[0].partition(" ")[0]) for row in whole.rows]
    assert firsts == sorted(firsts)


def test_a_reason_that_lasts_has_one_row_with_its_first_and_last_step(run: RunRecord) -> None:
    reasons = [Reason(code=ReasonCode.MEMORY_LOW, subject="batch", text=text) for text in ("grows", "waits", "stays")]
    said = ([0, 1], [1], [1, 2], [], [1])
    ticks = [
        replace(
            tick,
            observation=replace(tick.observation, step=10 * index),
            decision=replace(tick.decision, reasons=tuple(reasons[each] for each in chosen)),
        )
        for index, (tick, chosen) in enumerate(zip(run.ticks, said, strict=False))
    ]
    table = reasons_table(replace(run, ticks=tuple(ticks)), max_rows=9)
    rows = [(row[0], row[3]) for row in table.rows]
    assert rows == [("0", "grows"), ("0 to 20", "waits"), ("20", "stays"), ("40", "waits")]


def test_what_holds_no_ticks_cannot_be_replayed(run: RunRecord) -> None:
    said_of = {"triaccel": "it was shorter than 50 steps", "amp": "method amp decides nothing"}
    said_of["tune-batch"] = "method tune-batch decides nothing"
    for method, said in said_of.items():
        without = replace(run, ticks=(), spec=replace(run.spec, method=method))
        with pytest.raises(LogError, match=f"run run made no tick: {said}"):
            list(verdict(without, CONTROL))
