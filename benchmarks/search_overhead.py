"""Overhead of a search beyond its training: trivial trials on one reused actor, against bare Ray Tune and Optuna alone.

Run `python -m benchmarks.search_overhead`. All contenders train the same model on the same samples for one epoch per
trial, one trial at a time. The same Optuna sampler draws the thresholds. Bare Tune reuses its actor and trains in
plain PyTorch; Optuna alone does so in this process and records nothing. Ours is what `triaccel search` runs: the
control loop, an event log, a spec and an evaluation for every trial. Needs no GPU. Exits with 1 if a contender loses
trials, or if the median time between two of our trials exceeds 1.5 s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import optuna
import ray
import torch
from ray import tune
from ray.tune.search.optuna import OptunaSearch

from benchmarks.trivial import Trivial
from triaccel_ray.records.events import read_events
from triaccel_ray.search_spaces.thresholds import search_space
from triaccel_ray.service.cluster.cluster import cluster
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.spec import run_spec
from triaccel_ray.service.search.search import Prepared, tune_trials
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import EVENTS, SEARCH, TRIALS, create_with_spec
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose

TASK = "benchmarks.trivial:Trivial"
SPACE: Final = "thresholds-absolute"
HEADROOM_BYTES = 2**30
TARGET_S = 1.5
"""Allowed time between two trials: 5% of a search of 30-second trials."""


Span = tuple[float, float]
"""Times at which a trial's training began and ended."""


@dataclass(frozen=True)
class Contender:
    """Measurements of one contender."""

    seconds: float
    """From the call to its return."""
    spans: Sequence[Span]

    @property
    def gaps(self) -> list[float]:
        """Times from the end of one trial's training to the beginning of the next one's."""
        return [later[0] - earlier[1] for earlier, later in itertools.pairwise(sorted(self.spans))]


def train_plainly() -> tuple[Span, float]:
    """Trains one epoch as in a tutorial; returns its span and the accuracy in percent."""
    task = Trivial()
    splits, model = task.data(Purpose.SEARCH), task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    began = time.time()
    for indices in torch.randperm(len(splits.train)).split(32):
        inputs, targets = splits.train.batch(indices, None)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, targets = splits.held_out.batch(torch.arange(len(splits.held_out)), None)
        accuracy = 100.0 * (model(inputs).argmax(dim=-1) == targets).float().mean().item()
    return (began, time.time()), accuracy


class BareTrial(tune.Trainable):
    """The smallest trainable that Ray Tune accepts."""

    def setup(self, config: dict[str, Any]) -> None:
        """Does nothing."""

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Returns True: the actor can be reused."""
        return True

    def step(self) -> dict[str, Any]:
        """Trains one epoch and ends the trial."""
        span, accuracy = train_plainly()
        return {"objective": accuracy, "span": span, "done": True}


def ours(folder: Path, num_trials: int) -> list[Span]:
    """Runs the trials as `triaccel search` does; returns their spans."""
    base = replace(run_spec(TASK), device="cpu", memory_headroom_bytes=HEADROOM_BYTES)
    spec = SearchSpec(base=base, space=SPACE, num_trials=num_trials, objective="metric")
    create_with_spec(folder, SEARCH, spec)
    prepared = Prepared(objective=Objective(name="metric"), calibration=None, headroom_bytes=HEADROOM_BYTES)
    tune_trials(spec, prepared, StoragePath.of(folder), num_gpus=0)
    logs = [[event.time_ms / 1e3 for event in read_events(run / EVENTS)] for run in (folder / TRIALS).iterdir()]
    return [(times[0], times[-1]) for times in logs]


def bare_tune(folder: Path, num_trials: int) -> list[Span]:
    """Runs the trials with Ray Tune alone; returns their spans."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Tune's own deprecation warnings
        results = tune.Tuner(
            tune.with_resources(BareTrial, {"cpu": 1}),
            tune_config=tune.TuneConfig(
                search_alg=OptunaSearch(dict(search_space(SPACE)), metric="objective", mode="max", sampler=sampler()),
                num_samples=num_trials,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="bare",
                storage_path=str(folder),
                verbose=0,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()
    ends = [results[index].metrics or {} for index in range(len(results))]
    return [end["span"] for end in ends if "span" in end]


def optuna_alone(folder: Path, num_trials: int) -> list[Span]:
    """Runs the trials with Optuna alone, in this process; returns their spans."""
    spans: list[Span] = []

    def objective(trial: optuna.Trial) -> float:
        for name, domain in search_space(SPACE).items():
            trial.suggest_float(name, domain.lower, domain.upper)
        span, accuracy = train_plainly()
        spans.append(span)
        return accuracy

    optuna.create_study(direction="maximize", sampler=sampler()).optimize(objective, n_trials=num_trials)
    return spans


def sampler() -> optuna.samplers.TPESampler:
    """Returns a sampler with the settings of a search."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an experimental option
        return optuna.samplers.TPESampler(n_startup_trials=25, multivariate=True, seed=0)


CONTENDERS = {"triaccel": ours, "bare Ray Tune": bare_tune, "Optuna alone": optuna_alone}


def measure_trials(num_trials: int) -> Mapping[str, Contender]:
    """Returns each contender's measurements, on one cluster with one CPU."""
    found = {}
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # disables tables that Tune prints even if silenced
    torch.set_num_threads(1)  # as in Ray's actors
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, cluster(None, num_cpus=1):
        for name, search in CONTENDERS.items():
            began = time.perf_counter()
            spans = search(Path(folder) / name, num_trials)
            found[name] = Contender(time.perf_counter() - began, spans)
    return found


def faults(found: Mapping[str, Contender], *, num_trials: int) -> list[str]:
    """Returns the problems found: missing trials, or too long a gap between ours."""
    lost = sorted(name for name, contender in found.items() if len(contender.spans) != num_trials)
    texts = [f"WRONG: trials are missing of {', '.join(lost)}"] if lost else []
    median = statistics.median(found["triaccel"].gaps)
    if median > TARGET_S:
        texts.append(f"TOO MUCH: {median:.2f} s pass between two trials, where {TARGET_S} s are allowed")
    return texts


def main() -> int:
    """Measures all contenders and prints the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    num_trials = parser.parse_args().trials
    versions = f"Ray {ray.__version__}, Optuna {optuna.__version__}, PyTorch {torch.__version__}"
    print(f"{os.cpu_count()} CPUs, {versions}; {num_trials} trials")
    found = measure_trials(num_trials)
    for name, each in found.items():
        gaps = f"{statistics.median(each.gaps):.3f} s ({min(each.gaps):.3f} to {max(each.gaps):.3f})"
        print(f"{name:14s} {each.seconds:8.3f} s, between two trials {gaps}")
    texts = faults(found, num_trials=num_trials)
    print(*texts, sep="\n")
    return int(bool(texts))


if __name__ == "__main__":
    sys.exit(main())
