"""Batches from the host at fixed places."""

from typing import Any

import numpy as np
import pytest
import torch

from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.apply.static_batch import StaticBatch


def part(number: float = 0.0, **others: Any) -> tuple[int, Any, Any]:
    return 2, {"a": torch.full((2, 3), number), "b": torch.full((2, 3), -number), **others}, torch.zeros(2)


def test_values_follow_their_names_whatever_the_order_and_what_is_no_tensor_stays() -> None:
    static = StaticBatch([part(), part(c="a word", d=None, e=3)])
    places = static.parts[1][1]
    swapped = dict(reversed(part(2.0, c="a word", d=None, e=3)[1].items()))
    static.fill([part(1.0), (2, swapped, torch.ones(2))])
    assert static.parts[1][1] is places
    assert (float(static.parts[0][1]["a"][0, 0]), float(places["a"][0, 0]), float(places["b"][0, 0])) == (1, 2, -2)
    assert float(static.parts[1][2][0]) == 1.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"more": torch.zeros(2)}),
        ({"c": "a word"}, {"c": "another"}),
        ({"c": torch.zeros(2)}, {"c": torch.zeros(3)}),
        ({"c": torch.zeros(2)}, {"c": torch.zeros(2, dtype=torch.long)}),
        ({"c": torch.zeros(2)}, {"c": (torch.zeros(2),)}),
        ({"c": np.zeros(2)}, {"c": np.zeros(2)}),  # a constant of the graph
        ({"c": None}, {"c": torch.zeros(2)}),
    ],
)
def test_batches_of_another_kind_are_refused(before: dict[str, Any], after: dict[str, Any]) -> None:
    static = StaticBatch([part(**before)])
    with pytest.raises(NotCapturableError, match="differ in shapes, dtypes, keys or values that are not tensors"):
        static.fill([part(**after)])
