import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.records.codec import decode, encode


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Inner:
    number: float
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    count: int
    flag: bool
    color: Color
    level: Level
    choice: Literal["a", "b", 3]
    inner: Inner
    pair: tuple[int, str]
    many: tuple[Inner, ...] = ()
    by_color: Mapping[Color, float] = field(default_factory=dict)
    setting: float | int | str | bool | None = None
    anything: Any = None


FLOATS = st.floats(allow_nan=False)
# A float that is not finite is written as a string, so a setting cannot be that very string.
TEXTS = st.text().filter(lambda text: text not in ("nan", "inf", "-inf"))
INNERS = st.builds(Inner, number=FLOATS, text=st.none() | st.text())
OUTERS = st.builds(
    Outer,
    count=st.integers(),
    flag=st.booleans(),
    color=st.sampled_from(Color),
    level=st.sampled_from(Level),
    choice=st.sampled_from(["a", "b", 3]),
    inner=INNERS,
    pair=st.tuples(st.integers(), st.text()),
    many=st.lists(INNERS).map(tuple),
    by_color=st.dictionaries(st.sampled_from(Color), FLOATS),
    setting=st.none() | st.integers() | st.booleans() | FLOATS | TEXTS | st.just(2**60 + 1),
    anything=st.none() | st.lists(st.integers()),
)


@given(OUTERS)
def test_values_survive_json(value: Outer) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    back = decode(Outer, json.loads(text))
    assert back == value
    assert type(back.setting) is type(value.setting)
    assert all(type(key) is Color for key in back.by_color)


def test_not_a_number_survives_json() -> None:
    assert encode([math.nan, math.inf, -math.inf, 1.0]) == ["nan", "inf", "-inf", 1.0]
    assert math.isnan(decode(Inner, {"number": "nan"}).number)
    assert decode(Inner, {"number": "-inf"}).number == -math.inf
    number = decode(Inner, {"number": 3}).number
    assert (number, type(number)) == (3.0, float)
    with pytest.raises(ValueError, match="must be a number that a float can hold"):
        decode(Inner, {"number": 10**400})


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", Inner, [1, {"a": 1j}]])
def test_what_has_no_json_form_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        encode(value)


GOOD = {
    "count": 1, "flag": True, "color": "red", "level": 1, "choice": "a", "inner": {"number": 1.0}, "pair": [1, "x"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": True}, r"Outer\.count = True: must be an integer"),
        ({"flag": 1}, r"Outer\.flag = 1: must be a bool"),
        ({"color": "green"}, r"Outer\.color = 'green': must be one of \['red', 'blue'\]"),
        ({"level": "LOW"}, r"Outer\.level = 'LOW': must be one of \[1, 2\]"),
        ({"choice": "c"}, r"Outer\.choice = 'c': must be one of a, b, 3"),
        ({"inner": {"number": False}}, r"Outer\.inner\.number = False: must be a number"),
        ({"inner": {"number": 1.0, "text": 2}}, r"Outer\.inner\.text = 2: must be a str"),
        ({"inner": [1.0]}, r"Outer\.inner = \[1\.0\]: must be an object"),
        ({"inner": {}}, r"Outer\.inner = 'no number': must be all required fields"),
        ({"inner": {"number": 1.0, "size": 2}}, r"Outer\.inner = \['size'\]: must be only the fields number, text"),
        ({"pair": [1]}, r"Outer\.pair = \[1\]: must be a list of 2"),
        ({"pair": "1x"}, r"Outer\.pair = '1x': must be a list"),
        ({"many": [{"number": 1.0}, {"number": None}]}, r"Outer\.many\[1\]\.number = None: must be a number"),
        ({"by_color": [1]}, r"Outer\.by_color = \[1\]: must be an object"),
        ({"by_color": {"green": 1.0}}, r"Outer\.by_color = 'green': must be one of"),
        ({"by_color": {"red": "x"}}, r"Outer\.by_color\.red = 'x': must be a number"),
        ({"setting": [1]}, r"Outer\.setting = \[1\]: must be a bool"),
    ],
)
def test_what_has_another_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, {**GOOD, **change})


@dataclass(frozen=True)
class Odd:
    value: complex


def test_a_class_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Odd\.value: <class 'complex'> cannot be read from JSON"):
        decode(Odd, {"value": 1})
