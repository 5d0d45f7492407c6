"""The efficiency score of Tri-Accel, as its published table computes it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from triaccel_ray.records.goal import Goal

BYTES_PER_GB = 1e9
"""Decimal: 1 GB of the score is 10^9 bytes."""

TIMED_EPOCHS = 5
"""Number of last epochs over which seconds per epoch are averaged (section 4.2); the run's first is left out."""

ACCURACY = Goal()
_MIN_VALUE = 1e-6
"""Lower bound for a metric to be minimized, so that the score of a perfect model is finite, and no run ends by it."""


def quality(value: float, goal: Goal) -> float:
    """Returns the numerator of the score for any metric, accuracy % for a classifier: >= 0, higher is better.

    A metric to be maximized, such as accuracy, is its own quality. One to be minimized has quality 100 / metric: half
    the metric is worth as much as twice the accuracy. So the ratio of two methods' scores does not depend on the unit,
    bits or nats. Quality compares methods on one task only. Metrics to be minimized that are
    below `_MIN_VALUE` all have the same quality. A negative log-likelihood may be so low: give its exponential instead.

    Raises:
        ValueError: a percentage is outside [0, 100], or the value is NaN.
    """
    if goal.unit == "%" and not 0.0 <= value <= 100.0:
        raise ValueError(f"{goal.words} = {value!r}: must lie in [0, 100] percent")
    if math.isnan(value):
        raise ValueError(f"{goal.words} = {value!r}: must be a number")
    return max(value, 0.0) if goal.maximize else 100.0 / max(value, _MIN_VALUE)


def quality_text(goal: Goal) -> str:
    """Returns the formula of `quality` as text."""
    return goal.words if goal.maximize else f"(100 / {goal.words})"


def efficiency_score(value: float, seconds_per_epoch: float, memory_gb: float, goal: Goal = ACCURACY) -> float:
    """Returns quality / (seconds per epoch x memory in GB), where the quality of a classifier is its accuracy %.

    The paper's formula (section 4.2) has memory in percent and a factor of 100. With memory in GB, as printed in its
    Table 1, and no factor, eleven of the twelve published scores are reproduced to the last digit. Two of these (17.59
    and 18.17) are truncated and the others rounded. The twelfth, CIFAR-10 ResNet-18 under AMP, computes to 12.44 but is
    printed as 12.25.

    Raises:
        ValueError: `quality` rejects the value, or time or memory is not positive.
    """
    if not (seconds_per_epoch > 0.0 and memory_gb > 0.0):
        raise ValueError(f"seconds, memory = {(seconds_per_epoch, memory_gb)!r}: must both be positive")
    return quality(value, goal) / (seconds_per_epoch * memory_gb)


def mean_epoch_seconds(seconds: Sequence[float]) -> float:
    """Returns the mean seconds of the last five epochs, or of as many as there are.

    The first entry is left out unless it is the only one: libraries load, kernels compile and steps are captured then.

    Args:
        seconds: of each epoch in order, starting with the run's first; of a long run the last six suffice.

    Raises:
        ValueError: no epoch was timed.
    """
    if not seconds:
        raise ValueError("seconds = []: at least one epoch must have been timed")
    last = (seconds[1:] or seconds)[-TIMED_EPOCHS:]
    return sum(last) / len(last)


class EpochTimes:
    """Seconds of a run's last epochs, and of the last ones under the current plan."""

    def __init__(self) -> None:
        """Starts without an epoch."""
        self._last: deque[float] = deque(maxlen=TIMED_EPOCHS + 1)  # one more, since the first does not count
        self._settled: deque[float] = deque(maxlen=TIMED_EPOCHS)
        self._has_changed_plan = False

    def add(self, epoch: int, seconds: float, computing_seconds: float, *, has_changed_plan: bool) -> None:
        """Adds an epoch, counted from 1: wall-clock seconds, the device's own seconds, and whether the plan changed.

        Epochs since the plan last changed count for `typical`. The one in which it changed counts only until the next,
        and so does the run's first, in which libraries load, kernels compile and steps are captured.
        """
        if has_changed_plan or self._has_changed_plan or epoch == 2:
            self._settled.clear()
        self._has_changed_plan = has_changed_plan
        self._last.append(seconds)
        self._settled.append(computing_seconds)

    @property
    def mean(self) -> float:
        """Mean of the last five epochs (`mean_epoch_seconds`)."""
        return mean_epoch_seconds(list(self._last))

    @property
    def typical(self) -> float:
        """The shortest of up to five last epochs under the current plan, in the device's own seconds.

        Other work on the machine only lengthens epochs, so the shortest is the best estimate for equal work.
        """
        return min(self._settled)

    def state_dict(self) -> dict[str, Any]:
        """Returns what `load_state_dict` restores."""
        return {"last": list(self._last), "settled": list(self._settled), "has_changed_plan": self._has_changed_plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._last.extend(state["last"])
        self._settled.extend(state["settled"])
        self._has_changed_plan = state["has_changed_plan"]
