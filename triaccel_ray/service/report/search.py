"""Report of a search: its trials, the recommended settings, figures, and the HTML page."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import stdev
from typing import Any, Final

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import repeat_command
from triaccel_ray.service.report.drawing import BLUE, GRAY, METHOD_STYLES, NAVY, save
from triaccel_ray.service.report.many_runs import Curve, Series, learning_curves, metric_against_cost
from triaccel_ray.service.report.provenance import TROUBLES, about, sharing_note, trouble_lines, troubles
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import FIGURE_COLUMNS, STAR, Grid, figure_cells, joined
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search import search
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.search import (
    SearchRecord,
    best_repeats,
    best_trial,
    contenders,
    ranked,
    tuned_thresholds_of,
)
from triaccel_ray.service.search.suggestions import quiet_optuna, trial_name
from triaccel_ray.service.storage.layout import FIGURES
from triaccel_ray.service.units import counted

MIN_TRIALS: Final = 20
"""Trials needed for `importance`: fewer say nothing about how much four thresholds matter."""
_NUM_DRAWN: Final = 10
_WAYS_OUT: Final[Mapping[str, str]] = {
    "out_of_memory": "give more --memory-headroom or --memory-budget, or a smaller --batch-size",
    "non_finite": "give a smaller --lr",
    "disk_full": "make room, then `triaccel resume`",
}
"""Cause of a trial's end -> advice to the user."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommendation of a search: a command to train with, and the reason."""

    sentence: str
    command: str = ""
    """Empty if no run can be recommended."""
    best: RunRecord | None = None
    """The best trial, recommended or not."""
    beaten_by: str = ""
    """Name of the baseline that is recommended because it is better than the best trial; empty if none is."""


def view_search(record: SearchRecord) -> View:
    """Returns the view of a search, its trials and recommendation; writes its figures and page."""
    folder, grid, advice = record.folder, search_grid(record), recommendation(record)
    found = tuned_thresholds_of(record)
    thresholds = f"thresholds of the best trial, and what it takes to find them again: {folder / search.FOUND}"
    runs = {f"baseline {name}": run for name, run in record.baselines.items()}
    runs |= {run.name: run for run in chain(record.trials, *record.repeats.values())}
    problems = troubles(runs, missing_runs(record), record.damaged)
    rows = zip(grid.as_dicts(), grid.rows, strict=True)
    return View(
        folder=folder,
        shown=[
            grid,
            "\n".join(filter(None, (advice.sentence, advice.command, thresholds if found is not None else ""))),
            trouble_lines(problems),
        ],
        rows=[{**row, "behind AMP": any(cell.endswith(STAR) for cell in cells)} for row, cells in rows],
        page=write_page(folder, f"{folder.name}: {record.spec.base.task}", _sections(record, advice, grid, problems)),
        command=advice.command,
        control=None if found is None else found.onto(record.spec.base.control),
        best=found,
    )


def _sections(record: SearchRecord, advice: Recommendation, grid: Grid, found: Mapping[str, str]) -> Iterator[Section]:
    """Yields the sections of a search's page, saving their figures."""
    spec, goal, name, pictures = record.spec, record.spec.base.goal, record.folder.name, record.folder / FIGURES
    is_beaten = bool(advice.beaten_by) or advice.best is None
    top = Section(notice=advice.sentence) if is_beaten else Section(text=advice.sentence)
    facts = {
        "what": f"search of {counted(spec.num_trials, 'trial')} in space {spec.space}, objective {spec.objective}, "
        f"margin {record.objective.margin_text}",
        "seed": f"{spec.base.seed}, sampler {spec.seed}",
    }
    yield replace(top, command=advice.command)
    runs = [*record.baselines.values(), *record.trials]
    yield about(spec.base, runs, facts, repeat_command("search", record.folder))
    yield Section(title=TROUBLES, facts=found)
    if series := outcomes(record):
        limit = record.objective.limit if record.objective.reference else None
        figure = metric_against_cost(series, goal, limit=limit, subtitle=joined(name, sharing_note(spec.base)))
        picture = save(figure, pictures / "pareto.png")
        yield Section(title=f"{goal.words.capitalize()} against time and memory", pictures=[picture])
    command = repeat_command("report", record.folder / search.TRIALS / "NAME").replace("--from ", "")
    text = f"What the loop did in a trial is on a page of its own: {command}"
    order = "smallest shortfall first" if advice.best is None else "best first"
    yield Section(title=f"Trials, {order}", text=text, table=grid)
    if curves := _curves(record, advice.best):
        picture = save(learning_curves(curves, goal, subtitle=name), pictures / "curves.png")
        yield Section(title="Learning curves and time", pictures=[picture])
    yield Section(title="Importance of each threshold", text=importance(record))


def search_grid(record: SearchRecord) -> Grid:
    """Returns a table of baselines and trials with thresholds and figures: finished trials best first, then others."""
    objective, spec = record.objective, record.spec
    done = sum(run.status in ("finished", "stopped") for run in record.trials)
    names = tuple(scale.name for scale in dimensions(spec.optional))
    header = ("run", "status", *names, "at epoch", objective.goal.heading, *FIGURE_COLUMNS)
    labels = {name: name.upper() for name in record.baselines if name != "probe"}
    rows = [_row(f"{labels.get(name, name)} again", run, record) for name, run in best_repeats(record).items()]
    rows += [_row(label, record.baselines[name], record) for name, label in labels.items()]
    rows += [_row(run.name, run, record) for _, run in ranked(record)]
    without = {run.name: run.status for run in record.trials if run.figures is None}
    without |= dict.fromkeys(record.damaged, "damaged")
    rows += [[name, status, *[""] * (len(header) - 2)] for name, status in without.items()]
    notes = ["figures are those of the epoch named beside them"]
    if objective.reference:
        amp = objective.goal.text(objective.reference[-1])
        notes.append(
            f"best: {objective.name}, among trials of {objective.limit_text} (AMP {amp}, margin "
            f"{objective.margin_text}); * behind AMP at the same epoch by more than the margin"
        )
    if record.repeats:
        again = f"again: the best of {search.NUM_REPEATS} more runs"
        notes.append(f"{again}; of the best trial and the baselines the best run counts")
    if any(run.status == "stopped" for run in record.trials):
        notes.append("stopped: pruned before its last epoch, hence ranked after all that finished")
    notes.append(sharing_note(spec.base))
    return Grid(
        header=header,
        rows=rows,
        title=f"{record.folder.name}: {spec.base.task}, {done} of {spec.num_trials} trials",
        note=joined(*notes),
        spare=("peak GB", "status", *names[::-1]),
    )


def _row(label: str, run: RunRecord, record: SearchRecord) -> list[str]:
    is_trial = run.spec.method == "triaccel"
    num_epochs = run.epochs[-1].epoch if run.epochs else 0
    scales = dimensions(record.spec.optional)
    thresholds = [scale.text(scale.value(run.spec.control)) if is_trial else "" for scale in scales]
    metric, *others = figure_cells(run.figures, record.objective.goal)
    if is_trial and run.figures is not None and record.objective.shortfall(num_epochs, run.figures.metric) > 0:
        metric += STAR
    return [label, run.status, *thresholds, f"{num_epochs} of {run.spec.recipe.epochs}", metric, *others]


def missing_runs(record: SearchRecord) -> list[str]:
    """Returns the names of the requested runs that have not begun."""
    baselines = ("fp32", "amp", *(["probe"] if record.spec.space == "thresholds" else []))
    missing = [f"baseline {name}" for name in baselines if name not in record.baselines]
    begun = {run.name for run in record.trials} | record.damaged.keys()
    return missing + [name for name in map(trial_name, range(record.spec.num_trials)) if name not in begun]


def recommendation(record: SearchRecord) -> Recommendation:
    """Returns the best trial, or a baseline that beats it in the search's objective, with the command to train with."""
    best, objective, compared = best_trial(record), record.objective, contenders(record)
    figures = {name: run.figures for name, run in compared.items() if run.figures is not None}
    values = {name: objective.value(compared[name].epochs[-1].epoch, each) for name, each in figures.items()}
    if not values:
        return Recommendation(sentence=_why_none(record))
    winner = max(values, key=lambda name: values[name])  # the trial wins ties
    if best is None:
        command = repeat_command("run", record.baselines[winner].folder)
        return Recommendation(sentence=f"{_why_none(record)} Until then train with {winner.upper()}:", command=command)
    phrases = {name: _phrase(objective.name, each, objective.goal) for name, each in figures.items()}
    verb, value, text = phrases.pop(best.name)
    sentence = f"The best trial, {best.name}, {verb} {text}"
    if winner == best.name:
        others = ", ".join(f"{name.upper()} {text}" for name, (_, _, text) in phrases.items())
        scales = dimensions(record.spec.optional)
        thresholds = ", ".join(f"{scale.name} {scale.text(scale.value(best.spec.control))}" for scale in scales)
        sentence += f" ({others})" if others else ""
        sentence += f". To train with its thresholds ({thresholds}):"
        return Recommendation(sentence=sentence, command=repeat_command("run", best.folder), best=best)
    name = winner.upper()
    _, better, text = phrases[winner]
    side = "above" if value > better else "below"
    sentence += f", {side} {name}'s {text}: on this task and hardware train with {name}."
    command = repeat_command("run", record.baselines[winner].folder)
    return Recommendation(sentence=sentence, command=command, best=best, beaten_by=name)


def _phrase(objective: str, figures: Figures, goal: Goal) -> tuple[str, float, str]:
    """Returns a verb, the value and its text for the figure that the search optimized."""
    match objective:
        case "metric" | "accuracy":
            return "reaches", figures.metric, goal.text(figures.metric)
        case "time":
            return "takes", figures.seconds, f"{figures.seconds:.4g} s an epoch"
        case "memory":
            return "peaks at", figures.peak_gb, f"{figures.peak_gb:.4g} GB"
    return "scores", figures.score, f"{figures.score:.4g}"


def _why_none(record: SearchRecord) -> str:
    ends = Counter(run.status for run in record.trials)
    if not ends["finished"]:
        counts = ", ".join(f"{count} {status}" for status, count in ends.most_common() if count) or "none has begun"
        causes = {run.end.cause for run in record.trials if run.end is not None}
        way_out = "; ".join(way for cause, way in _WAYS_OUT.items() if cause in causes)
        if not causes - {""} and ends["stopped"]:
            way_out = "all were pruned, too far behind AMP: try --lr-rule linear, more epochs or a larger --margin"
        way_out = way_out or "see the reasons below, then `triaccel resume` tries them again"
        return f"No trial ran to its end ({counts}): {way_out}."
    failed = sum(count for status, count in ends.items() if status.startswith("failed"))
    reasons = f" {failed} failed; the page lists the reasons." if failed else ""
    limit, margin = record.objective.goal.text(record.objective.limit), record.objective.margin_text
    return (
        f"None of the {ends['finished']} finished trials reaches {limit} (AMP with a margin of {margin}): allow more "
        f"trials, more epochs or a larger --margin.{reasons}"
    )


def importance(record: SearchRecord) -> str:
    """Returns a text on how much each threshold mattered; empty if fewer than MIN_TRIALS can be compared.

    Pruned trials count too, so that the sample is not limited to good ones. Trials are compared after the latest epoch
    that half of them, and MIN_TRIALS, have reached. The target is a trial's rank by the objective: the values jump from
    percentage points to scores when trials become feasible.

    Source: Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance, ICML 2014.
    """
    scales = dimensions(record.spec.optional)
    placed: list[tuple[RunRecord, dict[str, float]]] = []
    for run in record.trials:
        position = {scale.name: scale.position(run.spec.control) for scale in scales}
        if run.figures is not None and all(map(math.isfinite, position.values())):
            placed.append((run, position))
    if len(placed) < MIN_TRIALS:
        return ""
    reached = sorted((run.epochs[-1].epoch for run, _ in placed), reverse=True)
    epoch = reached[max(MIN_TRIALS, math.ceil(len(placed) / 2)) - 1]
    judged: list[tuple[float, dict[str, float]]] = []
    for run, position in placed:
        figures = run.figures_after(epoch)
        if run.epochs[-1].epoch >= epoch and figures is not None:
            judged.append((record.objective.value(epoch, figures), position))
    judged.sort(key=lambda pair: pair[0])
    ranks = {value: float(rank) for rank, value in enumerate(dict.fromkeys(value for value, _ in judged))}
    if len(ranks) < 2:
        return f"The {len(judged)} trials do not differ after epoch {epoch}: no threshold mattered."
    ranges: dict[str, BaseDistribution] = {}
    for scale in scales:
        column = [position[scale.name] for _, position in judged]
        ranges[scale.name] = FloatDistribution(min(column), max(column))
    trials = [optuna.create_trial(params=at, distributions=ranges, value=ranks[value]) for value, at in judged]
    rng, ends = random.Random(0), (trials[0], trials[-1])  # the ends are in every draw, or all of it could be equal
    with quiet_optuna():
        shares = _shares(trials)
        drawn = [_shares([*ends, *rng.choices(trials, k=len(trials) - 2)]) for _ in range(_NUM_DRAWN)]
    text = ", ".join(
        f"{name} {share:.0%} ± {stdev(each[name] for each in drawn):.0%}" for name, share in shares.items()
    )
    return (
        f"{text}: the share of the differences between {len(trials)} trials that each explains (functional analysis "
        f"of variance of their ranks after epoch {epoch}; ± standard deviation over {_NUM_DRAWN} draws of as many "
        "trials). tau_low and tau_high move together, and so do rho_low and rho_high: of such a pair read the sum."
    )


def _shares(trials: Sequence[optuna.trial.FrozenTrial]) -> Mapping[str, float]:
    study = optuna.create_study()
    study.add_trials(trials)
    return optuna.importance.get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))


def outcomes(record: SearchRecord) -> list[Series]:
    """Returns the series to plot: trials by outcome (pruned ones as of then), Pareto front, best trial, baselines."""
    best, compared = best_trial(record), contenders(record)
    points: dict[str, list[Figures]] = {"pruned": [], "poor": [], "good": []}
    for run in (compared.get(trial.name, trial) for trial in record.trials):
        if run.figures is not None and run.status in ("finished", "stopped"):
            shortfall = record.objective.shortfall(run.epochs[-1].epoch, run.figures.metric)
            kind = "poor" if shortfall else "good"
            points["pruned" if run.status == "stopped" else kind].append(run.figures)
    hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "none"}
    front = {"marker": "o", "color": NAVY, "linestyle": "-", "linewidth": 1.6, "drawstyle": "steps-post"}
    looks: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("pruned", "stopped early (pruned)", {"marker": "x", "color": GRAY, "alpha": 0.7}),
        ("poor", "trial beyond the margin", {**hollow, "color": GRAY}),
        ("good", "trial", {"marker": "o", "color": BLUE, "alpha": 0.55}),
    )
    series = [Series(label=label, points=points[kind], look=look) for kind, label, look in looks]
    series.append(Series(label="beaten by no other trial", points=points["good"], look=front, is_front=True))
    for name, run in compared.items():
        figures = [] if run.figures is None else [run.figures]
        if best is not None and name == best.name:
            label = f"best: {name}, score {figures[0].score:.4g}"
            look = {**hollow, "color": NAVY, "markersize": 14.0, "markeredgewidth": 1.6}
        else:
            label = name.upper()
            marker, color = METHOD_STYLES[name]
            look = {"marker": marker, "color": color, "markersize": 9.0, "markeredgecolor": "white"}
        series.append(Series(label=label, points=figures, look=look))
    return [each for each in series if each.points]


def _curves(record: SearchRecord, best: RunRecord | None) -> list[Curve]:
    """Returns the learning curves of all trials, with the baselines and the best trial drawn on top."""
    curves = []
    for run in record.trials:
        if not run.epochs or run is best:
            continue
        is_pruned = run.status == "stopped"
        label, color = ("stopped early (pruned)", GRAY) if is_pruned else ("trial", BLUE)
        curves.append(Curve(label=label, color=color, epochs=run.epochs, width=1.1, opacity=0.6, pruned=is_pruned))
    above = {} if best is None else {f"best trial ({best.name})": (NAVY, best)}
    above |= {name.upper(): (METHOD_STYLES[name][1], run) for name, run in record.baselines.items() if name != "probe"}
    for label, (color, run) in above.items():
        if run.epochs:
            curves.append(Curve(label=label, color=color, epochs=run.epochs, width=2.4, opacity=1.0))
    return curves
