"""A comparison's methods by several readings of time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.compare.comparison import READINGS, MethodResults
from triaccel_ray.service.report.tables import Grid, joined


def readings_grid(title: str, rows: Mapping[str, MethodResults], goal: Goal) -> Grid:
    """Returns the score by each reading; a note says whether all have the same leader."""
    by_reading = {
        reading: {name: results.scored_by(reading, goal) for name, results in rows.items()} for reading in READINGS
    }
    by_reading = {reading: scored for reading, scored in by_reading.items() if best_of(scored)}
    leaders = {
        reading: best_of(scored)
        for reading, scored in by_reading.items()
        if all(len(scored[name].by_seed) == len(results.by_seed) for name, results in rows.items())
    }
    verdict = ""
    if leaders and sum(bool(results.by_seed) for results in rows.values()) > 1:
        verdict = f"{next(iter(leaders.values()))} leads by every reading"
        if len(set(leaders.values())) > 1:
            all_leaders = ", ".join(f"{name} by {reading}" for reading, name in leaders.items())
            verdict = f"the readings disagree: {all_leaders}"
    return Grid(
        title=title,
        header=("method", *by_reading),
        rows=[[name, *(mean_and_deviation(scored[name], "score") for scored in by_reading.values())] for name in rows],
        note=joined("whole run s: of all epochs, compilation and adaptation included", verdict),
    )


def best_of(rows: Mapping[str, MethodResults]) -> str:
    """Returns the name of the row with the best mean score; empty if none has it.

    A row with fewer finished seeds than another, or with runs that lack the score, is not considered.
    """
    most = max((len(results.by_seed) for results in rows.values()), default=0)
    means = {name: results.mean("score") for name, results in rows.items() if len(results.by_seed) == most}
    known = [name for name, mean in means.items() if not math.isnan(mean)]
    return max(known, key=means.__getitem__, default="")


def mean_and_deviation(results: MethodResults, figure: str) -> str:
    """Returns mean ± standard deviation over seeds as text; empty without a mean."""
    mean, deviation = results.mean(figure), results.deviation(figure)
    if math.isnan(mean):
        return ""
    text = f"{mean:.0f}" if abs(mean) >= 10_000 else f"{mean:.4g}"  # no exponents in either number
    if math.isnan(deviation):
        return text
    return f"{text} ± {deviation:.0f}" if deviation >= 100 else f"{text} ± {Decimal(f'{deviation:.2g}'):f}"
