"""The page of one run: where it comes from, result, what the loop did, epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triaccel_ray.service.cli.options import settings_text, to_repeat
from triaccel_ray.service.report.notes import run_notes
from triaccel_ray.service.report.provenance import about, troubles
from triaccel_ray.service.report.report import REPORT, Section, write_page
from triaccel_ray.service.report.tables import result_grid, run_grid
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.runs.record import OWN_CODE, RunRecord


def write_run_page(run: RunRecord, pictures: Sequence[Path]) -> Path:
    """Writes the page into the run's folder and returns its path."""
    spec = run.spec
    facts = {"method": f"{spec.method}: {METHODS[spec.method]}", "status": run.status, "seed": str(spec.seed)}
    sections = about(spec, [run], facts, own_command(run))
    if run.end is not None and run.end.results:
        result = result_grid(run.end.results, run.start.goal)
        sections.append(Section(title="Result", header=result.header, rows=result.rows, text=result.note))
    sections += troubles({run.name: run})
    sections.append(Section(title="What the loop did", text="\n".join(run_notes(run)), pictures=pictures))
    grid = run_grid(run)
    sections.append(Section(title="Epochs", header=grid.header, rows=grid.rows))
    sections.append(Section(title="All settings", command=settings_text(spec), folded=True))
    return write_page(run.folder / REPORT, f"{run.name}: {spec.task}", sections)


def own_command(run: RunRecord) -> str:
    """Returns the command that trains the same again; empty for a run of a user's own code."""
    if run.spec.task == OWN_CODE:
        return ""
    return to_repeat("run", run.folder)
