"""What the benchmarks of curvature judge by."""

from __future__ import annotations

import math

import pytest

from benchmarks.curvature import POWER_TOLERANCES, TOLERANCES, Row, is_right


def row(name: str, errors: tuple[float, float] | None) -> Row:
    return Row(name=name, wall_ms=[1.0], host_ms=1.0, device_ms=1.0, extra_bytes=0, errors=errors)


@pytest.mark.parametrize(("name", "allowed"), [("fisher, k=5", TOLERANCES), ("hessian, k=1", POWER_TOLERANCES)])
def test_each_method_is_held_to_its_tolerances(name: str, allowed: tuple[float, float]) -> None:
    first, others = allowed
    assert is_right(row(name, allowed))
    assert is_right(row(name, None))
    for errors in ((1.01 * first, 0.0), (0.0, 1.01 * others), (math.nan, 0.0), (0.0, math.nan)):
        assert not is_right(row(name, errors))
