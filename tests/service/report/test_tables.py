from __future__ import annotations

from dataclasses import replace

from tests.service.records import run_of
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.report.run import result_grid, run_grid
from triaccel_ray.service.report.tables import Grid


def test_markdown() -> None:
    grid = Grid(header=("a", "b"), rows=[("1", "2"), ("3", "4")], note="said below")
    assert grid.markdown().splitlines() == ["| a | b |", "|---|---|", "| 1 | 2 |", "| 3 | 4 |", "", "said below"]
    assert Grid(header=("a",), rows=[]).markdown() == "| a |\n|---|\n"


def test_a_table_can_be_had_as_numbers() -> None:
    cells = ["amp", "94.2 ± 0.15", "1,234", "47.27 *", "", "inf", "1.5e-07", "-3", "2 of 3"]
    (row,) = Grid(header=[str(place) for place in range(len(cells))], rows=[cells]).as_dicts()
    inf = float("inf")
    assert list(row.items()) == [
        *(("0", "amp"), ("1", 94.2), ("1 ±", 0.15), ("2", 1234), ("3", 47.27)),
        *(("4", None), ("5", inf), ("6", 1.5e-07), ("7", -3), ("8", "2 of 3")),
    ]
    assert type(row["2"]) is int


def test_a_run_has_a_row_an_epoch() -> None:
    run = run_of("run", num_epochs=3)
    blind = replace(run.epochs[0], held_out_metrics={}, score=None)
    more = replace(run.epochs[1], held_out_metrics={"accuracy": 90.0, "top_5": 99.0})
    grid = run_grid(replace(run, epochs=(blind, more, run.epochs[2])))
    assert [row[0] for row in grid.rows] == ["1", "2", "3"]
    assert grid.header[2:4] == ("accuracy %", "top 5")
    assert [row[2:4] for row in grid.rows] == [["", ""], ["90.00", "99"], ["90.00", ""]]
    assert grid.rows[0][9] == ""
    assert {len(row) for row in grid.rows} == {len(grid.header)}


def test_results_have_four_digits() -> None:
    results = {"accuracy": 98.7654, "seconds_per_epoch": 0.123456, "peak_gb": 1.0, "allocated_peak_gb": 0.5}
    grid = result_grid({**results, "score": 1234.5, "idle_gb": 0.4}, Goal())
    assert list(grid.rows[0]) == ["98.77", "0.1235", "1", "0.5", "1234"]
    assert len(grid.header) == 5
    grid = result_grid({**results, "one_view_accuracy": 98.1}, Goal())
    assert (grid.header[-1], grid.rows[0][-1]) == ("by one view %", "98.1")
