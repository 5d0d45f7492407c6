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
"""Seconds per epoch are the mean over this many last epochs (section 4.2), the run's first left out."""

ACCURACY = Goal()
_LEAST = 1e-6
"""What a metric to be minimised counts as at least, so that the score of a perfect model is finite."""


def quality(value: float, goal: Goal) -> float:
    """Returns what stands in the place of accuracy % in the score, for any metric: >= 0, more is better.

    Accuracy, and whatever else is to be maximised, stands for itself. A metric to be minimised counts as 100 / metric:
    half of it is worth as much as twice the accuracy, and which of two methods scores how many times more does not
    depend on the unit, bits or nats. It orders methods of one task; across tasks it says nothing.

    Raises:
        ValueError: a percentage is outside [0, 100], a metric to be minimised is negative, or the value is NaN.
    """
    if goal.unit == "%" and not 0.0 <= value <= 100.0:
        raise ValueError(f"{goal.words} = {value!r}: must lie in [0, 100] percent")
    if math.isnan(value) or (value < 0.0 and not goal.maximize):
        raise ValueError(
            f"{goal.words} = {value!r}: must be a number >= 0; of a log-likelihood minimise the exponential"
        )
    return max(value, 0.0) if goal.maximize else 100.0 / max(value, _LEAST)


def quality_text(goal: Goal) -> str:
    """Returns the formula of `quality`, for people."""
    return goal.words if goal.maximize else f"(100 / {goal.words})"


def efficiency_score(value: float, seconds_per_epoch: float, memory_gb: float, goal: Goal = ACCURACY) -> float:
    """Returns quality / (seconds per epoch x memory in GB), where the quality of a classifier is its accuracy %.

    The paper's formula (section 4.2) has memory in percent and a factor 100; with memory in GB as its Table 1 prints
    it, and no factor, eleven of the twelve published scores come out to the last digit, two of them (17.59 and 18.17)
    cut off where the others are rounded. The twelfth, CIFAR-10 ResNet-18 under AMP, computes to 12.44 where 12.25 is
    printed.

    Raises:
        ValueError: the value has no `quality`, or time or memory are not positive.
    """
    if not (seconds_per_epoch > 0.0 and memory_gb > 0.0):
        raise ValueError(f"seconds, memory = {(seconds_per_epoch, memory_gb)!r}: must both be positive")
    return quality(value, goal) / (seconds_per_epoch * memory_gb)


def mean_epoch_seconds(seconds: Sequence[float]) -> float:
    """Returns the mean of the last five epochs' seconds, or of as many as there are.

    The first of them is left out where there are others: libraries load in it, kernels compile, steps are captured.

    Args:
        seconds: of a run's epochs in their order, from the first on; of a long run its last six will do.

    Raises:
        ValueError: no epoch was timed.
    """
    if not seconds:
        raise ValueError("seconds = []: at least one epoch must have been timed")
    last = (seconds[1:] or seconds)[-TIMED_EPOCHS:]
    return sum(last) / len(last)


class EpochTimes:
    """Seconds of a run's last epochs, and of those under the plan in force."""

    def __init__(self) -> None:
        """Has seen no epoch."""
        self._last: deque[float] = deque(maxlen=TIMED_EPOCHS + 1)  # with the first of all, not timed
        self._settled: deque[float] = deque(maxlen=TIMED_EPOCHS)
        self._has_changed_plan = False

    def add(self, epoch: int, seconds: float, computing_seconds: float, *, has_changed_plan: bool) -> None:
        """Takes in an epoch, counted from 1, by the clock and by the device's own time, and whether the plan changed.

        Under the plan in force are the epochs since it last changed; one in which it changed alone, where no other is.
        The run's first is none of them: libraries load in it, kernels compile, steps are captured.
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
        """The shortest of the last five epochs, at most, under the plan in force.

        Other work on the machine lengthens epochs and never shortens them: of equal work the shortest time says most.
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
