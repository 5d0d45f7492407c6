"""Thresholds that searches have found for the bundled tasks, each with what it takes to find them again.

`results/TASK.json` is the file `found.json` that a search leaves in its folder. Only `command` is added to, where the
task's defaults have changed since, and it would repeat another search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig, require
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

    def __post_init__(self) -> None:
        for name, kind in (("precision", PrecisionConfig), ("batch", BatchConfig), ("curvature", CurvatureConfig)):
            known = [field.name for field in fields(kind)]
            for key in getattr(self, name):
                require(key in known, f"{name} of {self.task}", key, f"must be a threshold, one of {', '.join(known)}")

    def onto(self, control: ControlConfig) -> ControlConfig:
        """Returns `control` with the thresholds that were found; what was not searched stays as it is."""
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
        return decode(TunedThresholds, json.loads(file.read_text()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no result of a search ({error}): copy found.json of a search there") from error
