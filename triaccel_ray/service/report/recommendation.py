"""What a search recommends: its best trial, or the baseline that is better, said plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from triaccel_ray.records.goal import Goal
from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.runs.objective import Figures
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.search import SearchRecord, best_trial

_Says: TypeAlias = tuple[str, Callable[[Figures, Goal], str]]
_SCORE: Final[_Says] = ("scores", lambda figures, goal: f"{figures.score:.4g}")
_METRIC: Final[_Says] = ("reaches", lambda figures, goal: goal.text(figures.metric))
_SAYS: Final[Mapping[str, _Says]] = {
    "score": _SCORE,
    "pareto": _SCORE,
    "metric": _METRIC,
    "accuracy": _METRIC,
    "time": ("takes", lambda figures, goal: f"{figures.seconds:.4g} s an epoch"),
    "memory": ("peaks at", lambda figures, goal: f"{figures.peak_gb:.4g} GB"),
}
"""Objective -> verb, and the figure that it maximises for people."""


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


def recommendation(record: SearchRecord) -> Recommendation:
    """Returns the best trial, or the baseline that beats it in what was maximised, with the command to train with."""
    best, objective = best_trial(record), record.objective
    if best is None or best.figures is None:
        return Recommendation(sentence=_why_none(record))
    verb, say = _SAYS[objective.name]
    goal = objective.goal
    beaten, better = objective.value(best.epochs[-1].epoch, best.figures), None
    others = []
    for name in ("amp", "fp32"):
        run = record.baselines.get(name)
        if run is None or run.status != "finished" or run.figures is None:
            continue
        others.append(f"{name.upper()} {say(run.figures, goal)}")
        value = objective.value(run.epochs[-1].epoch, run.figures)
        if value > beaten:
            beaten, better = value, run
    figure = say(best.figures, goal)
    if better is None or better.figures is None:
        beside = f" ({', '.join(others)})" if others else ""
        values = ", ".join(
            f"{each.name} {each.text(each.value(best.spec.control))}" for each in dimensions(record.spec.optional)
        )
        sentence = f"The best trial, {best.name}, {verb} {figure}{beside}. To train with its thresholds ({values}):"
        return Recommendation(sentence=sentence, command=to_repeat("run", best.folder), best=best)
    name = better.spec.method.upper()
    little_is_better = objective.name in ("time", "memory") or (_SAYS[objective.name] is _METRIC and not goal.maximize)
    relation = "above" if little_is_better else "below"
    sentence = (
        f"The best trial, {best.name}, {verb} {figure}, {relation} {name}'s {say(better.figures, goal)}: on this task "
        f"and hardware train with {name}."
    )
    return Recommendation(sentence=sentence, command=to_repeat("run", better.folder), best=best, beaten_by=name)


def _why_none(record: SearchRecord) -> str:
    finished = sum(run.status == "finished" for run in record.trials)
    if not finished:
        ends = Counter(run.status for run in record.trials)
        told = ", ".join(f"{count} {status}" for status, count in ends.most_common()) or "none has begun"
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
        f"None of the {finished} finished trials reaches{limit} (AMP with a margin of {objective.margin_text}): "
        f"allow more trials, more epochs or a larger --margin.{reasons}"
    )
