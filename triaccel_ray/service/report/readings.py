"""A comparison's methods by several readings of time, memory and energy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.compare.comparison import READINGS, MethodResults
from triaccel_ray.service.report.tables import TO_TARGET, TextTable, lines
from triaccel_ray.service.runs.record import JOULES


def readings_table(title: str, rows: Mapping[str, MethodResults], goal: Goal, target: float | None = None) -> TextTable:
    """Returns the score by each reading and the costs to the target; a note says whether all have the same leader."""
    by_reading = {
        reading: {name: results.scored_by(reading, goal) for name, results in rows.items()} for reading in READINGS
    }
    by_reading = {reading: scored for reading, scored in by_reading.items() if best_of(scored)}
    compared: dict[str, tuple[Mapping[str, MethodResults], str]] = {
        reading: (scored, "score")
        for reading, scored in by_reading.items()
        if all(len(scored[name].by_seed) == len(results.by_seed) for name, results in rows.items())
    }
    costs = {} if target is None else dict(TO_TARGET)
    if {JOULES in figures for results in rows.values() for figures in results.by_seed.values()} != {True}:
        costs.pop("joules_to_target", None)
    compared |= {costs[figure]: (rows, figure) for figure in costs if best_of(rows, figure, minimize=True)}
    num_finished = sum(bool(results.by_seed) for results in rows.values())
    return TextTable(
        title=title if target is None else f"{title}, and costs to the target",
        header=("method", *by_reading, *costs.values()),
        rows=[
            [
                name,
                *(mean_and_deviation(by_reading[each][name], "score") for each in by_reading),
                *(_cost(results, figure) for figure in costs),
            ]
            for name, results in rows.items()
        ],
        note=lines(
            "whole run s: of all epochs, compilation and adaptation included",
            "" if target is None else f"target: the first epoch with validation {goal.named(target)} or better",
            _verdict(compared) if num_finished > 1 else "",
        ),
    )


def _verdict(compared: Mapping[str, tuple[Mapping[str, MethodResults], str]]) -> str:
    """Returns which method leads, of reading -> rows and figure, and which ones are as good."""
    leaders = {
        reading: best_of(rows, figure, minimize=figure != "score") for reading, (rows, figure) in compared.items()
    }
    if not leaders:
        return ""
    leader, tables = next(iter(leaders.values())), list(compared.values())
    num_runs = {name: len(results.by_seed) for name, results in tables[0][0].items()}
    equals = [
        name
        for name, number in num_runs.items()
        if name != leader and number == num_runs[leader] and all(_is_near(leader, name, *each) for each in tables)
    ]
    if not set(leaders.values()) <= {leader, *equals}:
        return "the readings disagree: " + ", ".join(f"{name} by {reading}" for reading, name in leaders.items())
    if len(set(leaders.values())) > 1:
        return f"as good by every reading, within the standard deviations: {', '.join([leader, *equals])}"
    tail = f"; as good within the standard deviations: {', '.join(equals)}" if equals else ""
    return f"{leader} leads by every reading{tail}"


def _is_near(name: str, other: str, rows: Mapping[str, MethodResults], figure: str) -> bool:
    """Returns whether two means differ by at most the sum of their standard deviations; False with a single seed."""
    spread = rows[name].deviation(figure) + rows[other].deviation(figure)
    return abs(rows[name].mean(figure) - rows[other].mean(figure)) <= spread


def _cost(results: MethodResults, figure: str) -> str:
    """Returns mean ± standard deviation of a cost to the target; how many runs reached it if not all did."""
    num_reached, num_runs = len(results.values(figure)), len(results.by_seed)
    if num_reached == num_runs:
        return mean_and_deviation(results, figure)
    return f"reached by {num_reached} of {num_runs}" if num_reached else "not reached"


def best_of(rows: Mapping[str, MethodResults], figure: str = "score", *, minimize: bool = False) -> str:
    """Returns the name of the row with the best mean figure, by default the score; empty if none has it.

    A row with fewer finished seeds than another, or with runs that lack the figure, is not considered.
    """
    max_runs = max((len(results.by_seed) for results in rows.values()), default=0)
    means = {name: results.mean(figure) for name, results in rows.items() if len(results.by_seed) == max_runs}
    known = [name for name, mean in means.items() if not math.isnan(mean)]
    return (min if minimize else max)(known, key=means.__getitem__, default="")


def mean_and_deviation(results: MethodResults, figure: str) -> str:
    """Returns mean ± standard deviation over seeds as text; empty without a mean."""
    mean, deviation = results.mean(figure), results.deviation(figure)
    if math.isnan(mean):
        return ""
    text = f"{mean:.0f}" if abs(mean) >= 10_000 else f"{mean:.4g}"  # no exponents in either number
    if math.isnan(deviation):
        return text
    return f"{text} ± {deviation:.0f}" if deviation >= 100 else f"{text} ± {Decimal(f'{deviation:.2g}'):f}"
