"""Thresholds that searches have found for the bundled tasks, each with what it takes to find them again.

`results/TASK.json` is the file `found.json` that a search leaves in its folder. Only `command` is edited: it gets the
options that keep it the same search where the task's defaults have changed since.
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
    """What a method reached on the validation samples."""

    metric: float
    """What the task is judged by."""
    seconds_per_epoch: float
    """By which the search judged its trials: `typical_seconds` of the log."""
    peak_gb: float
    """Of the process on its device, 10^9 bytes."""
    score: float


@dataclass(frozen=True, kw_only=True)
class TunedThresholds:
    """The best thresholds of one search."""

    task: str
    metric: str = "accuracy"
    """Name of what the task is judged by; accuracy is in percent."""
    command: str
    """Repeats the search."""
    date: str
    """Day on which its best trial began, UTC, as YYYY-MM-DD."""
    hardware: str
    versions: Mapping[str, str]
    """Package -> version."""
    num_trials: int
    """Configurations that were trained, those stopped early counted."""
    num_finished: int
    """Of these, how many ran to their end."""
    headroom_bytes: int | None
    """What rho_low and rho_high are shares of, on top of what an idle process holds; None: of a budget in `command`."""
    precision: Mapping[str, float | int]
    """Field of PrecisionConfig -> value found; likewise below."""
    batch: Mapping[str, float | int]
    curvature: Mapping[str, float | int]
    every_steps: int | None
    """Steps between ticks, where they were searched."""
    amp: Result
    """The AMP baseline of the same search."""
    best: Result
    trials_per_gpu: int = 1
    """Trials that shared a GPU: with more than one, seconds and scores are not those of a GPU of one's own."""

    def onto(self, control: ControlConfig) -> ControlConfig:
        """Returns `control` with the thresholds that were found; what was not searched stays as it is.

        Raises:
            TypeError: one of the names is no threshold's.
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
    """Returns what has been found for the bundled task of this name.

    Raises:
        FileNotFoundError: no search of it is kept here.
        ValueError: the file holds something else; the message names it.
    """
    file = files("triaccel_ray.search_spaces").joinpath("results", f"{task}.json")
    try:
        tuned = decode(TunedThresholds, json.loads(file.read_text()))
        tuned.onto(ControlConfig())
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is no result of a search ({error}): copy found.json of a search there") from error
    return tuned
