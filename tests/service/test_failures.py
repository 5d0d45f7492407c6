import pickle
from pathlib import Path

from triaccel_ray.control.errors import BudgetTooSmallError
from triaccel_ray.records.events import End
from triaccel_ray.service.commands.train import _end_record
from triaccel_ray.service.failures import (
    DiskFullError,
    NonFiniteLossError,
    PreemptedError,
    RunFailedError,
    cause_of,
    picklable,
)
from triaccel_ray.service.storage.layout import ERROR


def test_a_run_that_others_wait_for_fails_with_its_own_cause(tmp_path: Path) -> None:
    errors = {"out_of_memory": MemoryError(), "non_finite": NonFiniteLossError("nan"), "disk_full": DiskFullError("x")}
    errors |= {"preempted": PreemptedError("lost"), "bug": ValueError("a mistake")}
    for cause, error in errors.items():
        failure = RunFailedError(tmp_path / "amp", error)
        assert cause_of(failure) == cause_of(error) == cause
        assert str(failure).startswith("amp failed: " if cause == "bug" else f"amp failed ({cause}): ")
        assert ERROR not in str(failure)
        assert failure.__cause__ is error


def test_an_error_about_a_small_budget_keeps_its_type_when_pickled() -> None:
    error = picklable(BudgetTooSmallError("give 2 MiB"))
    assert type(pickle.loads(pickle.dumps(error))) is BudgetTooSmallError


def test_a_search_and_a_comparison_with_failed_runs_have_failed() -> None:
    results = {"score": 1.0}
    assert _end_record([], 3, results) == End(status="finished", results=results)
    failed = _end_record(["trial-001", "trial-002"], 3, results)
    assert (failed.status, failed.cause, failed.results) == ("failed", "runs", results)
    assert failed.message == "2 of 3 runs failed: trial-001, trial-002"
