"""How much each threshold mattered in a search: functional analysis of variance over its trials, by Optuna."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import optuna

from triaccel_ray.service.search.dimensions import Dimension, dimensions
from triaccel_ray.service.search.search import SearchRecord
from triaccel_ray.service.search.suggestions import quiet_optuna

MIN_TRIALS: Final = 20
"""Fewer trials say nothing about four thresholds: the intervals cover everything."""
NUM_RESAMPLES: Final = 12
"""Bootstrap samples of the trials; the interval is the range of their shares."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of the variance between trials, and what they were computed from."""

    shares: Mapping[str, float]
    """Threshold -> share in [0, 1], largest first; together 1. Empty where the trials cannot tell."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Threshold -> lowest and highest share among bootstrap samples of the trials."""
    epoch: int
    """The epoch after which the trials were compared."""
    num_trials: int
    """How many trials had come so far."""

    @property
    def sentence(self) -> str:
        """What a reader has to know of the shares, or why there are none."""
        if self.shares:
            return (
                f"Share of the differences between {self.num_trials} trials that each threshold explains (functional "
                f"analysis of variance of their ranks after epoch {self.epoch}). Whiskers: the range over "
                f"{NUM_RESAMPLES} bootstrap samples of the trials. tau_low and tau_high move together, and so do "
                "rho_low and rho_high: of such a pair read the sum."
            )
        return f"The {self.num_trials} trials do not differ after epoch {self.epoch}: no threshold mattered."


def importance(record: SearchRecord) -> Importance | None:
    """Returns how much each threshold of the search mattered; None where fewer than MIN_TRIALS can be compared.

    Trials that the scheduler stopped early count too, or only the good ones would: all are compared after the same
    epoch, the latest that half of the trials have reached, and MIN_TRIALS at least. What is explained is a trial's rank
    in what was maximised, for the values themselves leap from percentage points to scores where trials become feasible.

    Source: Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter Importance, ICML 2014.
    """
    scales = dimensions(record.spec.optional)
    trials = [
        run
        for run in record.trials
        if run.figures is not None and all(math.isfinite(scale.position(run.spec.control)) for scale in scales)
    ]
    reached = sorted((run.epochs[-1].epoch for run in trials), reverse=True)
    wanted = max(MIN_TRIALS, -(-len(trials) // 2))
    if len(trials) < MIN_TRIALS:
        return None
    epoch = reached[wanted - 1]
    samples, values = [], []
    for run in trials:
        figures = run.figures_after(epoch)
        if run.epochs[-1].epoch >= epoch and figures is not None:
            samples.append({scale.name: scale.position(run.spec.control) for scale in scales})
            values.append(record.objective.value(epoch, figures))
    ranks = {value: float(rank) for rank, value in enumerate(sorted(set(values)))}
    if len(ranks) < 2:
        return Importance(shares={}, epoch=epoch, num_trials=len(samples))
    ranked = [ranks[value] for value in values]
    shares = _shares(samples, ranked, scales, num_trees=64)
    chance = random.Random(0)
    drawn: list[dict[str, float]] = []
    while len(drawn) < NUM_RESAMPLES:
        picked = chance.choices(range(len(samples)), k=len(samples))
        if len({ranked[index] for index in picked}) > 1:
            picks = [samples[index] for index in picked], [ranked[index] for index in picked]
            drawn.append(_shares(*picks, scales, num_trees=16))
    intervals = {name: (min(each[name] for each in drawn), max(each[name] for each in drawn)) for name in shares}
    return Importance(shares=shares, intervals=intervals, epoch=epoch, num_trials=len(samples))


def _shares(
    samples: list[dict[str, float]], values: list[float], scales: tuple[Dimension, ...], *, num_trees: int
) -> dict[str, float]:
    """Returns the shares, largest first; the values are not all the same."""
    with quiet_optuna():
        study = optuna.create_study()
        columns = {scale.name: [sample[scale.name] for sample in samples] for scale in scales}
        ranges: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.FloatDistribution(min(column), max(column)) for name, column in columns.items()
        }
        for sample, value in zip(samples, values, strict=True):
            study.add_trial(optuna.create_trial(params=sample, distributions=ranges, value=value))
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(n_trees=num_trees, seed=0)
        )
    return {str(name): float(share) for name, share in found.items()}
