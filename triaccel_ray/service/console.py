"""What a person sees in the terminal: progress while work goes on, tables when it is done."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from ray import tune
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from triaccel_ray.service.runs import Glance
from triaccel_ray.service.tables import Grid
from triaccel_ray.service.units import format_bytes

out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
"""Results: standard output."""
err = Console(highlight=False, stderr=True)
"""Progress and messages: standard error, so that results can be piped."""


class Progress:
    """A live table on standard error; nothing at all where that is not a terminal."""

    def __init__(self, title: str) -> None:
        """Begins empty."""
        self._title = title
        self._live = Live(console=err, refresh_per_second=4, transient=True) if err.is_terminal else None

    def __enter__(self) -> Self:
        """Starts showing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the table away again."""
        if self._live is not None:
            self._live.stop()

    def show(self, table: Table) -> None:
        """Replaces what is shown."""
        if self._live is not None:
            table.title = self._title
            self._live.update(table)


class RunProgress(Progress):
    """Epochs, images per second, batch size, memory against the limit and precisions of a set of runs."""

    def __init__(self, title: str, names: Iterable[str] = ()) -> None:
        """Lists the runs of these names as waiting; others are added when something is known of them."""
        super().__init__(title)
        self._glances: dict[str, Glance] = {name: Glance(name=name) for name in names}

    def update(self, glance: Glance) -> None:
        """Takes in what is newly known of one run."""
        before = self._glances.get(glance.name, glance)
        self._glances[glance.name] = Glance(
            name=glance.name,
            status=glance.status or before.status,
            last=glance.last or before.last,
            results=glance.results or before.results,
            error=glance.error or before.error,
        )
        self.show(self._table())

    def _table(self) -> Table:
        table = _plain_table("run", "epoch", "", "images/s", "batch", "memory", "layers", "val. acc.")
        for name, glance in self._glances.items():
            status = glance.status
            if glance.error is not None:
                table.add_row(name, Text("failed", style="red"), *[""] * 6)
            elif status is None:
                table.add_row(name, "waiting", *[""] * 6)
            else:
                num_epochs = status.num_epochs
                done = num_epochs if glance.results is not None else status.epoch
                table.add_row(
                    name,
                    f"{done:.1f}/{num_epochs}",
                    _bar(done / max(num_epochs, 1)),
                    f"{status.images_per_second:,.0f}",
                    str(status.batch_size),
                    f"{format_bytes(status.used_bytes)} of {format_bytes(status.limit_bytes)}",
                    _precisions(status.layers_per_precision),
                    "" if status.accuracy is None else f"{status.accuracy:.2f} %",
                )
        return table


class TrialProgress(Progress, tune.Callback):
    """The trials of a search as Ray Tune reports them."""

    def __init__(self, title: str, num_trials: int) -> None:
        """Waits for the first trial."""
        Progress.__init__(self, title)
        self._num_trials = num_trials
        self._results: dict[str, Mapping[str, Any]] = {}
        self._states: dict[str, str] = {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Lists the trial."""
        self._set(trial, "running")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Shows the trial's last epoch."""
        self._results[trial.trial_id] = result
        self._set(trial, "running")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows that the trial has ended."""
        self._set(trial, "done")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows that the trial has failed."""
        self._set(trial, "failed")

    def _set(self, trial: Any, state: str) -> None:
        self._states[trial.trial_id] = state
        table = _plain_table("trial", "state", "epoch", "accuracy", "s/epoch", "peak GB", "score")
        # Running trials always, of the others the best that fit a small screen.
        order = sorted(self._states, key=lambda key: (self._states[key] != "running", -self._objective(key)))
        for key in order[:15]:
            result = self._results.get(key, {})
            cells = [_cell(result, name, form) for name, form in _TRIAL_CELLS]
            table.add_row(key, self._states[key], str(result.get("epoch", "")), *cells)
        ended = sum(each != "running" for each in self._states.values())
        table.caption = f"{ended} of {self._num_trials} trials done"
        self.show(table)

    def _objective(self, key: str) -> float:
        return float(self._results.get(key, {}).get("objective", float("-inf")))


_TRIAL_CELLS = (("accuracy", "{:.2f}"), ("seconds_per_epoch", "{:.3f}"), ("peak_gb", "{:.3f}"), ("score", "{:.2f}"))


def rich_table(grid: Grid, *, title: str = "") -> Table:
    """Returns the grid for the terminal."""
    table = _plain_table(*grid.header)
    table.title, table.caption = title or None, grid.note or None
    for row in grid.rows:
        table.add_row(*row)
    return table


def _plain_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=True)
    return table


def _cell(result: Mapping[str, Any], name: str, form: str) -> str:
    return form.format(result[name]) if name in result else ""


def _precisions(counts: Mapping[str, int]) -> str:
    return " ".join(f"{count} {name}" for name, count in counts.items() if count)


def _bar(share: float, width: int = 12) -> str:
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)
