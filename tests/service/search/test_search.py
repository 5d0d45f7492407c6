"""When a search may stop a trial, and how much memory its trials may take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.service.records import run_of
from triaccel_ray.config import BatchConfig
from triaccel_ray.records.events import End
from triaccel_ray.service.runs.objective import grace_epochs
from triaccel_ray.service.runs.runs import cpus_of_a_run
from triaccel_ray.service.search.search import MIN_HEADROOM_BYTES, _headroom_bytes, _Pruner


@pytest.mark.parametrize(("num_epochs", "grace"), [(1, 1), (2, 2), (5, 2), (8, 4), (12, 6), (20, 10)])
def test_no_trial_is_stopped_before_half_of_its_epochs(num_epochs: int, grace: int) -> None:
    assert grace_epochs(num_epochs) == grace


def told(pruner: _Pruner, name: str, epoch: int, objective: float, *, hopeless: bool = False) -> str:
    trial: Any = SimpleNamespace(trial_id=name, status="RUNNING", is_finished=lambda: False)
    if name not in pruner._trial_info:
        pruner._trial_info[name] = pruner._brackets[0]
    result = {"epoch": epoch, "objective": objective, "hopeless": hopeless}
    return pruner.on_trial_result(None, trial, result)


def test_a_trial_out_of_reach_is_stopped_though_it_is_the_first_at_its_rung() -> None:
    pruner = _Pruner(time_attr="epoch", metric="objective", mode="max", max_t=12, grace_period=6, reduction_factor=3)
    assert told(pruner, "short of the margin by chance", 6, -0.5) == pruner.CONTINUE
    assert told(pruner, "lost", 6, -8.7, hopeless=True) == pruner.STOP
    assert told(pruner, "good", 6, 700.0) == pruner.CONTINUE
    assert told(pruner, "worse", 6, 100.0) == pruner.STOP


def test_the_headroom_is_what_the_largest_batch_takes_by_the_probes_measure() -> None:
    run = run_of("probe")
    base = replace(run.spec, control=replace(run.spec.control, batch=BatchConfig(start=64, minimum=32, maximum=256)))
    peak = run.epochs[-1].peak_bytes
    ended = replace(run, end=End(status="finished", results={"idle_gb": (peak - 100e6) / 1e9}))
    assert _headroom_bytes(base, ended) == pytest.approx(400e6, rel=1e-3)
    idle = replace(run, end=End(status="finished", results={"idle_gb": peak / 1e9}))
    assert _headroom_bytes(base, idle) == MIN_HEADROOM_BYTES


def test_a_run_reserves_a_cpu_and_the_user_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpus_of_a_run(1.0) == cpus_of_a_run(0.25) == 1
    monkeypatch.setenv("TRIACCEL_CPUS_PER_RUN", "3")
    assert cpus_of_a_run(0.0) == cpus_of_a_run(1.0) == 3
    for given in ("0", "-1", "two", ""):
        monkeypatch.setenv("TRIACCEL_CPUS_PER_RUN", given)
        with pytest.raises(ValueError, match=r"TRIACCEL_CPUS_PER_RUN = .*must be a whole number of at least 1"):
            cpus_of_a_run(1.0)
