"""Results for people: tables and sentences, pictures and a page in the folder, and what to type next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.compare.comparison import COMPARISON, read_comparison
from triaccel_ray.service.console import err
from triaccel_ray.service.failures import StoreError
from triaccel_ray.service.report.comparison_view import view_comparison
from triaccel_ray.service.report.curves import Curve, learning_curves
from triaccel_ray.service.report.figure_style import BLUE, GREY, METHOD_LOOKS, NAVY, save
from triaccel_ray.service.report.figures import run_figures
from triaccel_ray.service.report.importance import importance
from triaccel_ray.service.report.notes import run_notes, sharing_note
from triaccel_ray.service.report.pareto import BASELINES, Outcome, pareto_front
from triaccel_ray.service.report.provenance import about, troubles
from triaccel_ray.service.report.recommendation import Recommendation, recommendation
from triaccel_ray.service.report.report import REPORT, Section, write_page
from triaccel_ray.service.report.run_page import own_command, write_run_page
from triaccel_ray.service.report.search_figures import coordinates, importance_bars, parallel_coordinates
from triaccel_ray.service.report.tables import STAR, Grid, result_grid, run_grid, search_grid
from triaccel_ray.service.report.view import View
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.runs.record import RunRecord, read_run
from triaccel_ray.service.search.search import FOUND, SEARCH, SearchRecord, found_in, ranked, read_search
from triaccel_ray.service.search.suggestions import trial_name
from triaccel_ray.service.storage.layout import EVENTS, FIGURES
from triaccel_ray.service.storage.mirror import push_commands
from triaccel_ray.service.storage.storage_path import StoragePath


def view_at(place: StoragePath) -> View:
    """Returns the run, search or comparison at `place`, with pictures and page written, which a store gets too.

    Raises:
        LogError: there is none, or it is damaged.
    """
    folder = place.folder
    if (folder / SEARCH).exists():
        view = view_search(read_search(folder))
    elif (folder / COMPARISON).exists():
        view = view_comparison(read_comparison(folder))
    else:
        view = view_run(read_run(folder))
    try:
        push_commands(place)
    except StoreError as error:  # reading was allowed, and all that was asked for
        err.print(f"the page stays on this machine: {error}", style="yellow", soft_wrap=True)
    return view


def view_run(run: RunRecord) -> View:
    """Returns a run's epochs and result, and writes its pictures and page."""
    grid = run_grid(run)
    title = f"{run.name}: {run.spec.task}, {METHODS[run.spec.method]}, {run.status}"
    shown: list[str | Grid] = [replace(grid, title=title) if grid.rows else title]
    if run.end is not None and run.end.results:
        shown.append(replace(result_grid(run.end.results, run.start.goal), title="result"))
    notes = "\n".join([*run_notes(run), *(line for section in troubles({run.name: run}) for line in section.lines)])
    page = write_run_page(run, run_figures(run.folder / EVENTS, run.folder / FIGURES))
    return View(
        folder=run.folder,
        shown=[*shown, *([f"\n{notes}"] if notes else []), f"\npage: {page}"],
        rows=grid.as_dicts(),
        page=page,
        command=own_command(run),
        control=run.spec.method_control,
    )


def view_search(record: SearchRecord) -> View:
    """Returns a search's trials and what to train with, and writes its pictures and page."""
    grid, spec = search_grid(record), record.spec
    done = sum(run.status in ("finished", "stopped") for run in record.trials)
    title = f"{record.folder.name}: {spec.base.task}, {done} of {spec.num_trials} trials"
    advice, found = recommendation(record), found_in(record)
    shown: list[str | Grid] = [replace(grid, title=title), f"\n{advice.sentence}"]
    shown += [advice.command] if advice.command else []
    if found is not None:
        path = record.folder / FOUND
        shown.append(f"thresholds of the best trial, and what it takes to find them again: {path}")
    runs = {**{f"baseline {name}": run for name, run in record.baselines.items()}, **named(record.trials)}
    unwell = troubles(runs, missing_runs(record), record.damaged)
    shown += ["\n".join(["", *section.lines]) for section in unwell]
    sections = _sections(record, advice, grid, unwell)
    page = write_page(record.folder / REPORT, f"{record.folder.name}: {spec.base.task}", sections)
    return View(
        folder=record.folder,
        shown=[*shown, f"\npage: {page}"],
        rows=[
            {**row, "behind AMP": any(cell.endswith(STAR) for cell in cells)}
            for row, cells in zip(grid.as_dicts(), grid.rows, strict=True)
        ],
        page=page,
        command=advice.command,
        control=None if found is None else found.onto(spec.base.control),
        best=found,
    )


def _sections(record: SearchRecord, advice: Recommendation, grid: Grid, unwell: Sequence[Section]) -> list[Section]:
    """Returns what the page of a search shows, pictures included; `unwell` is what went wrong."""
    spec = record.spec
    is_beaten = bool(advice.beaten_by) or advice.best is None
    said = Section(text="" if is_beaten else advice.sentence, notice=advice.sentence if is_beaten else "")
    facts = {
        "what": f"search of {spec.num_trials} trials in space {spec.space}, objective {spec.objective}, margin "
        f"{record.objective.margin_text}",
        "seed": f"{spec.base.seed}, sampler {spec.seed}",
    }
    sections = [replace(said, command=advice.command)]
    sections += about(
        spec.base, [*record.baselines.values(), *record.trials], facts, to_repeat("search", record.folder)
    )
    sections += unwell
    if (picture := save_pareto_front(record)) is not None:
        sections.append(
            Section(title=f"{spec.base.goal.words.capitalize()} against time and memory", pictures=[picture])
        )
    sections.append(Section(title="Trials, best first", header=grid.header, rows=grid.rows, text=grid.note))
    if curves := _curves(record, advice.best):
        picture = save(
            learning_curves(curves, spec.base.goal, about=record.folder.name), record.folder / FIGURES / "curves.png"
        )
        sections.append(Section(title="Learning curves and time", pictures=[picture]))
    return [*sections, *_threshold_sections(record, advice.best), *_timelines(record)]


def named(runs: Iterable[RunRecord]) -> dict[str, RunRecord]:
    """Returns the runs by name."""
    return {run.name: run for run in runs}


def missing_runs(record: SearchRecord) -> list[str]:
    """Returns the names of the runs that the search asked for and that have not begun."""
    baselines = ("fp32", "amp", *(["probe"] if record.spec.space == "thresholds" else []))
    missing = [f"baseline {name}" for name in baselines if name not in record.baselines]
    begun = {run.name for run in record.trials} | record.damaged.keys()
    return missing + [name for name in map(trial_name, range(record.spec.num_trials)) if name not in begun]


def _curves(record: SearchRecord, best: RunRecord | None) -> list[Curve]:
    """Returns the curves of all trials, the baselines and the best trial above the others."""
    curves = []
    for run in record.trials:
        is_best, pruned = best is not None and run.name == best.name, run.status == "stopped"
        look = (NAVY, 2.6, 1.0) if is_best else (GREY, 1.0, 0.7) if pruned else (BLUE, 1.2, 0.6)
        label = f"best trial ({run.name})" if is_best else "stopped early (pruned)" if pruned else "trial"
        colour, width, opacity = look
        curve = Curve(label=label, colour=colour, epochs=run.epochs, width=width, opacity=opacity, pruned=pruned)
        curves += [(is_best, curve)] if run.epochs else []
    drawn = [curve for _, curve in sorted(curves, key=lambda pair: pair[0])]
    for name, label in BASELINES.items():
        baseline = record.baselines.get(name)
        if baseline is not None and baseline.epochs:
            drawn.append(Curve(label=label, colour=METHOD_LOOKS[name][1], epochs=baseline.epochs, width=2.2))
    return drawn


def _threshold_sections(record: SearchRecord, best: RunRecord | None) -> list[Section]:
    """Returns where the trials lie among the thresholds, and which of these mattered."""
    name, folder = record.folder.name, record.folder / FIGURES
    scales, lines = coordinates(record, best)
    if not lines:
        return []
    picture = save(parallel_coordinates(scales, lines, about=name), folder / "parallel_coordinates.png")
    sections = [Section(title="Trials across thresholds", pictures=[picture])]
    if (found := importance(record)) is not None:
        bars = [save(importance_bars(found, about=name), folder / "importance.png")] if found.shares else []
        sections.append(Section(title="Importance of each threshold", text=found.sentence, pictures=bars))
    return sections


def _timelines(record: SearchRecord) -> list[Section]:
    """Returns a folded section for each trial that has a picture to show, best first."""
    order = [run for _, run in ranked(record)]
    order += [run for run in record.trials if run.figures is None]
    sections = []
    for run in order:
        pictures = run_figures(run.folder / EVENTS, run.folder / FIGURES)
        figures = run.figures
        result = "" if figures is None else f", {run.start.goal.text(figures.metric)}, score {figures.score:.2f}"
        title = f"{run.name}: {run.status} after {run.epochs[-1].epoch if run.epochs else 0} epochs{result}"
        notes = "\n".join(run_notes(run))
        sections.append(Section(title=title, text=notes, pictures=pictures, folded=True))
    text = "Precision of each layer, batch size, memory and learning rates over the steps; open a trial by its name."
    return [Section(title="What the loop did in each trial", text=text), *sections] if sections else []


def save_pareto_front(record: SearchRecord) -> Path | None:
    """Writes the picture of all configurations that were judged and returns its path; None without any."""
    objective = record.objective
    outcomes = []
    for run in (*record.baselines.values(), *record.trials):
        figures = run.figures
        if figures is None or run.spec.method == "probe" or run.status not in ("finished", "stopped"):
            continue
        feasible = objective.shortfall(run.epochs[-1].epoch, figures.metric) == 0.0
        outcomes.append(
            Outcome(
                label=run.name,
                method=run.spec.method,
                metric=figures.metric,
                seconds=figures.seconds,
                peak_gb=figures.peak_gb,
                score=figures.score,
                feasible=feasible,
                pruned=run.status == "stopped",
            )
        )
    if not outcomes:
        return None
    limit = objective.limit if objective.reference else None
    subtitle = "; ".join(filter(None, (record.folder.name, sharing_note(record.spec.base))))
    front = pareto_front(outcomes, objective.goal, limit=limit, about=subtitle)
    return save(front, record.folder / FIGURES / "pareto.png")
