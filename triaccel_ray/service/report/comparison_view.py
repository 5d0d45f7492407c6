"""A comparison for people: tables, in Markdown and on a page too, and two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from triaccel_ray.service.cli.options import to_repeat
from triaccel_ray.service.compare.comparison import Choices, Comparison, final_runs
from triaccel_ray.service.compare.spec import ABLATION
from triaccel_ray.service.report.comparison_figures import save_comparison_figures
from triaccel_ray.service.report.comparison_tables import (
    against_reference_grid,
    label,
    row_above_grid,
    settings_grid,
    to_standard_grid,
    trials_grid,
    values_grid,
)
from triaccel_ray.service.report.curves import Curve, learning_curves
from triaccel_ray.service.report.figure_style import METHOD_LOOKS, save
from triaccel_ray.service.report.notes import sharing_note
from triaccel_ray.service.report.provenance import about, troubles
from triaccel_ray.service.report.report import REPORT, Section, write_page
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.report.view import View
from triaccel_ray.service.runs.methods import FIXED, METHODS
from triaccel_ray.service.storage.layout import FIGURES
from triaccel_ray.trainables.task import Purpose

COMPARISON_MARKDOWN = "comparison.md"
_NO_ACCURACY = "The test samples are read once, at the end of each run: on the way there is the training loss alone."


def view_comparison(record: Comparison) -> View:
    """Returns the tables, and writes them as Markdown and, with pictures, as a page."""
    folder, spec = record.folder, record.spec
    tables = comparison_tables(record)
    shown: list[str | Grid] = []
    for title, grid in tables.items():
        shown += [replace(grid, title=f"{folder.name}: {title}"), ""]
    command = _command_of_best_fixed(record)
    shown += ["to train with the best fixed setting:", command] if command else []
    unwell = troubles({**record.trials, **record.runs}, _missing(record))
    shown += ["\n".join(["", *section.lines]) for section in unwell]
    text = "\n".join(f"## {title}\n\n{grid.markdown()}" for title, grid in tables.items())
    (folder / COMPARISON_MARKDOWN).write_text(f"# {folder.name}: {spec.base.task}\n\n{text}")
    sections = _sections(record, tables, unwell, command)
    page = write_page(folder / REPORT, f"{folder.name}: {spec.base.task}", sections)
    return View(
        folder=folder,
        shown=[*shown, f"\npage: {page}"],
        rows=values_grid([record.results(method) for method in spec.all_methods]).as_dicts(),
        page=page,
        command=command,
        control=spec.base.control,
    )


def _sections(record: Comparison, tables: Mapping[str, Grid], unwell: Sequence[Section], command: str) -> list[Section]:
    """Returns what the page shows, pictures included; `unwell` is what went wrong, `command` trains the best fixed."""
    folder, spec = record.folder, record.spec
    results = [record.results(method) for method in spec.all_methods]
    subtitle = "; ".join(filter(None, (f"{spec.base.task}, {spec.num_seeds} seeds", sharing_note(spec.base))))
    pictures = save_comparison_figures(results, folder / FIGURES, about=subtitle)
    facts = {"what": f"comparison of {', '.join(map(label, spec.all_methods))}", "seeds": f"0 to {spec.num_seeds - 1}"}
    sections = about(spec.base, list(record.runs.values()), facts, to_repeat("compare", folder))
    sections += unwell
    sections += [
        Section(title=title, header=grid.header, rows=_filled(grid.rows), text=grid.note)
        for title, grid in tables.items()
    ]
    place = 2 + len(unwell)  # below the first table
    if pictures:
        sections.insert(
            place, Section(title="Pictures", text="Bars: standard deviation over seeds.", pictures=pictures)
        )
    if curves := _curves(record):
        picture = save(learning_curves(curves, spec.base.goal, about=subtitle), folder / FIGURES / "curves.png")
        said = "" if spec.base.purpose is Purpose.SEARCH else _NO_ACCURACY
        sections.insert(place + bool(pictures), Section(title="Learning and time", text=said, pictures=[picture]))
    if command:
        sections.append(Section(title="To train with the best fixed setting", command=command))
    methods = [[label(method), METHODS[method]] for method in spec.all_methods]
    sections.append(Section(title="What the methods are", header=("method", ""), rows=methods, has_sentences=True))
    return sections


def _missing(record: Comparison) -> list[str]:
    """Returns the names of the final runs that were asked for and have not begun."""
    return [name for name in final_runs(record.spec, record.choices or Choices()) if name not in record.runs]


def _curves(record: Comparison) -> list[Curve]:
    """Returns a curve for each final run; the seeds of a method have its colour."""
    return [
        Curve(label=label(method), colour=METHOD_LOOKS[method][1], epochs=run.epochs, opacity=0.8)
        for method in record.spec.all_methods
        for run in record.runs.values()
        if run.spec.method == method and run.epochs
    ]


def _filled(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Returns the rows with the method in each, so that they may be sorted."""
    filled: list[Sequence[str]] = []
    for row in rows:
        filled.append(row if row[0] or not filled else [filled[-1][0], *row[1:]])
    return filled


def comparison_tables(record: Comparison) -> dict[str, Grid]:
    """Returns the tables by title, in the order in which they are read."""
    first = [record.results(method) for method in record.spec.table_1]
    second = [record.results(method) for method in record.spec.table_2]
    mark = sharing_note(record.spec.base)
    tables = {
        "Table 1, test samples, read once by each run": values_grid(first, mark=mark),
        "Table 1, differences to AMP": against_reference_grid(first),
    }
    if second:
        tables["Table 2, the ablation"] = values_grid(second, ABLATION, mark=mark)
        tables["Table 2, differences to the row above"] = row_above_grid(second)
        tables["Table 2, differences to standard"] = to_standard_grid(second)
    if record.choices is not None:
        tables["What each method trained with"] = settings_grid(record)
    if record.trials:
        tables["What was chosen on validation samples"] = trials_grid(record)
    return tables


def _command_of_best_fixed(record: Comparison) -> str:
    """Returns the command that trains with the best fixed setting; empty where there is none yet."""
    if record.choices is None or record.choices.fixed is None:
        return ""
    return to_repeat("run", record.folder / f"{FIXED}-seed0")
