"""The service for Python and notebooks: training, searching, comparing, and their results as values."""

from __future__ import annotations

import html
import os
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triaccel_ray.config import ControlConfig
from triaccel_ray.service.cli.keywords import command_of, with_options_of
from triaccel_ray.service.cli.options import DEFAULT_STORAGE, Where
from triaccel_ray.service.cli.parsing import check
from triaccel_ray.service.cli.specs import Compare, Run, Search, Trains
from triaccel_ray.service.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from triaccel_ray.search_spaces.tuned import TunedThresholds
    from triaccel_ray.service.report.report import View
    from triaccel_ray.trainables.task import Task

WIDTH: Final = 200
"""Columns of printed tables: none of theirs is left out then."""


@with_options_of(Run)
def run(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Trains one job and returns its report.

    Options are those of `triaccel run --help-all`, with underscores: `run("digits", epochs=3, memory_budget="2GiB")`.
    Ctrl-C, or a notebook's stop button, ends it in good order, and the message has the command that resumes it.

    A Ray that the process uses already is used, else one starts on this machine, or `address` names one.

    Args:
        task: the name of a bundled task, `package.module:Class`, or a class that other processes can import; None
            with `from_="NAME"`, which repeats what has this name.
        **options: as `help(run)` lists them. A size may also be a number of bytes.

    Raises:
        TypeError: there is no such option, or the task is neither name nor class.
        ValueError, FileNotFoundError: an option, or something that it names, cannot be used; the message says why.
        RunFailedError: the run has failed; the message has the cause, and where its log and checkpoint are.
    """
    return _carried_out(command_of(Run, task, options))


@with_options_of(Search)
def search(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Finds thresholds on the validation split, against FP32 and AMP, and returns the search's report.

    Options are those of `triaccel search --help-all`: `search("digits", trials=8, epochs=3)`. The rest is as in `run`.

    Raises:
        RunFailedError: a baseline has failed, or every trial. Where some have, messages and the report tell.
    """
    return _carried_out(command_of(Search, task, options))


@with_options_of(Compare)
def compare(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Compares FP32, AMP and Tri-Accel on the test set, over several seeds, and returns the comparison's report.

    Options are those of `triaccel compare --help-all`: `compare("digits", seeds=3, fixed=4)`. The rest is as in `run`.

    Raises:
        RunFailedError: every run has failed. Where some have, messages and the report tell.
    """
    return _carried_out(command_of(Compare, task, options))


def _carried_out(command: Trains) -> Report:
    check(command)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's own tables, even when told to be silent
    from triaccel_ray.service.commands.train import carry_out
    from triaccel_ray.service.failures import RunsFailedError

    outcome = carry_out(command)
    if outcome.failures and outcome.num_finished == 0:
        raise RunsFailedError(outcome.failures)
    assert outcome.view is not None  # something new has been trained
    return Report.of(outcome.view)


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
        from triaccel_ray.service.report.view import view_at
        from triaccel_ray.service.session import find

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

        plain: dict[str, Any] = {"color_system": None, "force_terminal": False, "force_jupyter": False, "width": WIDTH}
        terminal = SafeConsole(file=StringIO(), highlight=False, markup=False, emoji=False, **plain)
        with terminal.capture() as printed:
            show(self._view, terminal)
        return printed.get().rstrip()

    def __repr__(self) -> str:
        return f"Report({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        style = "width:100%;height:45rem;border:0"
        return f"<iframe sandbox style='{style}' srcdoc='{html.escape(self.page.read_text())}'></iframe>"
