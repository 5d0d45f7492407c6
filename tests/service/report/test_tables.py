from __future__ import annotations

from dataclasses import replace

from tests.service.records import RUN_SPEC, run_of, search_of
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.tables import Grid, result_grid, run_grid, search_grid
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.search.search import best_trial, ranked


def test_markdown() -> None:
    grid = Grid(header=("a", "b"), rows=[("1", "2"), ("3", "4")], note="said below")
    assert grid.markdown().splitlines() == ["| a | b |", "|---|---|", "| 1 | 2 |", "| 3 | 4 |", "", "said below"]
    assert Grid(header=("a",), rows=[]).markdown() == "| a |\n|---|\n"


def test_a_search_lists_baselines_then_trials_best_first() -> None:
    objective = Objective(name="accuracy", reference=(90.0, 90.0))
    trials = (run_of("bad", accuracy=80.0), run_of("good", accuracy=91.0), run_of("best", accuracy=92.0))
    grid = search_grid(search_of(*trials, objective=objective))
    assert [row[0] for row in grid.rows] == ["FP32", "AMP", "best", "good", "bad"]
    assert {len(row) for row in grid.rows} == {len(grid.header)}
    assert [row[7] for row in grid.rows] == ["90.00", "90.00", "92.00", "91.00", "80.00 *"]
    assert "at least 89.00 % (AMP 90.00 %, margin 1 points)" in grid.note


def test_baselines_have_no_thresholds_and_trials_have() -> None:
    grid = search_grid(search_of(run_of("trial")))
    assert list(grid.rows[0][2:6]) == [""] * 4
    assert list(grid.rows[-1][2:6]) == ["3.00e-07", "2.00e-05", "0.600", "0.850"]
    assert list(grid.rows[-1][6:]) == ["2 of 30", "90.00", "10.000", "0.500", "18.00"]
    assert grid.header[6] == "at epoch"
    assert grid.note == "figures are those of the epoch named beside them"


def test_a_search_on_shared_gpus_says_so() -> None:
    record = search_of(run_of("trial"))
    shared = replace(record, spec=replace(record.spec, base=replace(RUN_SPEC, trials_per_gpu=2)))
    assert "GPUs shared by 2 runs each" in search_grid(shared).note


def test_trials_without_figures_are_listed_too() -> None:
    grid = search_grid(search_of(run_of("diverged", num_epochs=0, status="failed"), run_of("fine")))
    assert [row[:2] for row in map(list, grid.rows[-2:])] == [["fine", "finished"], ["diverged", "failed (non_finite)"]]
    assert {len(row) for row in grid.rows} == {len(grid.header)}


def test_finished_trials_come_before_stopped_ones() -> None:
    objective = Objective(name="accuracy", reference=(90.0, 90.0))
    stopped = run_of("stopped", accuracy=99.0, num_epochs=1, status="stopped")
    record = search_of(stopped, run_of("whole", accuracy=91.0), objective=objective)
    assert [run.name for _, run in ranked(record)] == ["whole", "stopped"]
    best = best_trial(record)
    assert best is not None
    assert best.name == "whole"
    grid = search_grid(record)
    assert [row[0] for row in grid.rows[2:]] == ["whole", "stopped"]
    assert grid.rows[-1][6] == "1 of 30"
    assert "stopped: pruned before its last epoch" in grid.note


def test_without_a_feasible_finished_trial_there_is_no_best() -> None:
    objective = Objective(reference=(90.0, 90.0))
    bad, stopped = run_of("bad", accuracy=50.0), run_of("stopped", num_epochs=1, status="stopped")
    assert best_trial(search_of(bad, stopped, objective=objective)) is None
    assert best_trial(search_of()) is None


def test_a_run_has_a_row_an_epoch() -> None:
    run = run_of("run", num_epochs=3)
    blind = replace(run.epochs[0], held_out_metrics={}, score=None)
    grid = run_grid(replace(run, epochs=(blind, *run.epochs[1:])))
    assert [row[0] for row in grid.rows] == ["1", "2", "3"]
    assert [row[2] for row in grid.rows] == ["", "90.00", "90.00"]
    assert grid.rows[0][8] == ""
    assert {len(row) for row in grid.rows} == {len(grid.header)}


def test_results_have_four_digits() -> None:
    results = {"accuracy": 98.7654, "seconds_per_epoch": 0.123456, "peak_gb": 1.0, "allocated_peak_gb": 0.5}
    grid = result_grid({**results, "score": 1234.5, "idle_gb": 0.4}, Goal())
    assert list(grid.rows[0]) == ["98.77", "0.1235", "1", "0.5", "1234"]
    assert len(grid.header) == 5
    grid = result_grid({**results, "one_view_accuracy": 98.1}, Goal())
    assert (grid.header[-1], grid.rows[0][-1]) == ("by one view %", "98.1")


def test_a_table_can_be_had_as_numbers() -> None:
    cells = ["amp", "94.2 ± 0.15", "1,234", "47.27 *", "", "inf", "1.5e-07", "-3", "2 of 3"]
    (row,) = Grid(header=[str(place) for place in range(len(cells))], rows=[cells]).as_dicts()
    inf = float("inf")
    assert list(row.items()) == [
        *(("0", "amp"), ("1", 94.2), ("1 ±", 0.15), ("2", 1234), ("3", 47.27)),
        *(("4", None), ("5", inf), ("6", 1.5e-07), ("7", -3), ("8", "2 of 3")),
    ]
    assert type(row["2"]) is int
