"""What a search says at its end: to train with its best trial, or with the baseline that is better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.service.records import run_of, search_of
from triaccel_ray.service.report.recommendation import recommendation
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.search.search import SearchRecord

REFERENCE = (90.0, 90.0)


def search(accuracy: float, *, objective: str = "score", peak_bytes: int = 500_000_000) -> SearchRecord:
    """Baselines of 90 %, 10 s and 0.5 GB, hence a score of 18, and one finished trial."""
    run = run_of("trial-000", accuracy=accuracy)
    run = replace(run, epochs=tuple(replace(epoch, peak_bytes=peak_bytes) for epoch in run.epochs))
    return search_of(run, objective=Objective(name=objective, reference=REFERENCE))


def test_a_best_trial_above_the_baselines_is_recommended() -> None:
    record = search(91.0)
    advice = recommendation(record)
    said = "The best trial, trial-000, scores 18.2 (AMP 18, FP32 18). To train with its thresholds (tau_low "
    assert advice.sentence.startswith(said)
    assert advice.sentence.endswith("):")
    assert advice.command == f"triaccel run --from {record.trials[0].folder.absolute()}"
    assert advice.beaten_by == ""


def test_a_best_trial_below_amp_is_not_recommended() -> None:
    record = search(89.5)
    advice = recommendation(record)
    assert advice.sentence == (
        "The best trial, trial-000, scores 17.9, below AMP's 18: on this task and hardware train with AMP."
    )
    assert advice.command == f"triaccel run --from {record.baselines['amp'].folder.absolute()}"
    assert (advice.best, advice.beaten_by) == (record.trials[0], "AMP")


def test_the_better_one_of_the_baselines_is_named() -> None:
    record = search(91.0)
    fast = tuple(replace(epoch, seconds=5.0) for epoch in record.baselines["fp32"].epochs)
    record = replace(record, baselines={**record.baselines, "fp32": replace(record.baselines["fp32"], epochs=fast)})
    assert recommendation(record).beaten_by == "FP32"
    poor = tuple(replace(epoch, held_out_metrics={"accuracy": 80.0}) for epoch in fast)  # beyond the margin
    record = replace(record, baselines={**record.baselines, "fp32": replace(record.baselines["fp32"], epochs=poor)})
    assert recommendation(record).beaten_by == ""


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("accuracy", "reaches 89.50 %, below AMP's 90.00 %"),
        ("memory", "peaks at 0.6 GB, above AMP's 0.5 GB"),
        ("pareto", "scores 14.92, below AMP's 18"),
    ],
)
def test_what_was_maximised_is_what_is_compared(objective: str, said: str) -> None:
    assert said in recommendation(search(89.5, objective=objective, peak_bytes=600_000_000)).sentence


def test_where_nothing_can_be_recommended_the_reason_is_said() -> None:
    advice = recommendation(search(50.0))
    assert (advice.command, advice.best) == ("", None)
    assert "None of the 1 finished trials reaches 89.00 % (AMP with a margin of 1 points)" in advice.sentence
    assert "larger --margin" in advice.sentence
    failed = recommendation(search_of(run_of("trial-000", num_epochs=0, status="failed")))
    assert failed.sentence == "No trial ran to its end (1 failed (non_finite)): give a smaller --lr."
