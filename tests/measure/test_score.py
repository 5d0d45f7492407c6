import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.measure.score import EpochTimes, efficiency_score, mean_epoch_seconds, quality, quality_text
from triaccel_ray.records.goal import Goal

# Tri-Accel, Table 1: accuracy in percent, seconds an epoch, memory in GB, printed score.
TABLE_1 = {
    "CIFAR-10 ResNet-18 FP32": (77.0, 21.0, 0.35, "10.48"),
    "CIFAR-10 ResNet-18 AMP": (77.2, 19.4, 0.32, "12.25"),
    "CIFAR-10 ResNet-18 Tri-Accel": (78.1, 19.5, 0.31, "12.92"),
    "CIFAR-10 EfficientNet-B0 FP32": (78.3, 18.5, 0.30, "14.11"),
    "CIFAR-10 EfficientNet-B0 AMP": (78.7, 17.2, 0.26, "17.59"),
    "CIFAR-10 EfficientNet-B0 Tri-Accel": (79.4, 16.8, 0.26, "18.17"),
    "CIFAR-100 ResNet-18 FP32": (68.2, 24.3, 0.38, "7.39"),
    "CIFAR-100 ResNet-18 AMP": (68.7, 22.8, 0.35, "8.61"),
    "CIFAR-100 ResNet-18 Tri-Accel": (69.9, 22.4, 0.34, "9.18"),
    "CIFAR-100 EfficientNet-B0 FP32": (72.8, 21.1, 0.33, "10.46"),
    "CIFAR-100 EfficientNet-B0 AMP": (73.1, 19.6, 0.31, "12.03"),
    "CIFAR-100 EfficientNet-B0 Tri-Accel": (74.3, 19.0, 0.29, "13.48"),
}


# One row does not follow the table's own formula; two are cut off after the second decimal, the others rounded.
WRONG = "CIFAR-10 ResNet-18 AMP"
CUT_OFF = ("CIFAR-10 EfficientNet-B0 AMP", "CIFAR-10 EfficientNet-B0 Tri-Accel")


@pytest.mark.parametrize("row", sorted(set(TABLE_1) - {WRONG}))
def test_the_published_scores_come_out(row: str) -> None:
    accuracy, seconds, memory_gb, printed = TABLE_1[row]
    score = efficiency_score(accuracy, seconds, memory_gb)
    assert f"{math.floor(100 * score) / 100 if row in CUT_OFF else score:.2f}" == printed


def test_one_published_score_does_not_come_out() -> None:
    accuracy, seconds, memory_gb, printed = TABLE_1[WRONG]
    assert (f"{efficiency_score(accuracy, seconds, memory_gb):.2f}", printed) == ("12.44", "12.25")


@pytest.mark.parametrize("accuracy", [-0.1, 100.1, float("nan")])
def test_an_impossible_accuracy_is_refused(accuracy: float) -> None:
    with pytest.raises(ValueError, match=r"accuracy = .*: must lie in \[0, 100\] percent"):
        efficiency_score(accuracy, 1.0, 1.0)


LITTLE = Goal(name="bits_per_byte", maximize=False, unit="")
MUCH = Goal(name="r2", maximize=True, unit="")


@pytest.mark.parametrize(
    ("value", "goal", "expected"),
    [(90.0, Goal(), 90.0), (2.0, LITTLE, 50.0), (0.0, LITTLE, 1e8), (0.5, MUCH, 0.5), (-3.0, MUCH, 0.0)],
)
def test_the_quality_of_any_metric_grows_as_it_gets_better(value: float, goal: Goal, expected: float) -> None:
    assert quality(value, goal) == expected
    assert efficiency_score(value, 2.0, 5.0, goal) == expected / 10.0
    assert quality_text(goal) == (goal.words if goal.maximize else "(100 / bits per byte)")


@given(one=st.floats(1e-3, 1e3), other=st.floats(1e-3, 1e3), unit=st.floats(0.1, 10.0))
def test_which_method_scores_how_many_times_more_depends_on_no_unit(one: float, other: float, unit: float) -> None:
    ratio = quality(one, LITTLE) / quality(other, LITTLE)
    assert quality(unit * one, LITTLE) / quality(unit * other, LITTLE) == pytest.approx(ratio)
    assert (ratio > 1.0) == (one < other) or ratio == pytest.approx(1.0)


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_negative_metric_to_be_minimised_has_no_quality(value: float) -> None:
    with pytest.raises(ValueError, match=r"bits per byte = .*: must be a number >= 0"):
        quality(value, LITTLE)


@pytest.mark.parametrize(("seconds", "memory_gb"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_no_time_or_memory_is_refused(seconds: float, memory_gb: float) -> None:
    with pytest.raises(ValueError, match=r"seconds, memory = .*: must both be positive"):
        efficiency_score(50.0, seconds, memory_gb)


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [([3.0], 3.0), ([9.0, 2.0], 2.0), ([9.0, 1.0, 2.0], 1.5), ([9.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0], 3.0)],
)
def test_the_mean_is_over_the_last_five_epochs_without_the_first(seconds: list[float], mean: float) -> None:
    assert mean_epoch_seconds(seconds) == mean


def test_no_epoch_has_no_mean() -> None:
    with pytest.raises(ValueError, match=r"seconds = \[\]: at least one epoch"):
        mean_epoch_seconds([])


def test_typical_seconds_are_those_of_the_plan_in_force() -> None:
    times = EpochTimes()

    def typical(epoch: int, seconds: float, *, changed: bool = False) -> float:
        times.add(epoch, 2.0 * seconds, seconds, has_changed_plan=changed)
        return times.typical

    assert typical(1, 9.0) == 9.0
    assert typical(2, 3.0) == 3.0  # without the first, in which libraries load
    assert typical(3, 5.0) == 3.0
    assert typical(4, 8.0, changed=True) == 8.0
    restored = EpochTimes()
    restored.load_state_dict(times.state_dict())
    times = restored
    assert typical(5, 2.0) == 2.0  # an epoch under two plans tells of neither
    assert [typical(epoch, seconds) for epoch, seconds in ((6, 2.5), (7, 90.0), (8, 1.5))] == [2.0, 2.0, 1.5]
    assert times.mean == pytest.approx(2.0 * (8.0 + 2.0 + 2.5 + 90.0 + 1.5) / 5)
