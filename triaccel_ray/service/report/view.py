"""A result for people, as a value: what a terminal shows of it, its figures, and the page that has been written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from triaccel_ray.config import ControlConfig
from triaccel_ray.search_spaces.tuned import TunedThresholds
from triaccel_ray.service import console
from triaccel_ray.service.console import rich_table
from triaccel_ray.service.report.tables import Grid


@dataclass(frozen=True, kw_only=True)
class View:
    """A run, search or comparison, looked at."""

    folder: Path
    shown: Sequence[str | Grid]
    """What a terminal shows, in this order."""
    rows: Sequence[Mapping[str, Any]]
    """The table that matters most, by heading: a run's epochs, a search's trials, a comparison's methods."""
    page: Path
    """The page, which has been written."""
    command: str = ""
    """What to train with; empty where nothing can be recommended."""
    control: ControlConfig | None = None
    """Thresholds to train with: a run's own, the best that a search has found, a comparison's."""
    best: TunedThresholds | None = None
    """What a search has found; None before that, and of anything else."""


def show(view: View, to: Console | None = None) -> None:
    """Shows the view in a terminal; standard output unless another is given."""
    terminal = to or console.out
    for part in view.shown:
        if isinstance(part, Grid):
            terminal.print(rich_table(part, to=terminal))
        else:
            terminal.print(part, soft_wrap=True)
