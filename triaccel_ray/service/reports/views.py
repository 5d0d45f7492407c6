"""Results for people: a table in the terminal, pictures and a page in the folder, and what to type next."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from triaccel_ray.service.console import out, rich_table
from triaccel_ray.service.reports.figure_style import save
from triaccel_ray.service.reports.figures import run_figures
from triaccel_ray.service.reports.importance import importance
from triaccel_ray.service.reports.notes import run_notes, sharing_note
from triaccel_ray.service.reports.pareto import Outcome, pareto_front
from triaccel_ray.service.reports.report import REPORT, Section, write_page
from triaccel_ray.service.reports.run_page import write_run_page
from triaccel_ray.service.reports.search_figures import coordinates, importance_bars, parallel_coordinates
from triaccel_ray.service.reports.tables import result_grid, run_grid, search_grid
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.searches.finding import write_found
from triaccel_ray.service.searches.search import SearchRecord, best_trial, ranked
from triaccel_ray.service.storage.layout import EVENTS, FIGURES
from triaccel_ray.service.translation import command_of


def view_run(run: RunRecord) -> None:
    """Shows a run's epochs and result, and writes its pictures and page."""
    grid = run_grid(run)
    title = f"{run.name}: {run.spec.task}, {METHODS[run.spec.method]}, {run.status}"
    out.print(rich_table(grid, title=title) if grid.rows else title)
    if run.end is not None and run.end.results:
        out.print(rich_table(result_grid(run.end.results), title="result"))
    notes = "\n".join(run_notes(run))
    if notes:
        out.print(f"\n{notes}")
    _announce(write_run_page(run, run_figures(run.folder / EVENTS, run.folder / FIGURES)))


def view_search(record: SearchRecord) -> None:
    """Shows a search's trials and the best thresholds, and writes its pictures and page."""
    grid, spec = search_grid(record), record.spec
    done = sum(run.status in ("finished", "stopped") for run in record.trials)
    out.print(rich_table(grid, title=f"{record.folder.name}: {spec.base.task}, {done} trials"))
    best = best_trial(record)
    if best is None:
        text = _why_none(record)
        out.print(f"\n{text}")
        sections = [Section(title="Best thresholds", text=text)]
    else:
        command = command_of(best.spec)
        out.print(f"\nbest thresholds ({best.name}); to train with them:")
        out.print(command, soft_wrap=True)
        if (path := write_found(record)) is not None:
            out.print(f"kept, with what it takes to find them again: {path}", soft_wrap=True)
        sections = [Section(title=f"Best thresholds: {best.name}", command=command)]
    incidents = [
        f"{run.name} was interrupted ({each.cause}): {each.message}"
        for run in (*record.baselines.values(), *record.trials)
        for each in run.interruptions
    ]
    incidents += [f"{name} is left out: {problem}" for name, problem in record.damaged.items()]
    if incidents:
        text = "\n".join(incidents)
        out.print(f"\n{text}", markup=False, soft_wrap=True)
        sections.append(Section(title="Interruptions", text=text))
    picture = save_pareto_front(record)
    if picture is not None:
        sections.append(Section(title="Accuracy against time and memory", pictures=[picture]))
    sections.append(Section(title="Trials, best first", header=grid.header, rows=grid.rows, text=grid.note))
    sections += _threshold_sections(record, best)
    sections += _timelines(record)
    _announce(write_page(record.folder / REPORT, f"{record.folder.name}: {spec.base.task}", sections))


def _why_none(record: SearchRecord) -> str:
    """Returns why a search has no best trial, and what to change."""
    if any(run.status == "finished" for run in record.trials):
        return "no trial that ran to its end is within the margin: allow more trials, epochs or --margin"
    ends = Counter(run.status for run in record.trials)
    told = ", ".join(f"{count} {status}" for status, count in ends.most_common()) or "none has begun"
    ways = {
        "out_of_memory": "give more --memory-headroom or --memory-budget, or a smaller --batch-size",
        "non_finite": "give a smaller --lr",
        "disk_full": "make room, then `triaccel resume`",
    }
    causes = {run.end.cause for run in record.trials if run.end is not None}
    way_out = "; ".join(way for cause, way in ways.items() if cause in causes)
    way_out = way_out or "see the reasons below, then `triaccel resume` tries them again"
    return f"no trial ran to its end ({told}): {way_out}"


def _threshold_sections(record: SearchRecord, best: RunRecord | None) -> list[Section]:
    """Returns where the trials lie among the thresholds, and which of these mattered."""
    about, folder = record.folder.name, record.folder / FIGURES
    scales, lines = coordinates(record, best)
    if not lines:
        return []
    picture = save(parallel_coordinates(scales, lines, about=about), folder / "parallel_coordinates.png")
    found = importance(record)
    bars = [save(importance_bars(found.shares, about=about), folder / "importance.png")] if found.shares else []
    return [
        Section(title="Trials across thresholds", pictures=[picture]),
        Section(title="Importance of each threshold", text=found.sentence, pictures=bars),
    ]


def _timelines(record: SearchRecord) -> list[Section]:
    """Returns a folded section for each trial that has a picture to show, best first."""
    order = [run for _, run in ranked(record)]
    order += [run for run in record.trials if run.figures is None]
    sections = []
    for run in order:
        pictures = run_figures(run.folder / EVENTS, run.folder / FIGURES)
        figures = run.figures
        result = "" if figures is None else f", {figures.accuracy:.2f} %, score {figures.score:.2f}"
        title = f"{run.name}: {run.status} after {len(run.epochs)} epochs{result}"
        notes = "\n".join(run_notes(run))
        sections.append(Section(title=title, text=notes, pictures=pictures, folded=True))
    text = "Precision of each layer, batch size, memory and learning rates over the steps; open a trial by its name."
    return [Section(title="What the loop did in each trial", text=text), *sections] if sections else []


def save_pareto_front(record: SearchRecord) -> Path | None:
    """Writes the picture of all configurations that ran to their end and returns its path; None without any."""
    objective = record.objective
    outcomes = []
    for run in (*record.baselines.values(), *record.trials):
        figures = run.figures
        if figures is None or run.spec.method == "probe" or run.status != "finished":
            continue
        feasible = objective.shortfall(run.epochs[-1].epoch, figures.accuracy) == 0.0
        outcomes.append(
            Outcome(
                label=run.name,
                method=run.spec.method,
                accuracy=figures.accuracy,
                seconds=figures.seconds,
                peak_gb=figures.peak_gb,
                score=figures.score,
                feasible=feasible,
            )
        )
    if not outcomes:
        return None
    floor = objective.reference[-1] - objective.margin if objective.reference else None
    about = "; ".join(filter(None, (record.folder.name, sharing_note(record.spec.base))))
    front = pareto_front(outcomes, accuracy_floor=floor, about=about)
    return save(front, record.folder / FIGURES / "pareto.png")


def _announce(page: Path) -> None:
    out.print(f"\npage: {page}", soft_wrap=True)
