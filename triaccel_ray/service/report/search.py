"""A search for people: its trials, what to train with, pictures, and a page of all that."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import stdev
from typing import Final

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.report.drawing import BLUE, GREY, METHOD_LOOKS, NAVY, save
from triaccel_ray.service.report.many_runs import Curve, Series, learning_curves, metric_against_cost
from triaccel_ray.service.report.provenance import (
    about,
    sharing_note,
    trouble_lines,
    trouble_sections,
    troubles,
)
from triaccel_ray.service.report.report import Section, View, write_page
from triaccel_ray.service.report.tables import FIGURE_COLUMNS, STAR, Grid, figure_cells
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.search import (
    FOUND,
    NUM_REPEATS,
    TRIALS,
    SearchRecord,
    best_repeats,
    best_trial,
    contenders,
    found_in,
    ranked,
)
from triaccel_ray.service.search.suggestions import quiet_optuna, trial_name
from triaccel_ray.service.storage.layout import FIGURES
from triaccel_ray.service.units import counted

MIN_TRIALS: Final = 20
"""Fewer trials say nothing about how much four thresholds matter."""
_NUM_DRAWN: Final = 10
_SAYS: Final[Mapping[str, tuple[str, Callable[[Figures, Goal], str]]]] = {
    "score": ("scores", lambda figures, goal: f"{figures.score:.4g}"),
    "metric": ("reaches", lambda figures, goal: goal.text(figures.metric)),
    "time": ("takes", lambda figures, goal: f"{figures.seconds:.4g} s an epoch"),
    "memory": ("peaks at", lambda figures, goal: f"{figures.peak_gb:.4g} GB"),
}
"""Objective -> verb, and the figure that it maximises for people."""
_ALIASES: Final = {"pareto": "score", "accuracy": "metric"}
_WAYS_OUT: Final[Mapping[str, str]] = {
    "out_of_memory": "give more --memory-headroom or --memory-budget, or a smaller --batch-size",
    "non_finite": "give a smaller --lr",
    "disk_full": "make room, then `triaccel resume`",
}
"""Cause of a trial's end -> what to change."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to train with after a search, and why."""

    sentence: str
    command: str = ""
    """Empty where no run can be recommended."""
    best: RunRecord | None = None
    """The best trial, recommended or not."""
    beaten_by: str = ""
    """The baseline that is better than the best trial, and is recommended in its place."""


def view_search(record: SearchRecord) -> View:
    """Returns a search's trials and what to train with, and writes its pictures and page."""
    grid, advice, found = search_grid(record), recommendation(record), found_in(record)
    shown: list[str | Grid] = [grid, f"\n{advice.sentence}"]
    shown += [advice.command] if advice.command else []
    if found is not None:
        path = record.folder / FOUND
        shown.append(f"thresholds of the best trial, and what it takes to find them again: {path}")
    runs = {f"baseline {name}": run for name, run in record.baselines.items()}
    runs |= {run.name: run for run in chain(record.trials, *record.repeats.values())}
    unwell = troubles(runs, missing_runs(record), record.damaged)
    rows = zip(grid.as_dicts(), grid.rows, strict=True)
    return View(
        folder=record.folder,
        shown=[*shown, *trouble_lines(unwell)],
        rows=[{**row, "behind AMP": any(cell.endswith(STAR) for cell in cells)} for row, cells in rows],
        page=write_page(
            record.folder, f"{record.folder.name}: {record.spec.base.task}", _sections(record, advice, grid, unwell)
        ),
        command=advice.command,
        control=None if found is None else found.onto(record.spec.base.control),
        best=found,
    )


def _sections(record: SearchRecord, advice: Recommendation, grid: Grid, unwell: Mapping[str, str]) -> list[Section]:
    """Returns what the page of a search shows, pictures included."""
    spec, goal, name, folder = record.spec, record.spec.base.goal, record.folder.name, record.folder / FIGURES
    is_beaten = bool(advice.beaten_by) or advice.best is None
    said = Section(notice=advice.sentence) if is_beaten else Section(text=advice.sentence)
    facts = {
        "what": f"search of {counted(spec.num_trials, 'trial')} in space {spec.space}, objective {spec.objective}, "
        f"margin {record.objective.margin_text}",
        "seed": f"{spec.base.seed}, sampler {spec.seed}",
    }
    runs = [*record.baselines.values(), *record.trials]
    sections = [
        replace(said, command=advice.command),
        about(spec.base, runs, facts, to_repeat("search", record.folder)),
        *trouble_sections(unwell),
    ]
    if series := outcomes(record):
        subtitle = "; ".join(filter(None, (name, sharing_note(spec.base))))
        limit = record.objective.limit if record.objective.reference else None
        picture = save(metric_against_cost(series, goal, limit=limit, about=subtitle), folder / "pareto.png")
        sections.append(Section(title=f"{goal.words.capitalize()} against time and memory", pictures=[picture]))
    one = to_repeat("report", record.folder / TRIALS / "NAME").replace("--from ", "")
    text = f"What the loop did in a trial is on a page of its own: {one}"
    order = "smallest shortfall first" if advice.best is None else "best first"
    sections.append(Section(title=f"Trials, {order}", text=text, table=grid))
    if curves := _curves(record, advice.best):
        picture = save(learning_curves(curves, goal, about=name), folder / "curves.png")
        sections.append(Section(title="Learning curves and time", pictures=[picture]))
    if text := importance(record):
        sections.append(Section(title="Importance of each threshold", text=text))
    return sections


def search_grid(record: SearchRecord) -> Grid:
    """Returns baselines and trials with thresholds and figures: finished trials best first, then stopped ones."""
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
        notes.append(
            f"again: the best of {NUM_REPEATS} more runs; of the best trial and the baselines the best run counts"
        )
    if any(run.status == "stopped" for run in record.trials):
        notes.append("stopped: pruned before its last epoch, hence ranked after all that finished")
    return Grid(
        header=header,
        rows=rows,
        title=f"{record.folder.name}: {spec.base.task}, {done} of {spec.num_trials} trials",
        note="; ".join(filter(None, (*notes, sharing_note(spec.base)))),
        spare=("peak GB", "status", *names[::-1]),
    )


def _row(label: str, run: RunRecord, record: SearchRecord) -> list[str]:
    is_trial, num_epochs = run.spec.method == "triaccel", run.epochs[-1].epoch if run.epochs else 0
    scales = dimensions(record.spec.optional)
    thresholds = [scale.text(scale.value(run.spec.control)) if is_trial else "" for scale in scales]
    metric, *others = figure_cells(run.figures, record.objective.goal)
    if is_trial and run.figures is not None and record.objective.shortfall(num_epochs, run.figures.metric) > 0:
        metric += STAR
    return [label, run.status, *thresholds, f"{num_epochs} of {run.spec.recipe.epochs}", metric, *others]


def missing_runs(record: SearchRecord) -> list[str]:
    """Returns the names of the runs that the search asked for and that have not begun."""
    baselines = ("fp32", "amp", *(["probe"] if record.spec.space == "thresholds" else []))
    missing = [f"baseline {name}" for name in baselines if name not in record.baselines]
    begun = {run.name for run in record.trials} | record.damaged.keys()
    return missing + [name for name in map(trial_name, range(record.spec.num_trials)) if name not in begun]


def recommendation(record: SearchRecord) -> Recommendation:
    """Returns the best trial, or the baseline that beats it in what was maximised, with the command to train with."""
    best, objective, compared = best_trial(record), record.objective, contenders(record)
    if best is None or (figures := compared.pop(best.name).figures) is None:
        if "amp" not in compared:
            return Recommendation(sentence=_why_none(record))
        command = to_repeat("run", record.baselines["amp"].folder)
        return Recommendation(sentence=f"{_why_none(record)} Until then train with AMP:", command=command)
    kind, goal = _ALIASES.get(objective.name, objective.name), objective.goal
    verb, say = _SAYS[kind]
    figure = f"The best trial, {best.name}, {verb} {say(figures, goal)}"
    others, value = [], objective.value(best.epochs[-1].epoch, figures)
    better = ""
    for name, run in compared.items():
        if (other := run.figures) is None:
            continue
        others.append(f"{name.upper()} {say(other, goal)}")
        if (baseline := objective.value(run.epochs[-1].epoch, other)) > value:
            value, better, said = baseline, name, say(other, goal)
    if not better:
        beside = f" ({', '.join(others)})" if others else ""
        scales = dimensions(record.spec.optional)
        values = ", ".join(f"{scale.name} {scale.text(scale.value(best.spec.control))}" for scale in scales)
        sentence = f"{figure}{beside}. To train with its thresholds ({values}):"
        return Recommendation(sentence=sentence, command=to_repeat("run", best.folder), best=best)
    name, folder = better.upper(), record.baselines[better].folder
    relation = "above" if kind in ("time", "memory") or (kind == "metric" and not goal.maximize) else "below"
    sentence = f"{figure}, {relation} {name}'s {said}: on this task and hardware train with {name}."
    return Recommendation(sentence=sentence, command=to_repeat("run", folder), best=best, beaten_by=name)


def _why_none(record: SearchRecord) -> str:
    ends = Counter(run.status for run in record.trials)
    if not ends["finished"]:
        told = ", ".join(f"{count} {status}" for status, count in ends.most_common() if count) or "none has begun"
        causes = {run.end.cause for run in record.trials if run.end is not None}
        way_out = "; ".join(way for cause, way in _WAYS_OUT.items() if cause in causes)
        if not causes - {""} and ends["stopped"]:
            way_out = "all were pruned, too far behind AMP: try --lr-rule linear, more epochs or a larger --margin"
        way_out = way_out or "see the reasons below, then `triaccel resume` tries them again"
        return f"No trial ran to its end ({told}): {way_out}."
    failed = sum(run.end is not None and run.end.status == "failed" for run in record.trials)
    reasons = f" {failed} failed; the page lists the reasons." if failed else ""
    objective = record.objective
    limit = f" {objective.goal.text(objective.limit)}" if objective.reference else " it"
    return (
        f"None of the {ends['finished']} finished trials reaches{limit} (AMP with a margin of "
        f"{objective.margin_text}): allow more trials, more epochs or a larger --margin.{reasons}"
    )


def importance(record: SearchRecord) -> str:
    """Returns how much each threshold of the search mattered; empty where fewer than MIN_TRIALS can be compared.

    Pruned trials count too, or only the good ones would: all are compared after the latest epoch that half of them, and
    MIN_TRIALS, have reached. What is explained is a trial's rank in what was maximised, for the values themselves leap
    from percentage points to scores where trials become feasible.

    Source: Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance, ICML 2014.
    """
    places = {
        run.name: {scale.name: scale.position(run.spec.control) for scale in dimensions(record.spec.optional)}
        for run in record.trials
        if run.figures is not None
    }
    trials = [run for run in record.trials if all(map(math.isfinite, places.get(run.name, {"": math.nan}).values()))]
    if len(trials) < MIN_TRIALS:
        return ""
    reached = sorted((run.epochs[-1].epoch for run in trials), reverse=True)
    epoch = reached[max(MIN_TRIALS, -(-len(trials) // 2)) - 1]
    values = {
        run.name: record.objective.value(epoch, figures)
        for run in trials
        if run.epochs[-1].epoch >= epoch and (figures := run.figures_after(epoch)) is not None
    }
    ranks = {value: float(rank) for rank, value in enumerate(sorted(set(values.values())))}
    if len(ranks) < 2:
        return f"The {len(values)} trials do not differ after epoch {epoch}: no threshold mattered."
    columns = {key: [places[name][key] for name in values] for key in next(iter(places.values()))}
    ranges: dict[str, BaseDistribution] = {
        key: FloatDistribution(min(column), max(column)) for key, column in columns.items()
    }

    def shares_of(names: Sequence[str]) -> Mapping[str, float]:
        study = optuna.create_study()
        for name in names:
            value = ranks[values[name]]
            study.add_trial(optuna.create_trial(params=places[name], distributions=ranges, value=value))
        return optuna.importance.get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))

    names, chance = sorted(values, key=lambda name: values[name]), random.Random(0)
    with quiet_optuna():
        shares = shares_of(names)
        ends = names[0], names[-1]  # or all drawn could be alike
        drawn = [shares_of([*ends, *chance.choices(names, k=len(names) - 2)]) for _ in range(_NUM_DRAWN)]
    told = ", ".join(
        f"{name} {share:.0%} ± {stdev(each[name] for each in drawn):.0%}" for name, share in shares.items()
    )
    return (
        f"{told}: the share of the differences between {len(values)} trials that each explains (functional analysis "
        f"of variance of their ranks after epoch {epoch}; ± standard deviation over {_NUM_DRAWN} draws of as many "
        "trials). tau_low and tau_high move together, and so do rho_low and rho_high: of such a pair read the sum."
    )


def outcomes(record: SearchRecord) -> list[Series]:
    """Returns how trials ended, those that none beats, the best, and baselines; pruned trials as they were by then."""
    good: list[Figures] = []
    poor: list[Figures] = []
    pruned = [run.figures for run in record.trials if run.status == "stopped" and run.figures is not None]
    best, compared = best_trial(record), contenders(record)
    for run in (compared.get(trial.name, trial) for trial in record.trials):
        if run.figures is not None and run.status == "finished":
            is_feasible = record.objective.shortfall(run.epochs[-1].epoch, run.figures.metric) == 0.0
            (good if is_feasible else poor).append(run.figures)
    hollow = {"marker": "o", "markerfacecolor": "none"}
    dot = {"marker": "o", "color": BLUE, "alpha": 0.55}
    joined = {"marker": "o", "color": NAVY, "linestyle": "-", "linewidth": 1.6, "drawstyle": "steps-post"}
    series = [
        Series(label="stopped early (pruned)", points=pruned, look={"marker": "x", "color": GREY, "alpha": 0.7}),
        Series(label="trial beyond the margin", points=poor, look={**hollow, "color": GREY}),
        Series(label="trial", points=good, look=dot),
        Series(label="beaten by no other trial", points=good, look=joined, is_front=True),
    ]
    if best is not None and (figures := compared.pop(best.name).figures) is not None:
        ring = {**hollow, "color": NAVY, "markersize": 14.0, "markeredgewidth": 1.6}
        series.append(Series(label=f"best: {best.name}, score {figures.score:.4g}", points=[figures], look=ring))
    for method, baseline in compared.items():
        marker, colour = METHOD_LOOKS[method]
        look = {"marker": marker, "color": colour, "markersize": 9.0, "markeredgecolor": "white"}
        points = [] if baseline.figures is None else [baseline.figures]
        series.append(Series(label=method.upper(), points=points, look=look))
    return [each for each in series if each.points]


def _curves(record: SearchRecord, best: RunRecord | None) -> list[Curve]:
    """Returns the curves of all trials, the baselines and the best trial above the others."""
    trials, above = [], []
    for run in filter(lambda run: run.epochs, record.trials):
        if best is not None and run.name == best.name:
            label = f"best trial ({run.name})"
            above.append(Curve(label=label, colour=NAVY, epochs=run.epochs, width=2.6, opacity=1.0))
        elif run.status == "stopped":
            label = "stopped early (pruned)"
            trials.append(Curve(label=label, colour=GREY, epochs=run.epochs, width=1.0, opacity=0.7, pruned=True))
        else:
            trials.append(Curve(label="trial", colour=BLUE, epochs=run.epochs, width=1.2, opacity=0.6))
    above += [
        Curve(label=name.upper(), colour=METHOD_LOOKS[name][1], epochs=run.epochs, width=2.2, opacity=1.0)
        for name, run in record.baselines.items()
        if name != "probe" and run.epochs
    ]
    return trials + above
