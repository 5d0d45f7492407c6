from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from search_spaces.found import Found, Result, found
from trainables.registry import TASKS
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig

KEPT = [name for name in TASKS if files("search_spaces").joinpath("results", f"{name}.json").is_file()]


@pytest.mark.parametrize("name", KEPT)
def test_a_task_uses_what_was_found_for_it(name: str) -> None:
    kept, task = found(name), TASKS[name]
    assert kept.task == name
    assert kept.onto(task.control) == task.control
    assert kept.command.startswith(f"triaccel search {name} ")
    assert 0 < kept.num_finished <= kept.num_trials
    assert kept.best.score > 0 < kept.amp.score


def test_only_what_was_searched_is_replaced() -> None:
    result = Result(accuracy=90.0, seconds_per_epoch=1.0, peak_gb=1.0, score=90.0)
    kept = Found(
        task="mine",
        command="triaccel search mine",
        date="2026-01-31",
        hardware="a GPU",
        versions={},
        num_trials=8,
        num_finished=3,
        headroom_bytes=None,
        precision={"tau_low": 1e-8, "tau_high": 2e-8},
        batch={"rho_low": 0.1, "rho_high": 0.2, "step_up": 64, "step_down": 32},
        curvature={"alpha": 0.3},
        every_steps=9,
        amp=result,
        best=result,
    )
    before = ControlConfig(
        precision=PrecisionConfig(beta=0.5), batch=BatchConfig(start=64), curvature=CurvatureConfig(tau_curv=7.0)
    )
    after = kept.onto(before)
    assert after == replace(
        before,
        every_steps=9,
        precision=PrecisionConfig(beta=0.5, tau_low=1e-8, tau_high=2e-8),
        batch=BatchConfig(start=64, rho_low=0.1, rho_high=0.2, step_up=64, step_down=32),
        curvature=CurvatureConfig(tau_curv=7.0, alpha=0.3),
    )
    assert replace(kept, every_steps=None).onto(before).every_steps == before.every_steps


def test_a_task_that_was_never_searched() -> None:
    with pytest.raises(FileNotFoundError):
        found("no-such-task")
