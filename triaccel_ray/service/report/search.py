"""Report of a search: its trials, the recommended settings, a figure, and the HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import command_for
from triaccel_ray.service.report.drawing import BLUE, GRAY, METHOD_STYLES, NAVY, Series, metric_against_cost, save
from triaccel_ray.service.report.provenance import about, sharing_note, troubles
from triaccel_ray.service.report.report import View, with_page
from triaccel_ray.service.report.tables import STAR, TextTable, joined, lines
from triaccel_ray.service.runs.objective import Performance
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.search.search import (
    NUM_REPEATS,
    SearchRecord,
    best_repeats,
    best_trial,
    candidates,
    ranked,
    tuned_thresholds_of,
)
from triaccel_ray.service.search.searcher import trial_name
from triaccel_ray.service.search.spec import dimensions
from triaccel_ray.service.storage.layout import FIGURES, TRIALS, TUNED_THRESHOLDS
from triaccel_ray.service.units import counted

_WAYS_OUT: Final[Mapping[str, str]] = {
    "out_of_memory": "give more --memory-headroom or --memory-budget, or a smaller --batch-size",
    "non_finite": "give a smaller --lr",
    "disk_full": "make room, then `triaccel resume`",
}
"""Cause of a trial's end -> advice to the user."""


def view_search(record: SearchRecord) -> View:
    """Returns the view of a search, its trials and recommendation; writes its figures and page."""
    folder, table, spec, (sentence, command) = record.folder, search_table(record), record.spec, recommendation(record)
    found = tuned_thresholds_of(record)
    where = f"thresholds of the best trial, and what it takes to find them again: {folder / TUNED_THRESHOLDS}"
    named = {f"baseline {name}": run for name, run in record.baselines.items()}
    named |= {run.name: run for run in chain(record.trials, *record.repeats.values())}
    rows = zip(table.as_dicts(), table.rows, strict=True)
    pictures = []
    if series := outcomes(record):
        limit = record.objective.limit if record.objective.reference else None
        subtitle = joined(folder.name, sharing_note(spec.base))
        figure = metric_against_cost(series, spec.base.goal, limit=limit, subtitle=subtitle)
        pictures = [save(figure, folder / FIGURES / "pareto.png")]
    facts = {"space, objective": f"{spec.space}, {spec.objective}", "seed": f"{spec.base.seed}, sampler {spec.seed}"}
    runs = [*record.baselines.values(), *record.trials]
    of_a_trial = command_for("report", folder / TRIALS / "NAME")
    return with_page(
        View(
            folder=folder,
            title=f"{folder.name}: {spec.base.task}",
            parts=[
                table,
                lines(sentence, command, "" if found is None else where),
                troubles(named, missing_runs(record), record.damaged),
                *pictures,
            ],
            details=[
                f"What the loop did in a trial is on a page of its own: {of_a_trial}",
                about(spec.base, runs, facts, command_for("search --from", folder)),
            ],
            rows=[{**row, "behind AMP": any(cell.endswith(STAR) for cell in cells)} for row, cells in rows],
            command=command,
            control=None if found is None else found.onto(spec.base.control),
            best=found,
        )
    )


def search_table(record: SearchRecord) -> TextTable:
    """Returns a table of baselines and trials with thresholds and figures: finished trials best first, then others."""
    objective, spec = record.objective, record.spec
    done = sum(run.status in ("finished", "stopped") for run in record.trials)
    names = tuple(each.name for each in dimensions(spec.optional))
    header = ("run", "status", *names, "at epoch", objective.goal.heading, "s/epoch", "peak GB", "score")
    labels = {name: name.upper() for name in record.baselines if name != "probe"}
    rows = [_row(f"{labels.get(name, name)} again", run, record) for name, run in best_repeats(record).items()]
    rows += [_row(label, record.baselines[name], record) for name, label in labels.items()]
    rows += [_row(run.name, run, record) for run in ranked(record)]
    rows += [[name, "damaged", *[""] * (len(header) - 2)] for name in record.damaged]
    notes = ["figures are those of the epoch named beside them"]
    if objective.reference:
        amp = objective.goal.text(objective.reference[-1])
        margin = objective.margin_text
        notes.append(f"best: {objective.name}, among trials of {objective.limit_text} (AMP {amp}, margin {margin})")
        notes.append("*: behind AMP at the same epoch by more than the margin")
    if record.repeats:
        notes.append(f"again: the best of {NUM_REPEATS} more runs, which replaces the first run")
    if any(run.status == "stopped" for run in record.trials):
        notes.append("stopped: pruned before its last epoch, hence ranked after all that finished")
    notes += [sharing_note(spec.base), _unlike(spec.base)]
    return TextTable(
        header=header,
        rows=rows,
        title=f"{record.folder.name}: {spec.base.task}, {done} of {spec.num_trials} trials",
        note=lines(*notes),
        droppable=("peak GB", "status", *names[::-1]),
    )


def _row(label: str, run: RunRecord, record: SearchRecord) -> list[str]:
    is_trial = run.spec.method == "triaccel"
    num_epochs = run.epochs[-1].epoch if run.epochs else 0
    thresholds = [
        format(each.value(run.spec.control), each.form) if is_trial else "" for each in dimensions(record.spec.optional)
    ]
    performance, cells = run.performance, [""] * 4
    if performance is not None:
        is_behind = is_trial and record.objective.shortfall(num_epochs, performance.metric) > 0
        metric = f"{record.objective.goal.cell(performance.metric)}{STAR if is_behind else ''}"
        cells = [metric, f"{performance.seconds:.3f}", f"{performance.peak_gb:.3f}", f"{performance.score:.2f}"]
    return [label, run.status, *thresholds, f"{num_epochs} of {run.spec.recipe.epochs}", *cells]


def missing_runs(record: SearchRecord) -> list[str]:
    """Returns the names of the requested runs that have not begun."""
    baselines = ("fp32", "amp", *(["probe"] if record.spec.space == "thresholds" else []))
    missing = [f"baseline {name}" for name in baselines if name not in record.baselines]
    begun = {run.name for run in record.trials} | record.damaged.keys()
    return missing + [name for name in map(trial_name, range(record.spec.num_trials)) if name not in begun]


_TIE_SHARE = 0.01
"""Difference between objectives, relative, below which repeats on one machine vary as well."""


def recommendation(record: SearchRecord) -> tuple[str, str]:
    """Returns what to train with, the best trial or a baseline that beats it in the search's objective, and a command.

    The command is empty if neither a trial nor a baseline can be recommended. An example: no trial has finished, and
    some have not begun.
    """
    best, objective, compared = best_trial(record), record.objective, candidates(record)
    has_more = len(record.trials) + len(record.damaged) < record.spec.num_trials
    if has_more and not any(run.status == "finished" for run in record.trials):
        return f"{_why_none(record)} Not all has begun: `{command_for('resume', record.folder)}` goes on.", ""
    performance = {name: run.performance for name, run in compared.items() if run.performance is not None}
    values = {name: objective.value(compared[name].epochs[-1].epoch, each) for name, each in performance.items()}
    if not values:
        return _why_none(record), ""
    winner = max(values, key=lambda name: values[name])  # the trial wins ties
    sentence = _why_none(record)
    if best is not None:
        texts = {name: _figure_text(objective.name, each, objective.goal) for name, each in performance.items()}
        own = texts.pop(best.name)
        sentence = f"The best trial, {best.name}, has {own}{''.join(f', {n.upper()} {t}' for n, t in texts.items())}."
        if objective.name != "metric" and (unlike := _unlike(record.spec.base)):
            sentence += f" But {unlike}."
        if winner == best.name:
            nearest = max((name for name in values if name != winner), key=lambda name: values[name], default=None)
            if nearest is not None and values[winner] - values[nearest] <= _TIE_SHARE * abs(values[winner]):
                sentence += f" {nearest.upper()} alone is as good within {_TIE_SHARE:.0%}."
            return f"{sentence} To train with its thresholds:", command_for("run --from", best.folder)
    command = command_for("run --from", record.baselines[winner].folder)
    return f"{sentence} On this task and hardware train with {winner.upper()}:", command


def _unlike(spec: RunSpec) -> str:
    """Returns a note that trials and baselines trained on unlike hardware; empty if they did not."""
    if not spec.is_distributed:
        return ""
    return f"trials train on {spec.ranks_text}, baselines on one: compare {spec.goal.words}, not times and scores"


def _figure_text(objective: str, performance: Performance, goal: Goal) -> str:
    """Returns the figure that the search optimized, as text."""
    match objective:
        case "metric":
            return f"{goal.words} {goal.text(performance.metric)}"
        case "time":
            return f"{performance.seconds:.4g} s an epoch"
        case "memory":
            return f"a peak of {performance.peak_gb:.4g} GB"
    return f"score {performance.score:.4g}"


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
        f"{counted(ends['finished'], 'trial')} finished, and none reaches {limit} (AMP with a margin of {margin}): "
        f"allow more trials, more epochs or a larger --margin.{reasons}"
    )


def outcomes(record: SearchRecord) -> list[Series]:
    """Returns the series to plot: trials by outcome (pruned ones as of then), Pareto front, best trial, baselines."""
    best, compared = best_trial(record), candidates(record)
    pruned, poor, good = list[Performance](), list[Performance](), list[Performance]()
    for run in (compared.get(trial.name, trial) for trial in record.trials):
        if run.performance is not None and run.status in ("finished", "stopped"):
            outcome = poor if record.objective.shortfall(run.epochs[-1].epoch, run.performance.metric) else good
            (pruned if run.status == "stopped" else outcome).append(run.performance)
    hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "none"}
    front = {"marker": "o", "color": NAVY, "linestyle": "-", "linewidth": 1.6, "drawstyle": "steps-post"}
    series = [
        Series(label="stopped early (pruned)", points=pruned, look={"marker": "x", "color": GRAY, "alpha": 0.7}),
        Series(label="trial beyond the margin", points=poor, look={**hollow, "color": GRAY}),
        Series(label="trial", points=good, look={"marker": "o", "color": BLUE, "alpha": 0.55}),
        Series(label="Pareto front of the trials", points=good, look=front, is_front=True),
    ]
    for name, run in compared.items():
        performance = [] if run.performance is None else [run.performance]
        if best is not None and name == best.name:
            label = f"best: {name}, score {performance[0].score:.4g}"
            look = {**hollow, "color": NAVY, "markersize": 14.0, "markeredgewidth": 1.6}
        else:
            label = name.upper()
            marker, color = METHOD_STYLES[name]
            look = {"marker": marker, "color": color, "markersize": 9.0, "markeredgecolor": "white"}
        series.append(Series(label=label, points=performance, look=look))
    return [each for each in series if each.points]
