"""What training costs until a target is reached, and what a run with a target trains on."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.records import FINAL_SPEC, run_of
from tests.service.worker_factory import Begin, records, train
from triaccel_ray.records.events import End, Epoch
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.compare.comparison import ComparisonRecord, MethodResults, final_runs
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.report.comparison import comparison_tables
from triaccel_ray.service.report.provenance import run_notes
from triaccel_ray.service.report.readings import readings_table
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.trainables.task import Purpose

BOTH = {"seconds": 20.0, "joules": 1000.0}
PERPLEXITY = Goal(name="perplexity", maximize=False, unit="")


def judged(*values: float, target: float | None, goal: Goal | None = None, joules: float | None = 500.0) -> RunRecord:
    """A run whose epochs of 10 s, each of `joules`, have these validation metrics."""
    goal = goal or Goal()
    run = run_of("judged", num_epochs=len(values))
    epochs = tuple(
        replace(epoch, held_out_metrics={goal.name: value}, joules=None if joules is None else joules * epoch.epoch)
        for epoch, value in zip(run.epochs, values, strict=True)
    )
    spec = replace(FINAL_SPEC, target=target, goal=goal)
    return replace(run, epochs=epochs, spec=spec, start=replace(run.start, goal=goal))


@pytest.mark.parametrize(
    ("run", "costs", "note"),
    [
        (judged(80.0, 94.0, 93.0, target=94.0), BOTH, "20 s to target, 1000 J to target"),
        (judged(80.0, 94.0, target=94.0, joules=None), {"seconds": 20.0}, "20 s to target"),
        (judged(80.0, 93.99, target=94.0), {}, "not reached"),
        (judged(9.0, 7.5, 7.0, target=7.5, goal=PERPLEXITY), BOTH, "20 s to target"),
        (judged(9.0, 7.6, target=7.5, goal=PERPLEXITY), {}, "not reached"),
        (judged(math.nan, target=0.0), {}, "not reached"),
        (judged(99.0, target=None), {}, None),
    ],
)
def test_a_target_is_reached_in_the_first_epoch_that_is_as_good(
    run: RunRecord, costs: dict[str, float], note: str | None
) -> None:
    assert run.to_target == {f"{name}_to_target": value for name, value in costs.items()}
    found = [line for line in run_notes(run) if line.startswith("target")]
    assert len(found) == (note is not None)
    assert note is None or note in found[0]


def test_a_final_run_with_a_target_is_judged_on_validation_samples_and_reads_the_test_set_once(
    start: Begin, module: str, tmp_path: Path
) -> None:
    worker = start(method="fp32", purpose=Purpose.FINAL, target=50.0)
    reads = sys.modules[module].READS
    assert {purpose for purpose, _ in reads} == {"search"}  # tried beforehand
    reads.clear()
    train(worker)
    assert sorted(reads) == sorted([("search", index) for index in range(50)] * 3)
    assert all(each.held_out(Goal()) is not None for each in records(tmp_path) if isinstance(each, Epoch))
    reads.clear()
    results = worker.finish()
    assert sorted(reads) == [("final", index) for index in range(50)]
    assert 0.0 <= results["accuracy"] <= 100.0


def costs(method: str, *figures: tuple[float, float] | None) -> MethodResults:
    """Results of seeds 0, 1, ...: seconds and joules to the target, None where it was not reached."""
    by_seed = {
        seed: {"joules": 9e3, "score": 1.0}
        | ({} if each is None else {"seconds_to_target": each[0], "joules_to_target": each[1]})
        for seed, each in enumerate(figures)
    }
    return MethodResults(method=method, by_seed=by_seed)


def test_the_costs_stand_beside_the_scores_and_take_part_in_the_verdict() -> None:
    rows = {
        "fp32": costs("fp32", None, None),
        "amp": costs("amp", (3.0, 100.0), (5.0, 100.0)),
        "engine-amp": costs("engine-amp", (1.0, 50.0), None),  # the least, of the seed that reached it
        "triaccel": costs("triaccel", (2.0, 200.0), (2.0, 200.0)),
        "fixed": costs("fixed"),
    }
    table = readings_table("", rows, Goal(), 94.0)
    assert list(table.header) == ["method", "s to target", "J to target"]
    assert [list(row[1:]) for row in table.rows] == [
        ["not reached", "not reached"],
        ["4 ± 1.4", "100 ± 0"],
        ["reached by 1 of 2", "reached by 1 of 2"],
        ["2 ± 0", "200 ± 0"],
        ["", ""],
    ]
    assert "target: the first epoch with validation accuracy 94.00 % or better" in table.note
    assert table.note.endswith("the readings disagree: triaccel by s to target, amp by J to target")
    seed = {**rows["amp"].by_seed[0], "joules": 9e3}
    del seed["joules"]
    partly = readings_table("", {**rows, "amp": replace(rows["amp"], by_seed={0: seed})}, Goal(), 94.0)
    assert list(partly.header) == ["method", "s to target"]  # energy that one run lacks is compared nowhere
    assert list(readings_table("", rows, Goal()).header) == ["method"]


def test_a_comparison_with_a_target_says_what_its_runs_trained_on(tmp_path: Path) -> None:
    spec = ComparisonSpec(base=replace(FINAL_SPEC, target=94.0), methods=("amp", "triaccel", "fp32"), num_seeds=3)
    results = {"accuracy": 93.0, "score": 1.0, "seconds_per_epoch": 10.0, "peak_gb": 1.0, "allocated_peak_gb": 1.0}
    end = End(status="finished", results={**results, "joules": 1000.0})
    last = {"amp": 95.0, "triaccel": 95.0, "fp32": 94.5}
    runs = {}
    for name, run in final_runs(spec, None).items():
        is_late = name == "fp32-seed2"  # which never gets there
        epochs = judged(90.0, 90.0 if is_late else last[run.method], target=94.0).epochs
        runs[name] = replace(run_of(name), spec=run, epochs=epochs, end=end)
    record = ComparisonRecord(folder=tmp_path, spec=spec, runs=runs)
    main, readings, differences, *_ = comparison_tables(record)
    assert "trained without the validation samples, which judged each epoch" in main.note
    assert "whole run J" in main.header
    assert "s to target" not in main.header
    assert readings.title.endswith("and costs to the target")
    assert [row[-2:] for row in readings.rows][2] == ["reached by 2 of 3", "reached by 2 of 3"]
    compared = {(row[0], row[1]) for row in differences.rows}
    assert ("triaccel", "J to target") in compared
    assert ("triaccel", "whole run J") in compared
    assert ("fp32", "J to target") not in compared  # of the seeds that reached it alone
    assert "nan" not in str(differences.rows)
    old = replace(record, runs={name: replace(run, epochs=()) for name, run in runs.items()})
    assert "not reached" in str(comparison_tables(old)[1].rows)
