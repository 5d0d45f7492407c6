"""A comparison's tables as plain text cells: the paper's two, what is significant, and what was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal

from triaccel_ray.measure.score import quality_text
from triaccel_ray.records.goal import Goal
from triaccel_ray.service.compare.comparison import (
    FIGURES,
    REFERENCE,
    Choices,
    Comparison,
    MethodResults,
    final_runs,
)
from triaccel_ray.service.compare.significance import (
    MIN_PAIRS,
    Difference,
    holm,
    paired_difference,
    smallest_effect,
)
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.notes import sharing_note
from triaccel_ray.service.report.tables import FIGURE_COLUMNS, VIEWS_NOTE, Grid, figure_cells, metric_headings
from triaccel_ray.service.runs.methods import FIXED
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import ONE_VIEW
from triaccel_ray.service.runs.spec import RunSpec

_ADAPTS_PRECISION = ("dynamic-precision", "dynamic-both", "triaccel")
_ADAPTS_BATCH = ("dynamic-batch", "dynamic-both", "triaccel")
_UNIFORM = {"fp32": "fp32", "dynamic-batch": "fp32", "amp": "autocast"}


def label(method: str) -> str:
    """Returns what a method's row is called."""
    return "best fixed" if method == FIXED else method


def values_grid(results: Sequence[MethodResults], labels: Mapping[str, str] | None = None, *, mark: str = "") -> Grid:
    """Returns one row a method, mean and standard deviation over seeds; the note ends with `mark`."""
    finished = [figures for each in results for figures in each.by_seed.values()]
    goal = _goal(results)
    one_view, headings = f"{ONE_VIEW}{goal.name}", _headings(results)
    num_with_views = sum(one_view in figures for figures in finished)
    if num_with_views:
        headings[one_view] = f"by one view {goal.unit}".rstrip()
    rows = []
    for each in results:
        known = [name for name in headings if all(name in figures for figures in each.by_seed.values())]
        cells = [_mean_and_deviation(each, name) if each.num_runs and name in known else "" for name in headings]
        rows.append([(labels or {}).get(each.method, label(each.method)), str(each.num_runs), *cells])
    note = (
        "mean ± standard deviation over seeds; s/epoch: mean of the last five epochs; "
        f"score = {quality_text(goal)} / (s/epoch x process peak GB)"
    )
    views = VIEWS_NOTE if num_with_views else ""
    if 0 < num_with_views < len(finished):
        views = f"only {num_with_views} of {len(finished)} runs were judged by several views: not comparable; {views}"
    note = "; ".join(filter(None, (note, views, mark)))
    return Grid(header=("method", "runs", *headings.values()), rows=rows, note=note)


def against_reference_grid(results: Sequence[MethodResults]) -> Grid:
    """Returns the differences of every method to AMP."""
    reference = next((each for each in results if each.method == REFERENCE), None)
    pairs = [(each, reference) for each in results if each.method != REFERENCE and reference is not None]
    grid = differences_grid(pairs, {each.method: label(each.method) for each in results})
    return grid if reference else replace(grid, note="AMP is not among the methods: nothing to test against")


def row_above_grid(results: Sequence[MethodResults]) -> Grid:
    """Returns the differences of every row of the ablation to the row above."""
    grid = differences_grid(list(zip(results[1:], results[:-1], strict=True)), ABLATION)
    note = "the rows of dynamic batch and dynamic precision have each of them alone, both has no curvature"
    return replace(grid, note=f"{note}; {grid.note}")


def to_standard_grid(results: Sequence[MethodResults]) -> Grid:
    """Returns the differences of every row of the ablation to the first, whose memory the paper's Table 2 reports."""
    grid = differences_grid([(each, results[0]) for each in results[1:]], ABLATION)
    note = "standard is FP32 as a tutorial writes it: a difference to it holds the engine's cost or gain too"
    return replace(grid, note=f"{note}; {grid.note}")


def differences_grid(pairs: Sequence[tuple[MethodResults, MethodResults]], labels: Mapping[str, str]) -> Grid:
    """Returns the first of every pair less the second, figure by figure, and whether the two differ at all.

    A figure that is zero everywhere, as the allocator's peak on a CPU, is left out.
    """
    known = _headings([each for pair in pairs for each in pair])
    headings = {name: text for name, text in known.items() if any(_is_measured(each, name) for each in pairs)}
    columns = {name: _column(pairs, name) for name in headings}
    differences = [difference for column in columns.values() for difference, _ in column]
    is_tested = any(difference.is_tested for difference in differences)
    rows = []
    for index, (one, other) in enumerate(pairs):
        for position, (name, heading) in enumerate(headings.items()):
            difference, corrected = columns[name][index]
            numbers = [_signed(difference.mean), _percent(difference, other.mean(name))]
            tests = [_interval(difference), _p(difference, difference.p_value), _p(difference, corrected)]
            cells = [*numbers, *tests] if is_tested else numbers
            rows.append([labels[one.method] if position == 0 else "", heading, *cells])
    header = ("method", "figure", "difference", "%", *(("95% interval", "p", "p (Holm)") if is_tested else ()))
    return Grid(header=header, rows=rows, note=_test_note(differences))


def settings_grid(record: Comparison) -> Grid:
    """Returns what each method trained with."""
    choices = record.choices or Choices()
    specs = final_runs(record.spec, choices)
    rows = []
    for method in record.spec.all_methods:
        spec = specs[f"{method}-seed0"]
        tuned = choices.tuned.get(method)
        chosen = "recipe" if tuned is None else tuned.trial or "recipe: no trial ran to its end"
        rows.append([label(method), *_settings(spec), chosen])
    return Grid(header=("method", "precision", "batch", "lr", "weight decay", "chosen by trial"), rows=rows)


def trials_grid(record: Comparison) -> Grid:
    """Returns the trials on validation samples that choices were made by; those chosen bear a star."""
    choices = record.choices or Choices()
    chosen = {tuned.trial for tuned in choices.tuned.values()} | ({choices.fixed.name} if choices.fixed else set())
    rows = []
    for name, run in record.trials.items():
        figures = run.figures
        cells = [""] * (1 + len(FIGURE_COLUMNS)) if figures is None else figure_cells(figures, run.start.goal)
        rows.append([name + (" *" if name in chosen else ""), run.status, *_settings(run.spec), *cells])
    judged = f"val. {record.spec.base.goal.heading}"
    header = ("trial", "status", "precision", "batch", "lr", "weight decay", judged, *FIGURE_COLUMNS)
    return Grid(header=header, rows=rows, note="; ".join(_choice_notes(record)))


def _choice_notes(record: Comparison) -> Iterator[str]:
    spec, trials = record.spec, record.trials
    yield "validation samples, seed 0; * chosen"
    if note := sharing_note(spec.base):
        yield note
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
    names = [name for each in results for figures in each.by_seed.values() for name in figures]
    metrics = metric_headings(dict.fromkeys(names), _goal(results))
    return {**{name: f"test {text}" for name, text in metrics.items()}, **FIGURES}


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


def _is_measured(pair: tuple[MethodResults, MethodResults], figure: str) -> bool:
    return any(value != 0.0 for each in pair for value in each.values(figure).values())


def _column(pairs: Sequence[tuple[MethodResults, MethodResults]], figure: str) -> list[tuple[Difference, float]]:
    """Returns the differences of one figure with their corrected p-values."""
    differences = [paired_difference(one.values(figure), other.values(figure)) for one, other in pairs]
    return list(zip(differences, holm([each.p_value for each in differences]), strict=True))


def _interval(difference: Difference) -> str:
    return f"{_signed(difference.low)} to {_signed(difference.high)}" if difference.is_tested else ""


def _p(difference: Difference, p_value: float) -> str:
    if not difference.is_tested:
        return ""
    if math.isnan(p_value):
        return "no spread"
    return "<0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _percent(difference: Difference, reference: float) -> str:
    known = difference.num_pairs > 0 and reference != 0.0
    percent = round(100 * difference.mean / reference, 1) if known else 0.0
    return (f"{percent:+.1f}" if percent else "0") if known else ""


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
