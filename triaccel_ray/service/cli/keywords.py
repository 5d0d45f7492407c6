"""Command-line options as keyword arguments of Python functions, both declared by the dataclasses in `specs`."""

from __future__ import annotations

import difflib
import inspect
import os
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_type_hints

import tyro

from triaccel_ray.config import require
from triaccel_ray.records.codec import decode
from triaccel_ray.service.cli.options import is_group
from triaccel_ray.service.cli.specs import word_of
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.registry import name_of

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
_PATHS: Final[Mapping[Any, Callable[[str], Any]]] = {StoragePath: StoragePath, Path | None: Path}
"""Type of a path option -> its constructor from text."""


@dataclass(frozen=True, kw_only=True)
class Keyword:
    """One option as a keyword argument."""

    name: str
    kind: Any
    """Type of its value in the dataclass."""
    default: Any
    is_size: bool
    """Whether it is an amount of memory, which may also be given as a number of bytes."""
    is_count: bool = False
    """Whether it is a count or a range of such, which may also be given as a number."""

    def read(self, given: Any) -> Any:
        """Returns the dataclass value for the value that a caller gave; None stands for the default.

        Raises:
            ValueError: `given` is not valid for this option; the message says what is.
        """
        if given is None:
            return self.default
        if self.kind in _PATHS:
            path = os.fspath(given) if isinstance(given, os.PathLike) else given
            return _PATHS[self.kind](decode(str, path, self.name))
        if isinstance(given, tuple):
            given = list(given)
        elif self.is_size and type(given) is int:
            given = f"{given}B"
        elif self.is_count and type(given) is int:
            given = str(given)
        elif self.kind == Literal["on", "off"] | None and isinstance(given, bool):
            given = "on" if given else "off"
        return decode(self.kind, given, self.name)

    @property
    def parameter(self) -> inspect.Parameter:
        """The option as a parameter of a function signature."""
        kind = self.kind
        if kind in _PATHS:
            kind = str | Path
        elif self.is_size or self.is_count:
            kind = str | int
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default.storage if isinstance(self.default, StoragePath) else self.default,
            annotation=kind | None if self.default is None else kind,
        )


def keywords(command: type) -> Iterator[Keyword]:
    """Yields the options of a command, those of its option groups included."""
    kinds = get_type_hints(command)
    for name, hint in get_type_hints(command, include_extras=True).items():
        if is_group(hint):
            yield from keywords(kinds[name])
            continue
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Positional not in marks:
            words = {getattr(mark, "metavar", None) for mark in marks}
            default, is_count = getattr(command, name), "N|MIN..MAX" in words
            yield Keyword(name=name, kind=kinds[name], default=default, is_size="SIZE" in words, is_count=is_count)


def command_of(command: type[C], task: Any, options: Mapping[str, Any]) -> C:
    """Returns the command for `task`, a name or a class, with these options.

    Raises:
        TypeError: an option does not exist (the message names the nearest), or the task is neither name nor class.
        ValueError: a value is not valid for its option, or other processes cannot import the task.
    """
    known = {each.name: each for each in keywords(command)}
    for name in options.keys() - known.keys():
        function = word_of(command).replace("-", "_")
        close = difflib.get_close_matches(name, known, n=1)
        meant = f", did you mean {close[0]}?" if close else ";"
        rule = f"got an unexpected keyword argument {name!r}{meant} help({function}) lists all options"
        raise TypeError(f"{function}() {rule}")
    values = {name: known[name].read(given) for name, given in options.items()}
    if task is not None:
        values["task"] = name_of(task)
    if (path := values.get("config")) is not None:
        values = {**file_options(command, path, values.keys()), **values}
    return _filled(command, values)


REPLACED_BY: Final[Mapping[str, Collection[str]]] = {
    "batch_size": ("batch_min", "batch_max"),
    "curvature": ("noise_bound",),
    "from_": ("task",),
    "memory_budget": ("memory_headroom",),
    "memory_headroom": ("memory_budget",),
    "task": ("task",),
}
"""Option given outside a settings file -> options of the file that it overrides."""


def file_options(command: type, path: Path, beside: Collection[str]) -> dict[str, Any]:
    """Returns the options in a TOML file, the task included, as values of the command.

    `beside` names options that are given outside the file and override it.

    Raises:
        ValueError: the file cannot be read, or has an option that the command does not have.
    """
    try:
        values = {name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text()).items()}
    except OSError as error:
        raise ValueError(f"config = {str(path)!r}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config = {str(path)!r}: is no TOML file: {error}") from error
    known = {each.name: each for each in keywords(command) if each.name not in ("config", "from_")}
    known["task"] = Keyword(name="task", kind=str, default=None, is_size=False)
    rule = f"no such option of this command in {path}; `triaccel {word_of(command)} --help-all` lists all"
    for name in values:
        require(name in known, "option", name, rule)
    read = {name: known[name].read(value) for name, value in values.items()}
    replaced = {*beside, *(other for name in beside for other in REPLACED_BY.get(name, ()))}
    return {name: value for name, value in read.items() if name not in replaced}


def _filled(kind: type[C], values: Mapping[str, Any]) -> C:
    """Returns the dataclass and its option groups, each filled with the values of its own fields."""
    hints = get_type_hints(kind, include_extras=True).items()
    groups = {name: _filled(get_args(hint)[0], values) for name, hint in hints if is_group(hint)}
    return kind(**groups, **{name: values[name] for name, _ in hints if name in values})


def with_options_of(command: type) -> Callable[[F], F]:
    """Makes editors, notebooks and `help` show the command's options as keyword arguments of the function."""

    def show(function: F) -> F:
        own = inspect.signature(function)
        task, _ = own.parameters.values()
        options = (each.parameter for each in keywords(command))
        vars(function)["__signature__"] = own.replace(parameters=[task, *options])
        return function

    return show
