"""Methods against each other over seeds, as in the paper's tables: final runs, each reading the test set once."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainables.task import Purpose
from triaccel_ray.config import require, require_integer
from triaccel_ray.events import LogError
from triaccel_ray.jsonable import decode, encode
from triaccel_ray.service.record import RunRecord, read_run
from triaccel_ray.service.spec import METHODS, RunSpec
from triaccel_ray.service.worker import EVENTS, require_new, write_atomically

COMPARISON = "comparison.json"
ABLATION = ("dynamic-batch", "dynamic-precision", "dynamic-both")


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """One comparison, as asked for."""

    base: RunSpec
    """Everything that the runs have in common."""
    methods: tuple[str, ...]
    num_seeds: int = 3

    def __post_init__(self) -> None:
        require_integer("seeds", self.num_seeds, low=1)
        distinct = len(set(self.methods)) == len(self.methods) > 0
        require(distinct, "methods", ",".join(self.methods), f"must be one or more, each once, of {', '.join(METHODS)}")
        for method in self.methods:
            replace(self.base, method=method)

    def runs(self) -> dict[str, RunSpec]:
        """Returns every run by its name, `METHOD-seedN`."""
        return {
            f"{method}-seed{seed}": replace(self.base, method=method, seed=seed, purpose=Purpose.FINAL)
            for seed in range(self.num_seeds)
            for method in self.methods
        }


@dataclass(frozen=True, kw_only=True)
class MethodSummary:
    """One row of the table: mean and standard deviation over the seeds that finished."""

    method: str
    num_runs: int
    figures: Mapping[str, tuple[float, float]]
    """Figure -> (mean, standard deviation); `nan` deviation for a single run."""


FIGURES: Mapping[str, str] = {
    "accuracy": "test accuracy %",
    "seconds_per_epoch": "s/epoch",
    "peak_gb": "process peak GB",
    "allocated_peak_gb": "allocator peak GB",
    "score": "score",
}
"""Result -> column heading."""


def begin_comparison(spec: ComparisonSpec, folder: Path) -> None:
    """Makes the comparison's folder and writes what was asked for.

    Raises:
        ValueError: the folder exists; nothing is touched.
    """
    require_new(folder)
    folder.mkdir(parents=True)
    write_atomically(folder / COMPARISON, json.dumps(encode(spec), indent=2))


def read_comparison(folder: Path) -> tuple[ComparisonSpec, dict[str, RunRecord]]:
    """Returns what was asked for, and the runs that have begun.

    Raises:
        LogError: the folder holds no comparison, or its files are damaged.
    """
    path = folder / COMPARISON
    try:
        spec = decode(ComparisonSpec, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise LogError(f"{path} cannot be read ({error}): begin a new comparison") from error
    runs = {name: read_run(folder / name) for name in spec.runs() if (folder / name / EVENTS).exists()}
    return spec, runs


def unfinished(spec: ComparisonSpec, runs: Mapping[str, RunRecord]) -> dict[str, RunSpec]:
    """Returns the runs still to be done."""
    return {name: each for name, each in spec.runs().items() if name not in runs or runs[name].status != "finished"}


def summaries(spec: ComparisonSpec, runs: Mapping[str, RunRecord]) -> list[MethodSummary]:
    """Returns one summary a method, in the order asked for, over its finished runs."""
    return [
        _summary(method, [run for run in runs.values() if run.spec.method == method and run.status == "finished"])
        for method in spec.methods
    ]


def _summary(method: str, runs: Sequence[RunRecord]) -> MethodSummary:
    results = [run.end.results for run in runs if run.end is not None]
    figures = {}
    for name in FIGURES if results else ():
        values = [result[name] for result in results]
        deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
        figures[name] = (statistics.fmean(values), deviation)
    return MethodSummary(method=method, num_runs=len(runs), figures=figures)
