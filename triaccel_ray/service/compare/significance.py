"""Tests whether methods differ by more than their seeds do, with paired t-tests and Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_PAIRS = 3
"""Fewest pairs for a test: two differences leave a single degree of freedom."""
LEVEL = 0.95
"""Level of the confidence intervals."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of one method minus the same figure of another, over the seeds that both have."""

    num_pairs: int
    mean: float
    """nan without pairs."""
    low: float = math.nan
    """Ends of the mean's confidence interval; nan with fewer than MIN_PAIRS pairs."""
    high: float = math.nan
    p_value: float = math.nan
    """Of the two-sided paired t-test; nan with fewer than MIN_PAIRS pairs, and for differences that are all the same
    but not zero: without a spread the t-statistic is undefined."""


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """Returns the difference `values - reference`, both by seed."""
    differences = [values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())]
    if not differences:
        return Difference(num_pairs=0, mean=math.nan)
    mean, count = statistics.fmean(differences), len(differences)
    rounding = 1e-12 * max(map(abs, (*values.values(), *reference.values())))
    if abs(mean) <= rounding:
        mean = 0.0
    if count < MIN_PAIRS:
        return Difference(num_pairs=count, mean=mean)
    if statistics.stdev(differences) <= rounding * math.sqrt(count):
        p_value = 1.0 if mean == 0.0 else math.nan
        return Difference(num_pairs=count, mean=mean, low=mean, high=mean, p_value=p_value)
    from scipy import stats  # here: the import takes most of a second, which other commands save

    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(LEVEL)
    return Difference(num_pairs=count, mean=mean, low=float(low), high=float(high), p_value=float(test.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns the p-values corrected for multiple testing (Holm 1979); nan stays nan and does not count as a test.

    In ascending order the i-th of m, from 0, is multiplied by m - i. Results are at most 1, and never decrease.
    """
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    adjusted, largest = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
