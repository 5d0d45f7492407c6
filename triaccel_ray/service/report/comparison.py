"""Report of a comparison: both of the paper's tables, readings, differences, settings, a figure, and the HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from triaccel_ray.measure.score import quality_text
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import command_for
from triaccel_ray.service.compare.comparison import REFERENCE, ComparisonRecord, MethodResults, final_runs
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.drawing import METHOD_STYLES, Series, metric_against_cost, save
from triaccel_ray.service.report.provenance import about, sharing_note, troubles
from triaccel_ray.service.report.readings import best_of, mean_and_deviation, readings_table
from triaccel_ray.service.report.report import View, with_page
from triaccel_ray.service.report.tables import TO_TARGET, VIEWS_NOTE, TextTable, joined, lines, result_headings
from triaccel_ray.service.runs.objective import Objective, Performance
from triaccel_ray.service.runs.record import JOULES, ONE_VIEW
from triaccel_ray.service.runs.spec import FIXED, METHODS, RunSpec
from triaccel_ray.service.storage.layout import FIGURES
from triaccel_ray.service.units import counted

MIN_PAIRS = 3
"""Fewest pairs for a confidence interval: two differences leave a single degree of freedom."""
LEVEL = 0.95
"""Level at which the intervals of a figure hold for all rows together."""


def label(method: str) -> str:
    """Returns the name of a method's row."""
    return "best fixed" if method == FIXED else method


def view_comparison(record: ComparisonRecord) -> View:
    """Returns the view of a comparison, its tables; writes its figure and page."""
    folder, spec, base = record.folder, record.spec, record.spec.base
    title = f"{folder.name}: {base.task}"
    tables = comparison_tables(record)
    advice, command = _advice(record)
    missing = [name for name in final_runs(spec, record.fixed) if name not in record.runs]
    pictures = []
    if series := [_series(each, base.goal) for each in _results(record, spec.all_methods).values() if each.by_seed]:
        deviation = ", mean ± deviation" if spec.num_seeds > 1 else ""
        subtitle = joined(f"{base.task}, {counted(spec.num_seeds, 'seed')}{deviation}", sharing_note(base))
        figure = metric_against_cost(series, base.goal, subtitle=subtitle, samples="test")
        pictures = [save(figure, folder / FIGURES / f"{base.goal.name}_against_cost.png")]
    methods = [label(name) for name in spec.all_methods]
    facts = {"seed": f"{spec.num_seeds}, from 0", "method": ", ".join(methods)}  # in place of those of the shared spec
    facts |= {f"method {label(name)}": METHODS[name] for name in spec.all_methods}
    return with_page(
        View(
            folder=folder,
            title=title,
            parts=[*tables, advice, troubles({**record.trials, **record.runs}, missing), *pictures],
            details=[about(base, list(record.runs.values()), facts, command_for("compare --from", folder))],
            rows=_rows(record),
            command=command,
            control=base.control,
        )
    )


def _rows(record: ComparisonRecord) -> list[dict[str, Any]]:
    """Returns every method's figures, and its scores and costs by each reading, by heading."""
    base, results = record.spec.base, _results(record, record.spec.all_methods)
    grids = values_table("", results, base.goal), readings_table("", results, base.goal, base.target)
    return [{**values, **readings} for values, readings in zip(*(table.as_dicts() for table in grids), strict=True)]


def _advice(record: ComparisonRecord) -> tuple[str, str]:
    """Returns which method of Table 1 to train with, and the command; empty while there is nothing to compare.

    As in a search, a method that is worse than AMP by more than the margin does not count, however fast it is.
    """
    results = {method: record.results(method) for method in record.spec.table_1}
    num_finished, goal = sum(bool(each.by_seed) for each in results.values()), record.spec.base.goal
    amp = results[REFERENCE].values(goal.name) if REFERENCE in results else {}
    margin = f"within {Objective(goal=goal).margin_text} of the {goal.words} of AMP"
    among = margin if amp else "though AMP has no result to measure it by"
    best = best_of(
        {name: each for name, each in results.items() if _is_within_margin(each.values(goal.name), amp, goal)}
    )
    if not best or num_finished < min(2, len(results)):
        return "", ""
    command = command_for("run --from", record.folder / f"{best}-seed{min(results[best].by_seed)}")
    return f"to train with {label(best)}, which has the best score, {among}:\n{command}", command


def _is_within_margin(values: Mapping[int, float], amp: Mapping[int, float], goal: Goal) -> bool:
    """Returns whether a method's metric is within the margin of AMP's, by the seeds that both have, if any."""
    seeds = values.keys() & amp.keys()
    if not seeds:
        return True
    mean, reference = (statistics.fmean(each[seed] for seed in seeds) for each in (values, amp))
    return not Objective(goal=goal, reference=(reference,)).shortfall(epoch=1, metric=mean)


def _results(record: ComparisonRecord, methods: Iterable[str]) -> dict[str, MethodResults]:
    """Returns the results of `methods` by row name."""
    return {label(method): record.results(method) for method in methods}


def _series(results: MethodResults, goal: Goal) -> Series:
    marker, color = METHOD_STYLES[results.method]
    return Series(
        label=label(results.method),
        points=[_figures(results.mean, goal)],
        spread=_figures(results.deviation, goal) if len(results.by_seed) > 1 else None,
        look={"marker": marker, "color": color, "markersize": 9.0},
    )


def _figures(value: Callable[[str], float], goal: Goal) -> Performance:
    seconds, peak_gb = value("seconds_per_epoch"), value("peak_gb")
    return Performance(metric=value(goal.name), seconds=seconds, peak_gb=peak_gb, score=value("score"))


def comparison_tables(record: ComparisonRecord) -> list[TextTable]:
    """Returns the comparison's tables in reading order, without empty ones."""
    spec, base, goal = record.spec, record.spec.base, record.spec.base.goal
    held_apart = "" if base.target is None else "trained without the validation samples, which judged each epoch"
    shared, table_1 = lines(sharing_note(base), held_apart), _results(record, spec.table_1)
    table_2 = {row: record.results(method) for method, row in ABLATION.items()} if spec.ablation else {}
    amp = table_1.get(REFERENCE)
    note = "" if amp is not None else "AMP is not among the methods: there is nothing to compare with"
    to_amp = [(name, each, amp) for name, each in table_1.items() if amp is not None and each is not amp]
    to_above = [(name, each, above) for (_, above), (name, each) in pairwise(table_2.items())]
    tables = (
        values_table("Table 1, test samples, read once by each run", table_1, goal, note=lines(shared, note)),
        readings_table("Table 1, the score by each reading of time and memory", table_1, goal, base.target),
        differences_table("Table 1, differences to AMP", to_amp, goal),
        values_table("Table 2, the ablation", table_2, goal, note=shared),
        differences_table("Table 2, differences to the row above", to_above, goal),
        settings_table(record),
    )
    return [table for table in tables if table.rows]


def values_table(title: str, rows: Mapping[str, MethodResults], goal: Goal, *, note: str = "") -> TextTable:
    """Returns a table of means and standard deviations over seeds, a row per name in `rows`, with `note` below."""
    headings, one_view = _headings(rows.values(), goal), f"{ONE_VIEW}{goal.name}"
    headings = {name: heading for name, heading in headings.items() if name not in TO_TARGET}  # beside the readings
    num_runs = sum(len(results.by_seed) for results in rows.values())
    num_with_views = sum(len(results.values(one_view)) for results in rows.values())
    mixed = f"only {num_with_views} of {num_runs} runs were judged by several views: not comparable"
    return TextTable(
        title=title,
        header=("method", "runs", *headings.values()),
        rows=[
            [name, str(len(results.by_seed)), *(mean_and_deviation(results, figure) for figure in headings)]
            for name, results in rows.items()
        ],
        note=lines(
            "mean ± standard deviation over seeds",
            "s/epoch: mean of the last five epochs, without the first of the run",
            f"score = {quality_text(goal)} / (s/epoch x process peak GB)",
            mixed if 0 < num_with_views < num_runs else "",
            VIEWS_NOTE if num_with_views else "",
            "J: energy of the GPU in training" if JOULES in headings else "",
            note,
        ),
    )


def differences_table(title: str, pairs: Sequence[tuple[str, MethodResults, MethodResults]], goal: Goal) -> TextTable:
    """Returns a table of differences, first results minus second, paired by seed, with their confidence intervals.

    Intervals are those of Student's t distribution, corrected for the number of rows (Bonferroni).

    Figures that are zero everywhere, such as the allocator's peak on a CPU, are left out; so are rows without a pair.
    """
    compared = [results for _, one, other in pairs for results in (one, other)]
    headings = {}
    for name, heading in _headings(compared, goal).items():
        is_measured = any(value for results in compared for value in results.values(name).values())
        if is_measured and not name.startswith(ONE_VIEW):
            headings[name] = heading
    rows = []
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


def settings_table(record: ComparisonRecord) -> TextTable:
    """Returns a table of the settings that each method trained with; it has no rows until they are chosen."""
    spec, num_trials = record.spec, record.spec.num_fixed
    is_chosen = record.fixed is not None or not num_trials
    specs = final_runs(spec, record.fixed) if is_chosen else {}
    rows = [[label(method), *_settings(specs[f"{method}-seed0"])] for method in spec.all_methods if specs]
    note = f"best fixed: the best score of {num_trials} on validation samples, within a point of AMP"
    header = ("method", "precision", "batch", "lr", "weight decay")
    return TextTable(title="What each method trained with", header=header, rows=rows, note=note if num_trials else "")


def _headings(results: Iterable[MethodResults], goal: Goal) -> dict[str, str]:
    names = dict.fromkeys(name for each in results for figures in each.by_seed.values() for name in figures)
    return result_headings(names, goal, prefix="test ")


def _settings(spec: RunSpec) -> list[str]:
    control, recipe = spec.method_control, spec.recipe
    precision, batch = control.precision.initial.value, f"{control.batch.start}"
    if spec.method == "amp":
        precision = "autocast bf16" if recipe.amp == "bf16" or spec.device == "cpu" else "autocast"
    elif spec.method == "amp-best":
        precision = "autocast, compiled"
    elif control.precision.enabled:
        precision = f"per layer, from {precision}"
    if control.batch.enabled:
        batch = f"{control.batch.minimum} to {control.batch.maximum}, from {batch}"
    return [precision, batch, f"{recipe.lr:.4g}", f"{recipe.weight_decay:.3g}"]


def _percent(difference: float, reference: float) -> str:
    if reference <= 0.0:
        return ""  # a share of a negative number means nothing
    percent = round(100 * difference / reference, 1)
    return f"{percent:+.1f}" if percent else "0"


def _signed(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:+.0f}" if abs(value) >= 1000 else f"{value:+.3g}"
