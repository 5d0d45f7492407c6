from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from triaccel_ray.model.pytree import cast_floating, clone_tensors, copy_tensors, map_tensors, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


class Items(list):  # type: ignore[type-arg]
    """A list of a class of its own."""


@dataclass
class Record:
    logits: Any
    name: str = "record"


class Strict(OrderedDict):  # type: ignore[type-arg]
    """A mapping like Hugging Face's `ModelOutput`: items can be set one by one, and in no other way."""

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on a Strict instance.")


def tensors(count: int) -> list[Tensor]:
    return [torch.full((2,), float(i)) for i in range(count)]


A, B, C = tensors(3)


@pytest.mark.parametrize(
    "value",
    [
        (A, [B, {"c": C}]),
        Pair(A, Pair(B, C)),
        Strict(b=A, a=[B], c=C),
        defaultdict(list, {"x": A, "y": (B, C)}),
        [Record((A, Record({"b": B}))), C],
        MappingProxyType({"a": A, "b": [B], "c": Record(C)}),
        Items([A, Items([B]), C]),
        {"text": "no tensor", "a": A, "none": None, "b": B, "number": 3, "c": C},
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_tensors_are_met_in_the_same_order(value: Any) -> None:
    assert [tensor is each for tensor, each in zip(tensors_in(value), (A, B, C), strict=True)] == [True] * 3
    mapped = map_tensors(lambda tensor: tensor + 1, value)
    assert type(mapped) is type(value)
    assert [tensor.tolist() for tensor in tensors_in(mapped)] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert A.tolist() == [0.0, 0.0]


class Finite(UserDict):  # type: ignore[type-arg]
    """A mapping that checks its items."""

    def __setitem__(self, key: str, item: Any) -> None:
        assert item.isfinite().all()
        super().__setitem__(key, item)


def test_tensors_are_met_in_a_mapping_that_checks_its_items() -> None:
    assert len(tensors_in(Finite(a=A, b=B))) == 2


def test_only_floating_point_is_cast() -> None:
    cast = cast_floating({"ids": torch.arange(2), "mask": A}, torch.float16)
    assert (cast["ids"].dtype, cast["mask"].dtype) == (torch.int64, torch.float16)


def named(pairs: list[tuple[str, Tensor]]) -> Any:
    return Record(dict(pairs))


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType, named])
def test_tensors_are_copied_by_name_whatever_the_order(kind: Any) -> None:
    def made(names: str, number: float) -> Any:
        pairs = [(name, torch.full((2,), number + index)) for index, name in enumerate(names)]
        return (kind(dict(pairs) if kind is MappingProxyType else pairs),)

    target = made("ab", 0.0)
    before = tensors_in(target)
    copy_tensors(target, made("ba", 5.0))
    assert [float(tensor[0]) for tensor in before] == [6.0, 5.0]
    assert all(one is other for one, other in zip(tensors_in(target), before, strict=True))


def test_one_tensor_in_two_places_is_one_in_the_copy() -> None:
    shared = torch.ones(2)
    copied = clone_tensors(({"labels": shared}, [shared]))
    assert copied[0]["labels"] is copied[1][0] is not shared
