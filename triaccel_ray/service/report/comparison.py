"""Report of a comparison: both of the paper's tables, the score by each reading, differences, and the HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise

from triaccel_ray.measure.score import quality_text
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import command_for
from triaccel_ray.service.compare.comparison import READINGS, REFERENCE, ComparisonRecord, MethodResults, final_runs
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.provenance import about, sharing_note, troubles
from triaccel_ray.service.report.report import View, with_page
from triaccel_ray.service.report.tables import VIEWS_NOTE, TextTable, lines, result_headings
from triaccel_ray.service.runs.methods import FIXED, METHODS
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import JOULES, ONE_VIEW

MIN_PAIRS = 3
"""Fewest pairs for a confidence interval: two differences leave a single degree of freedom."""
LEVEL = 0.95
"""Level at which the intervals of a figure hold for all rows together."""


def view_comparison(record: ComparisonRecord) -> View:
    """Returns the view of a comparison, its tables; writes its page."""
    folder, spec, base = record.folder, record.spec, record.spec.base
    advice, command = _advice(record)
    missing = [name for name in final_runs(spec, record.fixed) if name not in record.runs]
    every = {record.label(method): record.results(method) for method in spec.all_methods}
    headings = {**_headings(every, base.goal), **{reading: reading for reading in READINGS}}
    facts = {"seeds": f"{spec.num_seeds}, from 0"}
    facts |= {record.label(method): METHODS[method] for method in spec.all_methods}
    return with_page(
        View(
            folder=folder,
            title=f"{folder.name}: {base.task}",
            parts=[*comparison_tables(record), advice, troubles({**record.trials, **record.runs}, missing)],
            details=[about(base, list(record.runs.values()), facts, command_for("compare --from", folder))],
            rows=means_table("", every, headings).as_dicts(),
            command=command,
            control=base.control,
        )
    )


def _advice(record: ComparisonRecord) -> tuple[str, str]:
    """Returns which method of Table 1 to train with, and the command; empty while there is nothing to compare.

    As in a search, a method that is worse than AMP by more than the margin does not count, however fast it is.
    """
    results = {method: record.results(method) for method in record.spec.table_1}
    num_finished, goal = sum(bool(each.by_seed) for each in results.values()), record.spec.base.goal
    amp = results[REFERENCE].mean(goal.name) if REFERENCE in results else math.nan
    objective = Objective(goal=goal, reference=() if math.isnan(amp) else (amp,))
    margin = f"within {objective.margin_text} of the {goal.words} of AMP"
    among = margin if objective.reference else "though AMP has no result to measure it by"
    best = best_of({name: each for name, each in results.items() if not objective.shortfall(1, each.mean(goal.name))})
    if not best or num_finished < min(2, len(results)):
        return "", ""
    command = command_for("run --from", record.folder / f"{best}-seed{min(results[best].by_seed)}")
    return f"to train with {record.label(best)}, which has the best score, {among}:\n{command}", command


def comparison_tables(record: ComparisonRecord) -> list[TextTable]:
    """Returns the comparison's tables in reading order, without empty ones."""
    spec, base, goal = record.spec, record.spec.base, record.spec.base.goal
    table_1 = {record.label(method): record.results(method) for method in spec.table_1}
    table_2 = {row: record.results(method) for method, row in ABLATION.items()} if spec.ablation else {}
    shared, amp = sharing_note(base), table_1.get(REFERENCE)
    of_target = "" if base.target is None else _target_note(base.target, goal)
    of_fixed = f"{FIXED}: the best score of {spec.num_fixed} on validation samples, within a point of AMP"
    lacks_amp = "" if amp is not None else "AMP is not among the methods: there is nothing to compare with"
    to_amp = [(name, each, amp) for name, each in table_1.items() if amp is not None and each is not amp]
    to_above = [(name, each, above) for (_, above), (name, each) in pairwise(table_2.items())]
    note = lines(shared, of_target, of_fixed if spec.num_fixed else "", lacks_amp)
    tables = (
        values_table("Table 1, test samples, read once by each run", table_1, goal, note=note),
        readings_table("Table 1, the score by each reading of time and memory", table_1),
        differences_table("Table 1, differences to AMP", to_amp, goal),
        values_table("Table 2, the ablation", table_2, goal, note=lines(shared, of_target)),
        differences_table("Table 2, differences to the row above", to_above, goal),
    )
    return [table for table in tables if table.rows]


def _target_note(target: float, goal: Goal) -> str:
    reached = f"to target: until the first epoch with validation {goal.named(target)} or better; empty: not reached"
    return lines("trained without the validation samples, which judged each epoch", reached)


def values_table(title: str, rows: Mapping[str, MethodResults], goal: Goal, *, note: str = "") -> TextTable:
    """Returns a table of all measured figures, a row per name in `rows`, with `note` below."""
    headings = _headings(rows, goal)
    return means_table(
        title,
        rows,
        headings,
        lines(
            "mean ± standard deviation over seeds",
            "s/epoch: mean of the last five epochs, without the first of the run",
            f"score = {quality_text(goal)} / (s/epoch x process peak GB)",
            VIEWS_NOTE if f"{ONE_VIEW}{goal.name}" in headings else "",
            "J: energy of the GPU in training" if JOULES in headings else "",
            note,
        ),
    )


def readings_table(title: str, rows: Mapping[str, MethodResults]) -> TextTable:
    """Returns the score by each reading of time and memory; a note says whether all have the same leader."""
    leaders = {reading: name for reading in READINGS if (name := best_of(rows, reading))}
    means, note = set(leaders.values()), "whole run s: of all epochs, compilation and adaptation included"
    if len(means) == 1 < sum(bool(each.by_seed) for each in rows.values()):
        note = lines(note, f"{means.pop()} has the best mean by every reading")
    elif len(means) > 1:
        best = ", ".join(f"{name} by {reading}" for reading, name in leaders.items())
        note = lines(note, f"the readings disagree on the best mean: {best}")
    return means_table(title, rows, dict(zip(leaders, leaders, strict=True)), note)


def means_table(
    title: str, rows: Mapping[str, MethodResults], headings: Mapping[str, str], note: str = ""
) -> TextTable:
    """Returns a table of means and standard deviations over seeds, of the figures in `headings`."""
    return TextTable(
        title=title,
        header=("method", "runs", *headings.values()),
        rows=[
            [name, str(len(results.by_seed)), *(mean_and_deviation(results, figure) for figure in headings)]
            for name, results in rows.items()
        ],
        note=note,
        droppable=[*headings.values()][:0:-1],
    )


def best_of(rows: Mapping[str, MethodResults], figure: str = "score") -> str:
    """Returns the name of the row with the largest mean figure, by default the score; empty if none has it.

    A row with fewer finished seeds than another, or with runs that lack the figure, is not considered.
    """
    max_runs = max((len(results.by_seed) for results in rows.values()), default=0)
    means = {name: results.mean(figure) for name, results in rows.items() if len(results.by_seed) == max_runs}
    return max((name for name, mean in means.items() if not math.isnan(mean)), key=means.__getitem__, default="")


def mean_and_deviation(results: MethodResults, figure: str) -> str:
    """Returns mean ± standard deviation over seeds as text; if not all runs have the figure, how many do."""
    num_known, mean, deviation = len(results.values(figure)), results.mean(figure), results.deviation(figure)
    if math.isnan(mean):
        return f"in {num_known} of {len(results.by_seed)}" if num_known else ""
    text = f"{mean:.0f}" if abs(mean) >= 10_000 else f"{mean:.4g}"  # no exponents in either number
    if math.isnan(deviation):
        return text
    return f"{text} ± {deviation:.0f}" if deviation >= 100 else f"{text} ± {Decimal(f'{deviation:.2g}'):f}"


def differences_table(title: str, pairs: Sequence[tuple[str, MethodResults, MethodResults]], goal: Goal) -> TextTable:
    """Returns a table of differences, first results minus second, paired by seed, with their confidence intervals.

    Intervals are those of Student's t distribution, corrected for the number of rows (Bonferroni). Rows without a pair
    are left out.
    """
    compared = {f"{row} {side}": each for row, *both in pairs for side, each in enumerate(both)}
    headings, rows = _headings(compared, goal), []
    for row, one, other in pairs:
        for name, heading in headings.items():
            differences = paired_differences(one.values(name), other.values(name))
            # Seeds that reach a target say nothing of those that do not.
            if not differences or math.isnan(one.mean(name) + other.mean(name)):
                continue
            mean = statistics.fmean(differences)
            rows.append(
                [row, heading, _signed(mean), _percent(mean, other.mean(name)), _interval(differences, len(pairs))]
            )
    note = f"paired by seed; intervals need {MIN_PAIRS} seeds, and those of a figure hold together with {LEVEL:.0%}"
    header = ("method", "figure", "difference", "%", f"{LEVEL:.0%} interval, corrected")
    return TextTable(title=title, header=header, rows=rows, note=note)


def paired_differences(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Returns the differences `values - reference` over the seeds that both have, without those of rounding."""
    pairs = [(values[seed], reference[seed]) for seed in sorted(values.keys() & reference.keys())]
    return [0.0 if math.isclose(one, other, rel_tol=1e-12) else one - other for one, other in pairs]


def _interval(differences: Sequence[float], num_rows: int) -> str:
    """Returns the confidence interval of the mean, one of `num_rows`; empty with fewer than MIN_PAIRS differences."""
    count = len(differences)
    if count < MIN_PAIRS:
        return ""
    from scipy import stats  # here: the import takes most of a second, which other commands save

    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(count)
    half = error * float(stats.t.ppf(1 - (1 - LEVEL) / (2 * num_rows), count - 1))
    return f"{_signed(mean - half)} to {_signed(mean + half)}"


def _headings(rows: Mapping[str, MethodResults], goal: Goal) -> dict[str, str]:
    """Returns column headings by figure; not of figures that are zero everywhere, as the allocator's peak on a CPU."""
    measured = (pair for results in rows.values() for figures in results.by_seed.values() for pair in figures.items())
    names = dict.fromkeys(name for name, value in measured if value and name not in READINGS)
    return result_headings(names, goal, prefix="test ")


def _percent(difference: float, reference: float) -> str:
    if reference <= 0.0:
        return ""  # a share of a negative number means nothing
    percent = round(100 * difference / reference, 1)
    return f"{percent:+.1f}" if percent else "0"


def _signed(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:+.0f}" if abs(value) >= 1000 else f"{value:+.3g}"
