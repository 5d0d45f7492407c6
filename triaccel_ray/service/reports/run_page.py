"""The page of one run: result, epochs, what the loop did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triaccel_ray.service.reports.notes import run_notes
from triaccel_ray.service.reports.report import REPORT, Section, write_page
from triaccel_ray.service.reports.tables import result_grid, run_grid
from triaccel_ray.service.runs.record import RunRecord


def write_run_page(run: RunRecord, pictures: Sequence[Path]) -> Path:
    """Writes the page into the run's folder and returns its path."""
    grid = run_grid(run)
    sections = [Section(title="Epochs", header=grid.header, rows=grid.rows)]
    if run.end is not None and run.end.results:
        result = result_grid(run.end.results)
        sections.insert(0, Section(title="Result", header=result.header, rows=result.rows))
    sections.append(Section(title="What the loop did", text="\n".join(run_notes(run)), pictures=pictures))
    return write_page(run.folder / REPORT, f"{run.name}: {run.spec.task}", sections)
