"""A comparison for people: the paper's two tables, what is significant, what was chosen, pictures, and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from triaccel_ray.measure.score import quality_text
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.compare.comparison import (
    FIGURES,
    REFERENCE,
    Choices,
    Comparison,
    MethodResults,
    final_runs,
)
from triaccel_ray.service.compare.significance import MIN_PAIRS, Difference, holm, paired_difference, smallest_effect
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.drawing import METHOD_LOOKS, save
from triaccel_ray.service.report.many_runs import Curve, Series, learning_curves, metric_against_cost
from triaccel_ray.service.report.provenance import about, sharing_note, trouble_lines, trouble_sections, troubles
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import FIGURE_COLUMNS, VIEWS_NOTE, Grid, figure_cells, metric_headings
from triaccel_ray.service.runs.methods import FIXED, METHODS
from triaccel_ray.service.runs.objective import Figures, Objective
from triaccel_ray.service.runs.record import ONE_VIEW
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage import layout
from triaccel_ray.service.units import counted
from triaccel_ray.trainables.task import Purpose

COMPARISON_MARKDOWN = "comparison.md"
_NO_ACCURACY = "The test samples are read once, at the end of each run: on the way there is the training loss alone."
_ADAPTS_PRECISION = ("dynamic-precision", "dynamic-both", "triaccel")
_ADAPTS_BATCH = ("dynamic-batch", "dynamic-both", "triaccel")
_UNIFORM = {"fp32": "fp32", "dynamic-batch": "fp32", "amp": "autocast"}


def label(method: str) -> str:
    """Returns what a method's row is called."""
    return "best fixed" if method == FIXED else method


def view_comparison(record: Comparison) -> View:
    """Returns the tables, and writes them as Markdown and, with pictures, as a page."""
    folder, spec, title = record.folder, record.spec, f"{record.folder.name}: {record.spec.base.task}"
    tables = comparison_tables(record)
    command = to_repeat("run", folder / f"{FIXED}-seed0") if record.choices and record.choices.fixed else ""
    shown: list[str | Grid] = []
    for grid in tables:
        shown += [replace(grid, title=f"{folder.name}: {grid.title}"), ""]
    shown += ["to train with the best fixed setting:", command] if command else []
    missing = [name for name in final_runs(spec, record.choices or Choices()) if name not in record.runs]
    unwell = troubles({**record.trials, **record.runs}, missing)
    text = "\n".join(f"## {grid.title}\n\n{grid.markdown()}" for grid in tables)
    layout.write_atomically(folder / COMPARISON_MARKDOWN, f"# {title}\n\n{text}")
    return View(
        folder=folder,
        shown=[*shown, *trouble_lines(unwell)],
        rows=values_grid("", [record.results(method) for method in spec.all_methods]).as_dicts(),
        page=write_page(folder, title, _sections(record, tables, unwell, command)),
        command=command,
        control=spec.base.control,
    )


def _sections(record: Comparison, tables: Sequence[Grid], unwell: Mapping[str, str], command: str) -> list[Section]:
    """Returns what the page shows, pictures included; `command` trains the best fixed setting."""
    folder, spec, goal = record.folder, record.spec, record.spec.base.goal
    seeds = counted(spec.num_seeds, "seed")
    subtitle = "; ".join(filter(None, (f"{spec.base.task}, {seeds}", sharing_note(spec.base))))
    facts = {"what": f"comparison of {', '.join(map(label, spec.all_methods))}", "seeds": f"{seeds}, from 0"}
    first, *others = [Section(title=grid.title, table=replace(grid, title="")) for grid in tables]
    sections = [
        about(spec.base, list(record.runs.values()), facts, to_repeat("compare", folder)),
        *trouble_sections(unwell),
        first,
    ]
    if series := [_series(each) for method in spec.all_methods if (each := record.results(method)).num_runs]:
        figure = metric_against_cost(series, goal, about=subtitle, samples="test")
        picture = save(figure, folder / layout.FIGURES / f"{goal.name}_against_cost.png")
        text = "Bars: standard deviation over seeds."
        sections.append(Section(title=f"{goal.words.capitalize()} against cost", text=text, pictures=[picture]))
    if curves := _curves(record):
        picture = save(learning_curves(curves, goal, about=subtitle), folder / layout.FIGURES / "curves.png")
        text = "" if spec.base.purpose is Purpose.SEARCH else _NO_ACCURACY
        sections.append(Section(title="Learning and time", text=text, pictures=[picture]))
    sections += others
    if command:
        sections.append(Section(title="To train with the best fixed setting", command=command))
    methods = {label(method): METHODS[method] for method in spec.all_methods}
    return [*sections, Section(title="What the methods are", facts=methods)]


def _series(results: MethodResults) -> Series:
    marker, colour = METHOD_LOOKS[results.method]
    return Series(
        label=label(results.method),
        points=[_figures(results.mean, results.goal)],
        spread=_figures(results.deviation, results.goal) if results.num_runs > 1 else None,
        look={"marker": marker, "color": colour, "markersize": 9.0},
    )


def _figures(of: Callable[[str], float], goal: Goal) -> Figures:
    return Figures(metric=of(goal.name), seconds=of("seconds_per_epoch"), peak_gb=of("peak_gb"), score=of("score"))


def _curves(record: Comparison) -> list[Curve]:
    """Returns a curve for each final run; the seeds of a method have its colour."""
    return [
        Curve(label=label(method), colour=METHOD_LOOKS[method][1], epochs=run.epochs)
        for method in record.spec.all_methods
        for run in record.runs.values()
        if run.spec.method == method and run.epochs
    ]


def comparison_tables(record: Comparison) -> list[Grid]:
    """Returns the tables in the order in which they are read."""
    first = [record.results(method) for method in record.spec.table_1]
    second = [record.results(method) for method in record.spec.table_2]
    mark = sharing_note(record.spec.base)
    no_amp = "" if REFERENCE in record.spec.table_1 else "AMP is not among the methods: nothing to test against"
    note = "; ".join(filter(None, (mark, no_amp)))
    reference = next((each for each in first if each.method == REFERENCE), None)
    to_amp = [(each, reference) for each in first if each.method != REFERENCE and reference is not None]
    tables = [
        values_grid("Table 1, test samples, read once by each run", first, mark=note),
        differences_grid("Table 1, differences to AMP", to_amp),
    ]
    if second:
        rows = "the rows of dynamic batch and dynamic precision have each of them alone, both has no curvature"
        above = list(zip(second[1:], second[:-1], strict=True))
        engine = "standard is FP32 as a tutorial writes it: a difference to it holds the engine's cost or gain too"
        to_standard = [(each, second[0]) for each in second[1:]]
        tables += [
            values_grid("Table 2, the ablation", second, ABLATION, mark=mark),
            differences_grid("Table 2, differences to the row above", above, ABLATION, note=rows),
            differences_grid("Table 2, differences to standard", to_standard, ABLATION, note=engine),
        ]
    if record.choices is not None:
        tables.append(settings_grid(record, record.choices))
    if record.trials:
        tables.append(trials_grid(record))
    return [grid for grid in tables if grid.rows]


def values_grid(
    title: str, results: Sequence[MethodResults], labels: Mapping[str, str] | None = None, *, mark: str = ""
) -> Grid:
    """Returns one row a method, mean and standard deviation over seeds; the note ends with `mark`."""
    finished = [figures for each in results for figures in each.by_seed.values()]
    goal, headings = _goal(results), _headings(results)
    one_view = f"{ONE_VIEW}{goal.name}"
    num_with_views = sum(one_view in figures for figures in finished)
    if num_with_views:
        headings[one_view] = f"by one view {goal.unit}".rstrip()
    rows = []
    for each in results:
        known = {name for name in headings if all(name in figures for figures in each.by_seed.values())}
        cells = [_mean_and_deviation(each, name) if each.num_runs and name in known else "" for name in headings]
        rows.append([(labels or {}).get(each.method, label(each.method)), str(each.num_runs), *cells])
    notes = (
        "mean ± standard deviation over seeds",
        "s/epoch: mean of the last five epochs",
        f"score = {quality_text(goal)} / (s/epoch x process peak GB)",
        f"only {num_with_views} of {len(finished)} runs were judged by several views: not comparable"
        if 0 < num_with_views < len(finished)
        else "",
        VIEWS_NOTE if num_with_views else "",
        mark,
    )
    header = ("method", "runs", *headings.values())
    return Grid(title=title, header=header, rows=rows, note="; ".join(filter(None, notes)))


def differences_grid(
    title: str,
    pairs: Sequence[tuple[MethodResults, MethodResults]],
    labels: Mapping[str, str] | None = None,
    *,
    note: str = "",
) -> Grid:
    """Returns the first of every pair less the second, figure by figure, and whether the two differ at all.

    A figure that is zero everywhere, as the allocator's peak on a CPU, is left out.
    """
    measured = {
        name: heading
        for name, heading in _headings([each for pair in pairs for each in pair]).items()
        if any(value != 0.0 for pair in pairs for each in pair for value in each.values(name).values())
    }
    columns = {
        name: [paired_difference(one.values(name), other.values(name)) for one, other in pairs] for name in measured
    }
    corrected = {name: holm([each.p_value for each in column]) for name, column in columns.items()}
    differences = [difference for column in columns.values() for difference in column]
    is_tested = any(difference.is_tested for difference in differences)
    rows = []
    for index, (one, other) in enumerate(pairs):
        for name, heading in measured.items():
            difference = columns[name][index]
            numbers = [_signed(difference.mean), _percent(difference, other.mean(name))]
            row = [(labels or {}).get(one.method, label(one.method)), heading, *numbers]
            rows.append([*row, *_tests(difference, corrected[name][index])] if is_tested else row)
    header = ("method", "figure", "difference", "%", *(("95% interval", "p", "p (Holm)") if is_tested else ()))
    notes = [note, _test_note(differences)] if pairs else [note]
    return Grid(title=title, header=header, rows=rows, note="; ".join(filter(None, notes)))


def settings_grid(record: Comparison, choices: Choices) -> Grid:
    """Returns what each method trained with."""
    specs = final_runs(record.spec, choices)
    rows = []
    for method in record.spec.all_methods:
        tuned = choices.tuned.get(method)
        chosen = "recipe" if tuned is None else tuned.trial or "recipe: no trial ran to its end"
        rows.append([label(method), *_settings(specs[f"{method}-seed0"]), chosen])
    header = ("method", "precision", "batch", "lr", "weight decay", "chosen by trial")
    return Grid(title="What each method trained with", header=header, rows=rows)


def trials_grid(record: Comparison) -> Grid:
    """Returns the trials on validation samples that choices were made by; those chosen bear a star."""
    choices = record.choices or Choices()
    chosen = {tuned.trial for tuned in choices.tuned.values()} | ({choices.fixed.name} if choices.fixed else set())
    rows = [
        [
            name + (" *" if name in chosen else ""),
            run.status,
            *_settings(run.spec),
            *figure_cells(run.figures, run.start.goal),
        ]
        for name, run in record.trials.items()
    ]
    judged = f"val. {record.spec.base.goal.heading}"
    header = ("trial", "status", "precision", "batch", "lr", "weight decay", judged, *FIGURE_COLUMNS)
    note = "; ".join(filter(None, _choice_notes(record)))
    return Grid(title="What was chosen on validation samples", header=header, rows=rows, note=note)


def _choice_notes(record: Comparison) -> Iterator[str]:
    spec, trials = record.spec, record.trials
    yield "validation samples, seed 0; * chosen"
    yield sharing_note(spec.base)
    if spec.num_fixed and "amp-recipe" in trials and trials["amp-recipe"].epochs:
        amp = trials["amp-recipe"]
        objective = Objective.against(amp.epochs, amp.start.goal)
        margin = f"margin {objective.margin_text}"
        yield f"fixed setting: {spec.num_fixed} asked for, best score of {objective.limit_text} (AMP, {margin})"
        fixed = record.choices.fixed if record.choices else None
        figures = None if fixed is None else trials[fixed.name].figures
        if figures is not None and objective.shortfall(len(objective.reference), figures.metric):
            yield "none of them reached that: the one nearest to it"
    if spec.num_tuned:
        yield (
            f"learning rate and weight decay: the same {spec.num_tuned} samples for every method, the recipe among "
            f"them; the best {spec.base.goal.words}, among equals the lowest loss"
        )


def _goal(results: Sequence[MethodResults]) -> Goal:
    return results[0].goal if results else Goal()


def _headings(results: Sequence[MethodResults]) -> dict[str, str]:
    """Returns column headings by figure: the metrics, on test samples, and FIGURES."""
    names = dict.fromkeys(name for each in results for figures in each.by_seed.values() for name in figures)
    return {**{name: f"test {text}" for name, text in metric_headings(names, _goal(results)).items()}, **FIGURES}


def _settings(spec: RunSpec) -> list[str]:
    control = spec.control
    precision = _UNIFORM.get(spec.method, control.precision.initial.value)
    if spec.method == "amp" and (spec.recipe.amp == "bf16" or spec.device == "cpu"):
        precision = f"{precision} bf16"
    precision = f"per layer, from {precision}" if spec.method in _ADAPTS_PRECISION else precision
    batch = f"{control.batch.start}"
    if spec.method in _ADAPTS_BATCH:
        batch = f"{control.batch.minimum} to {control.batch.maximum}, from {batch}"
    return [precision, batch, f"{spec.recipe.lr:.4g}", f"{spec.recipe.weight_decay:.3g}"]


def _tests(difference: Difference, corrected: float) -> list[str]:
    """Returns confidence interval and p-values; empty cells without enough pairs."""
    if not difference.is_tested:
        return ["", "", ""]
    ps = (
        "no spread" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}" for p in (difference.p_value, corrected)
    )
    return [f"{_signed(difference.low)} to {_signed(difference.high)}", *ps]


def _percent(difference: Difference, reference: float) -> str:
    if difference.num_pairs == 0 or reference == 0.0:
        return ""
    percent = round(100 * difference.mean / reference, 1)
    return f"{percent:+.1f}" if percent else "0"


def _signed(value: float) -> str:
    if math.isnan(value):
        return ""
    if value == 0.0:
        return "0"
    return f"{value:+.0f}" if abs(value) >= 1000 else f"{value:+.3g}"


def _test_note(differences: Sequence[Difference]) -> str:
    count = max((each.num_pairs for each in differences), default=0)
    if count < MIN_PAIRS:
        return f"differences are paired by seed; too few seeds for a test: {count}, where {MIN_PAIRS} are needed"
    small = " With so few seeds only large differences can be significant:" if count < 6 else ""
    return (
        "differences are paired by seed; two-sided paired t-test, p (Holm) corrected over the rows of each figure."
        f"{small} with {count} seeds p falls below 0.05, before the correction, where the mean difference is above "
        f"{smallest_effect(count):.1f} standard deviations of the differences"
    )


def _mean_and_deviation(results: MethodResults, figure: str) -> str:
    mean, deviation = results.mean(figure), results.deviation(figure)
    text = f"{mean:.0f}" if abs(mean) >= 10_000 else f"{mean:.4g}"  # neither number with an exponent
    if math.isnan(deviation):
        return text
    return f"{text} ± {deviation:.0f}" if deviation >= 100 else f"{text} ± {Decimal(f'{deviation:.2g}'):f}"
