from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.service.compare.significance import holm, paired_difference


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_three_pairs_by_hand() -> None:
    # differences 1, 2, 3: mean 2, s = 1, t = 2 sqrt(3) with 2 degrees of freedom
    difference = paired_difference(by_seed(11.0, 22.0, 33.0), by_seed(10.0, 20.0, 30.0))
    t = 2.0 * math.sqrt(3.0)
    assert difference.mean == pytest.approx(2.0)
    assert difference.p_value == pytest.approx(1.0 - t / math.sqrt(t * t + 2.0))  # closed form for 2 degrees
    assert (difference.low, difference.high) == pytest.approx((2.0 - 4.302653 / 3**0.5, 2.0 + 4.302653 / 3**0.5))


def test_only_seeds_that_both_have_are_compared() -> None:
    difference = paired_difference({0: 5.0, 1: 6.0, 2: 9.0, 7: 1e9}, {0: 4.0, 1: 4.0, 2: 4.0, 3: -1e9})
    assert (difference.num_pairs, difference.mean) == (3, pytest.approx(8.0 / 3.0))


@pytest.mark.parametrize(("count", "mean"), [(0, math.nan), (1, 2.0), (2, 2.0)])
def test_too_few_pairs_are_not_tested(count: int, mean: float) -> None:
    difference = paired_difference(by_seed(*[3.0] * count), by_seed(*[1.0] * count))
    assert difference.num_pairs == count
    assert math.isnan(difference.low)
    assert difference.mean == pytest.approx(mean, nan_ok=True)
    assert math.isnan(difference.p_value)


@pytest.mark.parametrize(("shift", "p_value"), [(0.0, 1.0), (0.25, math.nan)])
def test_differences_without_spread_are_no_proof(shift: float, p_value: float) -> None:
    values = (97.1, 96.6, 98.3)
    difference = paired_difference(by_seed(*[value + shift for value in values]), by_seed(*values))
    assert difference.p_value == pytest.approx(p_value, nan_ok=True)
    assert difference.low == difference.high == difference.mean == pytest.approx(shift)


@pytest.mark.parametrize(
    ("p_values", "adjusted"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.2, 0.001, 0.02, 0.03], [0.2, 0.004, 0.06, 0.06]),
        ([0.6, 0.7], [1.0, 1.0]),
        ([math.nan, 0.02, 0.03], [math.nan, 0.04, 0.04]),
        ([math.nan], [math.nan]),
    ],
)
def test_holm(p_values: list[float], adjusted: list[float]) -> None:
    assert holm(p_values) == pytest.approx(adjusted, nan_ok=True)


@given(p_values=st.lists(st.floats(min_value=0.0, max_value=1.0), max_size=8))
def test_holm_keeps_the_order_and_never_lowers(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= corrected <= 1.0 for p, corrected in zip(p_values, adjusted, strict=True))
    assert sorted(adjusted) == [corrected for _, corrected in sorted(zip(p_values, adjusted, strict=True))]
