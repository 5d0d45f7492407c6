"""What the benchmarks of curvature judge by."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.curvature import POWER_TOLERANCES, TOLERANCES, Row, is_right
from benchmarks.curvature_agreement import FLOOR, TOLERANCE, worst_difference


def row(name: str, errors: tuple[float, float] | None) -> Row:
    return Row(name=name, wall_ms=[1.0], host_ms=1.0, device_ms=1.0, extra_bytes=0, errors=errors)


@pytest.mark.parametrize(("name", "allowed"), [("fisher, k=5", TOLERANCES), ("hessian, k=1", POWER_TOLERANCES)])
def test_each_method_is_held_to_its_tolerances(name: str, allowed: tuple[float, float]) -> None:
    first, others = allowed
    assert is_right(row(name, allowed))
    assert is_right(row(name, None))
    for errors in ((1.01 * first, 0.0), (0.0, 1.01 * others), (math.nan, 0.0), (0.0, math.nan)):
        assert not is_right(row(name, errors))


def test_one_layer_that_disagrees_is_enough() -> None:
    reference = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.1])
    found = reference.clone()
    found[2] *= 1.05
    assert worst_difference(reference, reference) == 0.0
    assert worst_difference(found, reference) == pytest.approx(0.05, rel=1e-5)
    assert worst_difference(found, reference) > TOLERANCE


def test_what_is_below_the_floor_is_not_judged_and_nan_is() -> None:
    reference = torch.tensor([1.0, 0.5 * FLOOR])
    assert worst_difference(torch.tensor([1.0, FLOOR]), reference) == 0.0
    assert math.isnan(worst_difference(torch.tensor([math.nan, FLOOR]), reference))
    assert math.isnan(worst_difference(torch.tensor([1.0, 1.0]), torch.tensor([1.0, math.nan])))
