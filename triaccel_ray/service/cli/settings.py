"""Turns fields of specs and configurations into options, and typed values into field values and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from docstring_parser import parse_from_object

from triaccel_ray.config import check_field, require
from triaccel_ray.records.codec import decode
from triaccel_ray.service.storage.storage_path import expanded
from triaccel_ray.service.units import format_exactly, parse_bytes

T = TypeVar("T")
_SWITCH = "on", "off"
"""Words for True and False."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a spec, or of a configuration in it, as a command-line option."""

    name: str
    """Name of the option, with underscores."""
    path: tuple[str, ...]
    """Field names that lead from the spec to the field."""
    kind: Any
    """Type of the field, without None."""
    default: Any
    """Default of the field; a task has its own recipe and control."""
    doc: str
    bounds: str = ""
    unit: str = ""

    @property
    def option(self) -> str:
        """The name as typed, without leading dashes."""
        return self.name.replace("_", "-")

    @property
    def words(self) -> tuple[str, ...]:
        """The allowed words, if the value is one or several of a fixed set; else empty."""
        if self.kind is bool:
            return _SWITCH
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(member.value for member in self.kind)
        literal = next((kind for kind in (self.kind, *get_args(self.kind)) if get_origin(kind) is Literal), None)
        return (*(_SWITCH if bool in get_args(self.kind) else ()), *get_args(literal))

    @property
    def metavar(self) -> str | None:
        """Placeholder for the value in the help; None for the name of its type."""
        if get_origin(self.kind) is Mapping:
            return "LAYER=PRECISION"
        if self.kind == tuple[str, ...]:
            return f"{self.name[:-1].upper()},..."
        return {"bytes": "SIZE", "folder": "FOLDER", "count or range": "N|MIN..MAX"}.get(self.unit)

    @property
    def typed(self) -> Any:
        """Annotated type of the option, whose value is None if it is not given."""
        kind = {"bytes": str, "folder": Path}.get(self.unit, self.kind)
        if get_origin(kind) is Mapping:
            kind = tuple[str, ...]
        elif kind == tuple[str, ...]:
            kind = str
        elif self.words and get_origin(kind) is not tuple:
            kind = Literal[self.words]
        is_the_tasks = self.path[0] in ("recipe", "control") or self.default in (None, ())
        text = self.doc if is_the_tasks else f"{self.doc} Default: {self.shown(self.default)}."
        return Annotated[kind | None, tyro.conf.arg(help=text, help_behavior_hint="", metavar=self.metavar)]

    def read(self, value: Any) -> Any:
        """Returns the field's value for the option's value.

        Raises:
            ValueError: the value breaks the field's rule.
        """
        if value in _SWITCH and bool in (self.kind, *get_args(self.kind)):
            value = value == "on"
        elif self.unit == "bytes":
            value = parse_bytes(value, self.name)
        elif self.unit == "folder":
            value = str(expanded(value).absolute())
        elif self.kind == tuple[str, ...]:
            value = tuple(word.strip() for word in value.split(",") if word.strip())
        elif get_origin(self.kind) is Mapping:
            pairs = [word.rpartition("=") for word in value]
            is_sound = len({name for name, *_ in pairs if name}) == len(pairs)
            require(is_sound, self.name, value, f"must be {self.metavar}, each layer once")
            value = decode(self.kind, {name: level for name, _, level in pairs}, self.name)
        elif isinstance(self.kind, type) and issubclass(self.kind, Enum):
            value = self.kind(value)
        field = self.path[-1]
        check_field(f"{field} ({self.name})" if field != self.name else field, value, self.kind, self.bounds)
        return value

    def shown(self, value: Any) -> Any:
        """Returns the field's value as an option holds it, the inverse of `read`."""
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ",".join(value)
        if self.unit == "bytes":
            return format_exactly(value)
        if isinstance(value, Mapping):
            return [f"{name}={member.value}" for name, member in value.items()]
        return value.value if isinstance(value, Enum) else value


def settings_of(kind: type, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yields the fields of a dataclass and of its nested dataclasses, with their docstrings."""
    kinds, docs = get_type_hints(kind), {each.arg_name: each.description for each in parse_from_object(kind).params}
    for each in fields(kind):
        inner, here = kinds[each.name], (*path, each.name)
        if is_dataclass(inner):
            yield from settings_of(inner, here)  # type: ignore[arg-type]  # a class, not an instance
            continue
        alternatives = [alternative for alternative in get_args(inner) if alternative is not NoneType]
        yield Setting(
            name=each.metadata.get("option") or each.name,
            path=here,
            kind=alternatives[0] if NoneType in get_args(inner) else inner,
            default=each.default,
            doc=" ".join((docs.get(each.name) or "").split()),
            bounds=each.metadata.get("bounds", ""),
            unit=each.metadata.get("unit", ""),
        )


def options(settings: Iterable[Setting]) -> Callable[[type[T]], type[T]]:
    """Turns a class into a dataclass with one field per setting, None if the option is not given."""
    known = tuple(settings)

    def make(group: type[T]) -> type[T]:
        namespace = {"__doc__": group.__doc__, "__module__": group.__module__, "settings": known}
        own = [(each.name, each.typed, None) for each in known]
        return make_dataclass(group.__name__, own, frozen=True, kw_only=True, namespace=namespace)

    return make


def given(*groups: Any) -> dict[tuple[str, ...], Any]:
    """Returns field path -> value for the options of these groups that were given.

    Raises:
        ValueError: a value breaks its field's rule.
    """
    values = ((each, getattr(group, each.name)) for group in groups for each in group.settings)
    return {each.path: each.read(value) for each, value in values if value is not None}


def changed(value: T, changes: Mapping[tuple[str, ...], Any]) -> T:
    """Returns a copy of the dataclass with new values at these field paths."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name}
        own[name] = changed(getattr(value, name), inner)
    return replace(value, **own)  # type: ignore[type-var]  # a dataclass
