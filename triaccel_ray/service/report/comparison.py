"""Report of a comparison: the paper's two tables, significance tests, chosen settings, figures, and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from triaccel_ray.measure.score import quality_text
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import repeat_command
from triaccel_ray.service.compare.comparison import (
    REFERENCE,
    REFERENCE_TRIAL,
    Choices,
    Comparison,
    MethodResults,
    final_runs,
)
from triaccel_ray.service.compare.significance import MIN_PAIRS, Difference, holm, paired_difference
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.drawing import METHOD_STYLES, save
from triaccel_ray.service.report.many_runs import Curve, Series, learning_curves, metric_against_cost
from triaccel_ray.service.report.provenance import TROUBLES, about, sharing_note, trouble_lines, troubles
from triaccel_ray.service.report.readings import best_of, mean_and_deviation, readings_grid
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import (
    FIGURE_COLUMNS,
    STAR,
    TO_TARGET,
    VIEWS_NOTE,
    Grid,
    figure_cells,
    joined,
    result_headings,
)
from triaccel_ray.service.runs.methods import FIXED, METHODS
from triaccel_ray.service.runs.objective import Figures, Objective
from triaccel_ray.service.runs.record import JOULES, ONE_VIEW
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage import layout
from triaccel_ray.service.units import counted

COMPARISON_MARKDOWN = "comparison.md"
_NO_METRIC = "The test samples are read once, at the end of each run: on the way there is the training loss alone."
_BY_ROW = "the rows of dynamic batch and dynamic precision have each of them alone, both has no curvature"
_BY_STANDARD = "standard is FP32 as a tutorial writes it: a difference to it holds the engine's cost or gain too"


def label(method: str) -> str:
    """Returns the name of a method's row."""
    return "best fixed" if method == FIXED else method


def view_comparison(record: Comparison) -> View:
    """Returns a comparison's tables; writes them to a Markdown file and, with figures, to the HTML page."""
    folder, spec, title = record.folder, record.spec, f"{record.folder.name}: {record.spec.base.task}"
    tables = comparison_tables(record)
    advice, command = _advice(record)
    missing = [name for name in final_runs(spec, record.choices or Choices()) if name not in record.runs]
    problems = troubles({**record.trials, **record.runs}, missing)
    text = "\n".join(f"## {grid.title}\n\n{grid.markdown()}" for grid in tables)
    layout.write_atomically(folder / COMPARISON_MARKDOWN, f"# {title}\n\n{text}")
    return View(
        folder=folder,
        shown=[
            *(replace(grid, title=f"{folder.name}: {grid.title}") for grid in tables),
            f"{advice}:\n{command}" if command else "",
            trouble_lines(problems),
        ],
        rows=_rows(record),
        page=write_page(folder, title, _sections(record, tables, problems)),
        command=command,
        control=spec.base.control,
    )


def _rows(record: Comparison) -> list[dict[str, Any]]:
    """Returns every method's figures, and its scores and costs by each reading, by heading."""
    base, results = record.spec.base, _results(record, record.spec.all_methods)
    grids = values_grid("", results, base.goal), readings_grid("", results, base.goal, base.target)
    return [{**values, **readings} for values, readings in zip(*(grid.as_dicts() for grid in grids), strict=True)]


def _held_apart(base: RunSpec) -> str:
    return "" if base.target is None else "trained without the validation samples, which judged each epoch"


def _sections(record: Comparison, tables: Sequence[Grid], problems: Mapping[str, str]) -> Iterator[Section]:
    """Yields the sections of the page, and saves their figures."""
    folder, spec, goal = record.folder, record.spec, record.spec.base.goal
    seeds, pictures = counted(spec.num_seeds, "seed"), folder / layout.FIGURES
    subtitle = joined(f"{spec.base.task}, {seeds}", sharing_note(spec.base))
    facts = {"what": f"comparison of {', '.join(map(label, spec.all_methods))}", "seeds": f"{seeds}, from 0"}
    main_table, *other_tables = [Section(title=grid.title, table=replace(grid, title="")) for grid in tables]
    yield about(spec.base, list(record.runs.values()), facts, repeat_command("compare", folder))
    yield Section(title=TROUBLES, facts=problems)
    yield main_table
    if series := [_series(each, goal) for each in _results(record, spec.all_methods).values() if each.by_seed]:
        figure = metric_against_cost(series, goal, subtitle=subtitle, samples="test")
        picture = save(figure, pictures / f"{goal.name}_against_cost.png")
        text = "Bars: standard deviation over seeds."
        yield Section(title=f"{goal.words.capitalize()} against cost", text=text, pictures=[picture])
    if curves := _curves(record):
        picture = save(learning_curves(curves, goal, subtitle=subtitle), pictures / "curves.png")
        yield Section(title="Learning and time", text="" if spec.base.validates else _NO_METRIC, pictures=[picture])
    yield from other_tables
    advice, command = _advice(record)
    yield Section(title=advice.capitalize(), command=command)
    yield Section(title="What the methods are", facts={label(name): METHODS[name] for name in spec.all_methods})


def _advice(record: Comparison) -> tuple[str, str]:
    """Returns which method of Table 1 to train with, and the command; empty while there is nothing to compare."""
    results = {method: record.results(method) for method in record.spec.table_1}
    best, num_finished = best_of(results), sum(bool(each.by_seed) for each in results.values())
    if not best or num_finished < min(2, len(results)):
        return "", ""
    command = repeat_command("run", record.folder / f"{best}-seed{min(results[best].by_seed)}")
    return f"to train with {label(best)}, which has the best score", command


def _results(record: Comparison, methods: Iterable[str]) -> dict[str, MethodResults]:
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


def _figures(value: Callable[[str], float], goal: Goal) -> Figures:
    seconds, peak_gb = value("seconds_per_epoch"), value("peak_gb")
    return Figures(metric=value(goal.name), seconds=seconds, peak_gb=peak_gb, score=value("score"))


def _curves(record: Comparison) -> list[Curve]:
    """Returns a learning curve for each final run; all seeds of a method have the same color."""
    return [
        Curve(label=label(method), color=METHOD_STYLES[method][1], epochs=run.epochs)
        for method in record.spec.all_methods
        for run in record.runs.values()
        if run.spec.method == method and run.epochs
    ]


def comparison_tables(record: Comparison) -> list[Grid]:
    """Returns the comparison's tables in reading order, without empty ones."""
    spec, goal = record.spec, record.spec.base.goal
    shared, table_1 = joined(sharing_note(spec.base), _held_apart(spec.base)), _results(record, spec.table_1)
    table_2 = {row: record.results(method) for method, row in ABLATION.items()} if spec.ablation else {}
    amp = table_1.get(REFERENCE)
    note = "" if amp is not None else "AMP is not among the methods: nothing to test against"
    to_amp = [(name, each, amp) for name, each in table_1.items() if amp is not None and each is not amp]
    rows = list(table_2.items())
    to_above = [(name, each, above) for (_, above), (name, each) in pairwise(rows)]
    to_standard = [(name, each, rows[0][1]) for name, each in rows[1:]]
    tables = (
        values_grid("Table 1, test samples, read once by each run", table_1, goal, note=joined(shared, note)),
        readings_grid("Table 1, the score by each reading of time and memory", table_1, goal, spec.base.target),
        differences_grid("Table 1, differences to AMP", to_amp, goal),
        values_grid("Table 2, the ablation", table_2, goal, note=shared),
        differences_grid("Table 2, differences to the row above", to_above, goal, note=_BY_ROW),
        differences_grid("Table 2, differences to standard", to_standard, goal, note=_BY_STANDARD),
        settings_grid(record),
        trials_grid(record),
    )
    return [grid for grid in tables if grid.rows]


def values_grid(title: str, rows: Mapping[str, MethodResults], goal: Goal, *, note: str = "") -> Grid:
    """Returns a table of means and standard deviations over seeds, a row per name in `rows`, with `note` below."""
    headings, one_view = _headings(rows.values(), goal), f"{ONE_VIEW}{goal.name}"
    headings = {name: heading for name, heading in headings.items() if name not in TO_TARGET}  # beside the readings
    num_runs = sum(len(results.by_seed) for results in rows.values())
    num_with_views = sum(len(results.values(one_view)) for results in rows.values())
    mixed = f"only {num_with_views} of {num_runs} runs were judged by several views: not comparable"
    return Grid(
        title=title,
        header=("method", "runs", *headings.values()),
        rows=[
            [name, str(len(results.by_seed)), *(mean_and_deviation(results, figure) for figure in headings)]
            for name, results in rows.items()
        ],
        note=joined(
            "mean ± standard deviation over seeds",
            "s/epoch: mean of the last five epochs, without the first of the run",
            f"score = {quality_text(goal)} / (s/epoch x process peak GB)",
            mixed if 0 < num_with_views < num_runs else "",
            VIEWS_NOTE if num_with_views else "",
            "J: energy of the GPU in training" if JOULES in headings else "",
            note,
        ),
    )


def differences_grid(
    title: str, pairs: Sequence[tuple[str, MethodResults, MethodResults]], goal: Goal, *, note: str = ""
) -> Grid:
    """Returns a table of paired differences, first results minus second, with significance tests for each figure.

    Figures that are zero everywhere, such as the allocator's peak on a CPU, are left out; so are rows without a pair.
    """
    compared = [results for _, one, other in pairs for results in (one, other)]
    headings = {}
    for name, heading in _headings(compared, goal).items():
        is_measured = any(value for results in compared for value in results.values(name).values())
        if is_measured and not name.startswith(ONE_VIEW):
            headings[name] = heading
    columns = {
        name: [paired_difference(one.values(name), other.values(name)) for _, one, other in pairs] for name in headings
    }
    corrected = {name: holm([each.p_value for each in column]) for name, column in columns.items()}
    num_pairs = max((each.num_pairs for column in columns.values() for each in column), default=0)
    is_tested = num_pairs >= MIN_PAIRS
    rows = []
    for index, (row, one, other) in enumerate(pairs):
        for name, heading in headings.items():
            difference = columns[name][index]
            # Seeds that reach a target say nothing of those that do not.
            if not difference.num_pairs or math.isnan(one.mean(name) + other.mean(name)):
                continue
            cells = [row, heading, _signed(difference.mean), _percent(difference.mean, other.mean(name))]
            if is_tested:
                cells += _test_cells(difference, corrected[name][index])
            rows.append(cells)
    test_headings = ("95% interval", "p", "p (Holm)") if is_tested else ()
    header = ("method", "figure", "difference", "%", *test_headings)
    return Grid(title=title, header=header, rows=rows, note=joined(note, _test_note(num_pairs)))


def settings_grid(record: Comparison) -> Grid:
    """Returns a table of the settings that each method trained with; it has no rows until they are chosen."""
    rows = []
    if record.choices is not None:
        specs = final_runs(record.spec, record.choices)
        for method in record.spec.all_methods:
            tuned = record.choices.tuned.get(method)
            chosen = "recipe" if tuned is None else tuned.trial or "recipe: no trial ran to its end"
            rows.append([label(method), *_settings(specs[f"{method}-seed0"]), chosen])
    header = ("method", "precision", "batch", "lr", "weight decay", "chosen by trial")
    return Grid(title="What each method trained with", header=header, rows=rows)


def trials_grid(record: Comparison) -> Grid:
    """Returns a table of the trials on validation samples that settings were chosen from; a star marks the chosen."""
    choices, goal = record.choices or Choices(), record.spec.base.goal
    chosen = {tuned.trial for tuned in choices.tuned.values()}
    if choices.fixed is not None:
        chosen.add(choices.fixed.name)
    rows = [
        [name + (STAR if name in chosen else ""), run.status, *_settings(run.spec), *figure_cells(run.figures, goal)]
        for name, run in record.trials.items()
    ]
    header = ("trial", "status", "precision", "batch", "lr", "weight decay", f"val. {goal.heading}", *FIGURE_COLUMNS)
    title = "What was chosen on validation samples"
    return Grid(title=title, header=header, rows=rows, note=joined(*_choice_notes(record)))


def _choice_notes(record: Comparison) -> Iterator[str]:
    spec = record.spec
    yield "validation samples, seed 0; * chosen"
    yield sharing_note(spec.base)
    amp = record.trials.get(REFERENCE_TRIAL)
    if spec.num_fixed and amp is not None and amp.epochs:
        objective = Objective.against(amp.epochs, spec.base.goal)
        best = f"best score of {objective.limit_text} (AMP, margin {objective.margin_text}), or else the nearest to it"
        yield f"fixed setting: {spec.num_fixed} asked for, {best}"
    if spec.num_tuned:
        yield (
            f"learning rate and weight decay: the same {spec.num_tuned} samples for every method, the recipe among "
            f"them; the best {spec.base.goal.words}, among equals the lowest loss"
        )


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


def _test_cells(difference: Difference, corrected: float) -> list[str]:
    """Returns the cells of the confidence interval and p-values; empty ones if there are too few pairs."""
    if math.isnan(difference.low):
        return ["", "", ""]
    interval = f"{_signed(difference.low)} to {_signed(difference.high)}"
    return [interval, _p_value(difference.p_value), _p_value(corrected)]


def _p_value(p: float) -> str:
    if math.isnan(p):
        return "no spread"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _percent(difference: float, reference: float) -> str:
    if reference == 0.0:
        return ""
    percent = round(100 * difference / reference, 1)
    return f"{percent:+.1f}" if percent else "0"


def _signed(value: float) -> str:
    if value == 0.0:
        return "0"
    return f"{value:+.0f}" if abs(value) >= 1000 else f"{value:+.3g}"


def _test_note(num_pairs: int) -> str:
    if num_pairs < MIN_PAIRS:
        return f"differences are paired by seed; too few seeds for a test: {num_pairs}, where {MIN_PAIRS} are needed"
    few = "; with so few seeds only large differences can be significant" if num_pairs < 6 else ""
    tests = "two-sided paired t-test, p (Holm) corrected over the rows of each figure"
    return f"differences are paired by seed; {tests}{few}"
