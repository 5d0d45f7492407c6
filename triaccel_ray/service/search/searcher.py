"""The sampler of a search: it journals each sample before the trial begins, which is all that resuming needs."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import optuna
from optuna.samplers import TPESampler
from optuna.study import StudyDirection
from optuna.trial import TrialState
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from triaccel_ray.records.events import Claim, LogError, TakenOverError
from triaccel_ray.search_spaces.thresholds import ANCHOR, search_space
from triaccel_ray.service.failures import DiskFullError, reporting_full_disk
from triaccel_ray.service.runs.trial import ENDED_KEY, FINISHED_KEY, NAME_KEY
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import JOURNAL
from triaccel_ray.service.storage.mirror import upload
from triaccel_ray.service.storage.storage_path import StoragePath

_PARETO: Final = {"quality": True, "seconds_per_epoch": False, "peak_gb": False}
"""Metrics of the objective `pareto` -> True to maximize one, False to minimize it."""


class JournaledSearcher(Searcher):
    """Suggests samples drawn by Optuna; a resumed search first gets its journaled samples again, then new ones.

    Each trial has its own sampler. So its sample depends only on seed, trial number and known results, not on what the
    process has drawn before.
    """

    def __init__(self, spec: SearchSpec, place: StoragePath, claim: Claim | None) -> None:
        """Reads the journal of the search at `place`, if there is one, and cuts off an incomplete last line.

        With a `claim` on the search's log, nothing is suggested or journaled once another process has taken it over.

        Raises:
            LogError: the journal is damaged.
        """
        super().__init__()
        self._spec, self._place, self._claim = spec, place, claim
        self._journal = place.folder / JOURNAL
        maximized = _PARETO if spec.objective == "pareto" else {"objective": True}
        self._metrics = list(maximized)
        space = search_space(spec.space, spec.optional)
        self._space = OptunaSearch.convert_search_space(dict(space))
        samples, self._ended = _read(self._journal)
        self._num_known = len(samples)
        if self._journal.exists():
            os.truncate(self._journal, self._journal.read_bytes().rfind(b"\n") + 1)
        directions = [StudyDirection.MAXIMIZE if each else StudyDirection.MINIMIZE for each in maximized.values()]
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # no report of the study on standard error
        self._study = optuna.create_study(directions=directions)
        optuna.logging.set_verbosity(verbosity)
        for sample in samples or [{name: ANCHOR[name] for name in space}]:
            self._study.enqueue_trial(dict(sample))
        self._trials: dict[str, tuple[str, optuna.trial.Trial]] = {}
        self.failure: DiskFullError | TakenOverError | None = None
        """Why the end of a trial could not be journaled; None if all could."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        """Returns the next trial's sample, with its name.

        Raises:
            DiskFullError, TakenOverError: see `failure`.
        """
        if self._claim is not None:
            self._claim.require()
        if self.failure is not None:
            raise self.failure
        number = len(self._trials)
        name = trial_name(number)
        seed = (self._spec.seed * 10_007 + number) % 2**32
        num_startup = max(self._spec.num_trials // 4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = TPESampler(n_startup_trials=num_startup, multivariate=True, seed=seed)
        trial = self._study.ask(fixed_distributions=self._space)
        if number >= self._num_known:
            self._append({NAME_KEY: name, "sample": trial.params})
            upload(self._place, [JOURNAL])
        self._trials[trial_id] = name, trial
        return {**trial.params, NAME_KEY: name, ENDED_KEY: name in self._ended}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Reports a trial's intermediate result to Optuna, which uses it for sampling if the trial is pruned."""
        _, trial = self._trials[trial_id]
        step = result["epoch"]
        # A trial that was lost reports its earlier results again.
        if len(self._metrics) == 1 and step not in self._study.trials[trial.number].intermediate_values:
            trial.report(result[self._metrics[0]], step=step)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tells Optuna how a trial ended, and journals it unless the trial is to be retried."""
        name, trial = self._trials[trial_id]
        if error or not result or result.get("unfinished"):
            self._study.tell(trial, state=TrialState.FAIL)
            return
        if result[FINISHED_KEY] or len(self._metrics) > 1:
            self._study.tell(trial, [result[metric] for metric in self._metrics])
        else:
            self.on_trial_result(trial_id, result)
            self._study.tell(trial, state=TrialState.PRUNED)
        if name not in self._ended:
            try:
                self._append({NAME_KEY: name, ENDED_KEY: True})
            except (DiskFullError, TakenOverError) as failure:
                # Raised here, Tune would take it for the trial's failure.
                self.failure = failure

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the journal is complete at any time."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: the constructor has read the journal."""

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._claim is not None:
            self._claim.require()
        with reporting_full_disk(self._journal.parent), self._journal.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def trial_name(number: int) -> str:
    """Returns the name of a search's trial; numbers count from 0."""
    return f"trial-{number:03d}"


def ended_trials(journal: Path) -> frozenset[str]:
    """Returns the names of the trials that ended by themselves or were pruned; empty if the journal is damaged."""
    with contextlib.suppress(LogError, OSError):  # reported elsewhere
        return _read(journal)[1]
    return frozenset()


def _read(journal: Path) -> tuple[list[Mapping[str, Any]], frozenset[str]]:
    """Returns the samples in order, and the names of the trials that ended and were not interrupted.

    An incomplete last line is left out.

    Raises:
        LogError: the journal is damaged.
    """
    if not journal.exists():
        return [], frozenset()
    try:
        lines = [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]
        samples = [line["sample"] for line in lines if "sample" in line]
        return samples, frozenset(line[NAME_KEY] for line in lines if ENDED_KEY in line)
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{journal} cannot be read ({error}): restore it, or begin a new search") from error
