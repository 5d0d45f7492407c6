"""The efficiency score of Tri-Accel, as its published table computes it."""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_GB = 1e9
"""Decimal: 1 GB of the score is 10^9 bytes."""

TIMED_EPOCHS = 5
"""Seconds per epoch are the mean over this many last epochs (section 4.2), the run's first left out."""


def efficiency_score(accuracy_percent: float, seconds_per_epoch: float, memory_gb: float) -> float:
    """Returns accuracy / (seconds per epoch x memory in GB).

    The paper's formula (section 4.2) has memory in percent and a factor 100; with memory in GB as its Table 1 prints
    it, and no factor, eleven of the twelve published scores come out to the last digit, two of them (17.59 and 18.17)
    cut off where the others are rounded. The twelfth, CIFAR-10 ResNet-18 under AMP, computes to 12.44 where 12.25 is
    printed.

    Raises:
        ValueError: the accuracy is outside [0, 100], or time or memory are not positive.
    """
    if not 0.0 <= accuracy_percent <= 100.0:
        raise ValueError(f"accuracy = {accuracy_percent!r}: must lie in [0, 100] percent")
    if not (seconds_per_epoch > 0.0 and memory_gb > 0.0):
        raise ValueError(f"seconds, memory = {(seconds_per_epoch, memory_gb)!r}: must both be positive")
    return accuracy_percent / (seconds_per_epoch * memory_gb)


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
