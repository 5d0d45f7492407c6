"""Converts frozen dataclasses to JSON and back, and checks what it reads against the declared types."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T")

_JSON_SCALARS = frozenset([type(None), bool, int, str])
_NON_FINITE = ("nan", "inf", "-inf")


def encode(value: Any) -> Any:
    """Returns `value` as dicts, lists, strings and numbers; non-finite floats become the strings nan, inf, -inf.

    Raises:
        TypeError: a part is neither a dataclass, mapping, sequence, enum nor a JSON scalar.
    """
    kind = type(value)
    if kind in _JSON_SCALARS or (kind is float and math.isfinite(value)):  # nearly all values
        return value
    names = _field_names(kind)  # type: ignore[arg-type]  # mypy doubts that classes are hashable
    if names is not None:
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int | float | str):
        return value
    raise TypeError(f"{kind.__name__} has no JSON form: {value!r}")


@cache
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Returns the names of a dataclass's fields; None for any other class."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def decode(cls: type[T], data: Any, where: str = "") -> T:
    """Returns the instance of `cls` that `encode` turned into `data`.

    Raises:
        ValueError: a field is missing, unknown or of the wrong type; the message says where.
    """
    return typing.cast(T, _decode(cls, data, where or cls.__name__))


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (types.UnionType, typing.Union):
        return _decode_union(arguments, data, where)
    if origin is typing.Literal:
        _require(data in arguments, data, where, f"one of {', '.join(map(str, arguments))}")
        return data
    if origin is tuple:
        _require(isinstance(data, list), data, where, "a list")
        kinds = (arguments[0],) * len(data) if arguments[-1] is Ellipsis else arguments
        _require(len(kinds) == len(data), data, where, f"a list of {len(kinds)}")
        return tuple(_decode(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (Mapping, dict):
        _require(isinstance(data, dict), data, where, "an object")
        key_kind, value_kind = arguments
        return {_decode(key_kind, k, where): _decode(value_kind, v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
        _require(data in values, data, where, f"one of {values}")
        return kind(data)
    return _decode_scalar(kind, data, where)


def _decode_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    if type(data) in (int, bool) and type(data) in kinds:
        return data  # a float alternative would accept it, too
    *others, last = (kind for kind in kinds if kind is not type(None))
    for kind in others:
        try:
            return _decode(kind, data, where)
        except ValueError:
            continue
    return _decode(last, data, where)


def _decode_dataclass(cls: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), data, where, "an object")
    hints, required = _fields(cls)
    unknown, missing = sorted(set(data) - set(hints)), sorted(required - set(data))
    _require(not unknown, unknown, where, f"only the fields {', '.join(hints)}")
    _require(not missing, f"no {', '.join(missing)}", where, "all required fields")
    return cls(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})


@cache
def _fields(cls: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Returns the types of a dataclass's fields by name, and the names of those without a default."""
    fields, hints = dataclasses.fields(cls), typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    return {field.name: hints[field.name] for field in fields}, frozenset(required)


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if kind is float:
        _require(is_number or data in _NON_FINITE, data, where, "a number")
        try:
            return float(data)
        except OverflowError:
            raise ValueError(f"{where} = {data!r}: must be a number that a float can hold") from None
    if kind is int:
        _require(is_number and isinstance(data, int), data, where, "an integer")
    elif kind in (str, bool):
        _require(isinstance(data, kind), data, where, f"a {kind.__name__}")
    else:
        raise TypeError(f"{where}: {kind!r} cannot be read from JSON")
    return data


def _require(condition: bool, found: Any, where: str, rule: str) -> None:
    if not condition:
        raise ValueError(f"{where} = {found!r}: must be {rule}")
