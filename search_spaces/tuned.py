"""Thresholds that searches have found for the bundled tasks, each with the information to reproduce them.

`results/TASK.json` is the file `found.json` that a search leaves in its folder. Only `command` is edited: if the
task's defaults have changed since, it gets options that keep the search the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

from triaccel_ray.config import ControlConfig
from triaccel_ray.records.codec import decode


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of a method on the validation samples."""

    metric: float
    """Value of the task's objective."""
    seconds_per_epoch: float
    """`typical_seconds` of the log, by which the search judged its trials."""
    peak_gb: float
    """Peak memory of the process on its device, 10^9 bytes."""
    score: float


@dataclass(frozen=True, kw_only=True)
class TunedThresholds:
    """The best thresholds of one search."""

    task: str
    metric: str = "accuracy"
    """Name of the task's objective; accuracy is in percent."""
    command: str
    """Command line that repeats the search."""
    date: str
    """Day on which its best trial began, UTC, as YYYY-MM-DD."""
    hardware: str
    versions: Mapping[str, str]
    """Package -> version."""
    num_trials: int
    """Configurations that were trained, including those stopped early."""
    num_finished: int
    """How many of these trials ran to their end."""
    headroom_bytes: int | None
    """Memory above an idle process's, of which rho_low and rho_high are shares; None: of a budget in `command`."""
    precision: Mapping[str, float | int]
    """Field of PrecisionConfig -> value found; likewise below."""
    batch: Mapping[str, float | int]
    curvature: Mapping[str, float | int]
    every_steps: int | None
    """Steps between ticks; None if not searched."""
    amp: Result
    """The AMP baseline of the same search."""
    best: Result
    trials_per_gpu: int = 1
    """Trials that shared a GPU; with more than one, seconds and scores are not those of an exclusive GPU."""

    def onto(self, control: ControlConfig) -> ControlConfig:
        """Returns `control` with these thresholds; settings that were not searched are unchanged.

        Raises:
            TypeError: one of the names is not a field of its config.
            ValueError: a value is out of range.
        """
        return replace(
            control,
            precision=replace(control.precision, **self.precision),  # type: ignore[arg-type]  # the fields check values
            batch=replace(control.batch, **self.batch),  # type: ignore[arg-type]
            curvature=replace(control.curvature, **self.curvature),  # type: ignore[arg-type]
            every_steps=control.every_steps if self.every_steps is None else self.every_steps,
        )


def tuned_thresholds(task: str) -> TunedThresholds:
    """Returns the thresholds found for the bundled task of this name.

    Raises:
        FileNotFoundError: there is no stored search of the task.
        ValueError: the file is not the result of a search; the message names it.
    """
    file = files("triaccel_ray.search_spaces").joinpath("results", f"{task}.json")
    try:
        return decode(TunedThresholds, json.loads(file.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no result of a search ({error}): copy found.json of a search there") from error
