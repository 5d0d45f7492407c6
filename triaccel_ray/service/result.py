"""A run, search or comparison for Python and notebooks: what `triaccel report` shows, as values."""

from __future__ import annotations

import html
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triaccel_ray.config import ControlConfig
from triaccel_ray.service.cli.options import DEFAULT_STORAGE, Where
from triaccel_ray.service.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from triaccel_ray.search_spaces.tuned import TunedThresholds
    from triaccel_ray.service.report.report import View

WIDTH: Final = 200
"""Columns of printed tables: none of theirs is left out then."""
_FRAME: Final = "<iframe sandbox style='width:100%;height:45rem;border:0' srcdoc='{page}'></iframe>"


class Report:
    """A run, search or comparison; printed it is its tables, in a notebook its page.

    `pandas.DataFrame(report.rows)` is its table, and `ControlLoop(..., config=report.control)` trains with what a
    search has found.
    """

    def __init__(self, name: str | Path, storage_path: str | Path = DEFAULT_STORAGE.storage) -> None:
        """Reads what is called `name` in the storage path, or lies in the folder `name`; draws pictures and page.

        Raises:
            LogError: there is none, or it is damaged.
            ValueError: it is no name, or the storage path cannot be used.
        """
        from triaccel_ray.service.lookup import find
        from triaccel_ray.service.report.view import view_at

        text = str(name.absolute()) if isinstance(name, Path) else name
        self._view = view_at(find(text, Where(storage_path=StoragePath(str(storage_path)))))

    @classmethod
    def of(cls, view: View) -> Report:
        """Returns the report of what has been looked at already."""
        report = cls.__new__(cls)
        report._view = view
        return report

    @property
    def name(self) -> str:
        """Its name in the storage folder."""
        return self.folder.name

    @property
    def folder(self) -> Path:
        """Where its logs, pictures and checkpoints are on this machine."""
        return self._view.folder

    @property
    def page(self) -> Path:
        """The page with tables and pictures, a single HTML file."""
        return self._view.page

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table that matters most, a dict a row: a run's epochs, a search's trials, a comparison's methods.

        Figures are as they are printed, but numbers: 94.2 ± 0.1 becomes two, the second headed `±`. `behind AMP` says
        of a trial that it is so by more than the margin.
        """
        return [dict(row) for row in self._view.rows]

    @property
    def best(self) -> TunedThresholds | None:
        """Of a search: the best thresholds, and what it takes to find them again; None where none was found."""
        return self._view.best

    @property
    def control(self) -> ControlConfig | None:
        """Settings for a `ControlLoop`: a run's own, a search's best, a comparison's; None where none was found."""
        return self._view.control

    @property
    def command(self) -> str:
        """The command to train with; empty where nothing can be recommended."""
        return self._view.command

    def __str__(self) -> str:
        """Returns what `triaccel report` prints."""
        from triaccel_ray.service.console import SafeConsole
        from triaccel_ray.service.report.report import show

        text = StringIO()
        as_text: dict[str, Any] = {"color_system": None, "force_terminal": False, "force_jupyter": False}
        show(self._view, SafeConsole(file=text, width=WIDTH, highlight=False, markup=False, emoji=False, **as_text))
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        return f"Report({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        return _FRAME.format(page=html.escape(self.page.read_text()))
