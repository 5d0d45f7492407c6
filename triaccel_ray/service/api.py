"""The API for Python and notebooks: `run`, `search`, `compare` and `tune_batch`, each of which returns a `Report`."""

from __future__ import annotations

import html
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triaccel_ray.config import ControlConfig
from triaccel_ray.service.cli.arguments import Compare, Run, Search, TrainingCommand, TuneBatch
from triaccel_ray.service.cli.options import DEFAULT_STORAGE, Locations
from triaccel_ray.service.cli.parsing import check, command_of
from triaccel_ray.service.console import SafeConsole
from triaccel_ray.service.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from triaccel_ray.search_spaces.tuned import TunedThresholds
    from triaccel_ray.service.report.report import View
    from triaccel_ray.trainables.task import Task

WIDTH: Final = 200
"""Width of printed tables in characters; wide enough that no column is dropped."""


def run(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Trains one job and returns its report.

    Options are those of `triaccel run --help-all`, with underscores: `run("digits", epochs=3, memory_budget="2GiB")`.
    Ctrl-C, or a notebook's stop button, stops the run cleanly, and the message has the command that resumes it.

    Uses the Ray that this process is connected to, else the cluster at `address`, else starts Ray on this machine.

    Args:
        task: the name of a bundled task, `package.module:Class`, or a class that other processes can import; None
            with `from_="NAME"`, which repeats the run of this name.
        **options: as in `docs/cli.md`. A size may also be a number of bytes, and `on` or `off` a bool.

    Raises:
        TypeError: an option does not exist, or the task is neither a name nor a class.
        ValueError, FileNotFoundError: an option, or something that it names, cannot be used; the message says why.
        RunFailedError: the run failed; the message has the cause, and where its log and checkpoint are.
    """
    return _carried_out(command_of(Run, task, options))


def search(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Searches thresholds on the validation split, against FP32 and AMP baselines, and returns the search's report.

    Options are those of `triaccel search --help-all`: `search("digits", trials=8, epochs=3)`. The rest is as in `run`.

    Raises:
        RunFailedError: a baseline or every trial failed. If only some trials failed, messages and the report name them.
    """
    return _carried_out(command_of(Search, task, options))


def compare(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Compares FP32, AMP and Tri-Accel on the test set, over several seeds, and returns the comparison's report.

    Options are those of `triaccel compare --help-all`: `compare("digits", seeds=3, fixed=4)`. The rest is as in `run`.

    Raises:
        RunFailedError: every run failed. If only some failed, messages and the report name them.
    """
    return _carried_out(command_of(Compare, task, options))


def tune_batch(task: str | type[Task] | None = None, **options: Any) -> Report:
    """Times batch sizes, and returns the report: `rows` has the sizes, `command` trains at the efficient one.

    Options are those of `triaccel tune-batch --help-all`: `tune_batch("digits", batch_max=256)`. The rest is as in
    `run`.

    Raises:
        RunFailedError: it failed; if out of memory, not even the smallest batch fits.
    """
    return _carried_out(command_of(TuneBatch, task, options))


def _carried_out(command: TrainingCommand) -> Report:
    check(command)
    from triaccel_ray.service.commands.train import carry_out
    from triaccel_ray.service.failures import AllRunsFailedError

    outcome = carry_out(command)
    if outcome.failures:
        raise AllRunsFailedError(outcome.failures)
    assert outcome.view is not None  # something new has been trained
    return Report.of(outcome.view)


class Report:
    """A run, search or comparison. Prints as tables; a notebook shows its HTML page.

    `pandas.DataFrame(report.rows)` is the main table. `ControlLoop(..., config=report.control)` trains with the
    thresholds that a search found.
    """

    def __init__(self, name: str | Path, storage_path: str | Path = DEFAULT_STORAGE.storage) -> None:
        """Loads the result called `name` in the storage path, or in the folder `name`; writes its pictures and page.

        Raises:
            LogError: there is no such result, or it is damaged.
            ValueError: `name` is not a valid name, or the storage path cannot be used.
        """
        from triaccel_ray.service.locations import find
        from triaccel_ray.service.report.view import view_at

        text = str(name.absolute()) if isinstance(name, Path) else name
        self._view = view_at(find(text, Locations(storage_path=StoragePath(str(storage_path)))))

    @classmethod
    def of(cls, view: View) -> Report:
        """Returns the report of a result that is already loaded."""
        report = cls.__new__(cls)
        report._view = view
        return report

    @property
    def name(self) -> str:
        """Name in the storage folder."""
        return self.folder.name

    @property
    def folder(self) -> Path:
        """Folder of logs, pictures and checkpoints on this machine."""
        return self._view.folder

    @property
    def page(self) -> Path:
        """The page with tables and pictures, as a single HTML file."""
        return self._view.page

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The main table, one dict per row: a run's epochs, a search's trials, a comparison's methods.

        Values are the printed figures as numbers: 94.2 ± 0.1 becomes two, the second under the heading `±`.
        `behind AMP` is true for a trial that is worse than AMP by more than the margin.
        """
        return [dict(row) for row in self._view.rows]

    @property
    def best(self) -> TunedThresholds | None:
        """A search's best thresholds, and how to reproduce them; None if none were found."""
        return self._view.best

    @property
    def control(self) -> ControlConfig | None:
        """Settings for a `ControlLoop`: a run's own, a search's best, a comparison's; None if none were found."""
        return self._view.control

    @property
    def command(self) -> str:
        """The recommended command to train with; empty if there is none."""
        return self._view.command

    def __str__(self) -> str:
        """Returns what `triaccel report` prints."""
        from triaccel_ray.service.report.report import show

        text = StringIO()
        show(
            self._view,
            SafeConsole(file=text, color_system=None, force_terminal=False, force_jupyter=False, width=WIDTH),
        )
        return text.getvalue().rstrip()

    def __repr__(self) -> str:
        return f"Report({str(self.folder)!r})"

    def _repr_html_(self) -> str:
        style = "width:100%;height:45rem;border:0"
        return f"<iframe sandbox style='{style}' srcdoc='{html.escape(self.page.read_text())}'></iframe>"
