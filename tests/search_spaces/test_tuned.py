from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.search_spaces.tuned import tuned_thresholds
from triaccel_ray.trainables.registry import TASKS, load_task

KEPT = [name for name in TASKS if files("triaccel_ray.search_spaces").joinpath("results", f"{name}.json").is_file()]


@pytest.mark.parametrize("name", KEPT)
def test_a_task_uses_what_was_found_for_it(name: str) -> None:
    kept, task = tuned_thresholds(name), load_task(name, None)
    assert kept.task == name
    has_constant_batch = task.control.batch.maximum == task.control.batch.start
    if has_constant_batch:
        assert task.control.batch == BatchConfig(maximum=task.control.batch.start)
    found = replace(kept, batch={}) if has_constant_batch else kept
    assert found.onto(task.control) == task.control
    assert kept.command.startswith(f"triaccel search {name} ")
    assert 0 < kept.num_finished <= kept.num_trials
    assert kept.best.score > 0 < kept.amp.score


def test_only_what_was_searched_is_replaced() -> None:
    found = {"precision": {"tau_low": 1e-8}, "batch": {"rho_low": 0.1, "step_up": 64}, "curvature": {"alpha": 0.3}}
    kept = replace(tuned_thresholds("digits"), every_steps=None, **found)  # type: ignore[arg-type]
    before = ControlConfig(
        precision=PrecisionConfig(beta=0.5), batch=BatchConfig(start=64), curvature=CurvatureConfig(tau_curv=7.0)
    )
    after = kept.onto(before)
    assert after == replace(
        before,
        precision=PrecisionConfig(beta=0.5, tau_low=1e-8),
        batch=BatchConfig(start=64, rho_low=0.1, step_up=64),
        curvature=CurvatureConfig(tau_curv=7.0, alpha=0.3),
    )
    assert replace(kept, every_steps=9).onto(before) == replace(after, every_steps=9)


def test_a_file_with_wrong_keys_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = json.loads(files("triaccel_ray.search_spaces").joinpath("results", "digits.json").read_text())
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "digits.json").write_text(json.dumps({**kept, "color": "red"}))
    monkeypatch.setattr("triaccel_ray.search_spaces.tuned.files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=r"results/digits.json .*\['color'\]: must be only the fields"):
        tuned_thresholds("digits")
    with pytest.raises(FileNotFoundError):
        tuned_thresholds("no-such-task")
