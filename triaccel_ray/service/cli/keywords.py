"""Options as keywords of Python functions and as entries of a file; the dataclasses in `arguments` declare them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from triaccel_ray.config import require
from triaccel_ray.records.codec import decode
from triaccel_ray.service.cli.arguments import word_of
from triaccel_ray.service.cli.options import is_group
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.registry import name_of, suggestion

C = TypeVar("C")
_PATHS: Final[Mapping[Any, Callable[[str], Any]]] = {StoragePath: StoragePath, Path | None: Path}
"""Type of a path option -> its constructor from text."""
_SIZES: Final = ("memory_budget", "memory_headroom")


def command_of(command: type[C], task: Any, options: Mapping[str, Any]) -> C:
    """Returns the command for `task`, a name or a class, with these options; None stands for an option's default.

    Raises:
        TypeError: an option does not exist (the message names the nearest), or the task is neither name nor class.
        ValueError: a value is not valid for its option, or other processes cannot import the task.
    """
    known = dict(_kinds(command))
    for name in options.keys() - known.keys():
        function = word_of(command).replace("-", "_")
        meant = suggestion(name, known) or "; docs/cli.md lists all options"
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    values = {name: _read(name, known[name], value) for name, value in options.items() if value is not None}
    if (path := values.get("config")) is not None:
        values = {**_in_file(path, command), **values}
    if task is not None:
        values["task"] = name_of(task)
    return _filled(command, values)


def _in_file(path: Path, command: type) -> dict[str, Any]:
    """Returns the values of the options in a TOML file, the task among them.

    Raises:
        ValueError: the file cannot be read, or has an option that the command does not have.
    """
    try:
        found = {name.replace("-", "_"): value for name, value in tomllib.loads(path.read_text()).items()}
    except OSError as error:
        raise ValueError(f"config = {str(path)!r}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"config = {str(path)!r}: is no TOML file: {error}") from error
    known = {"task": str, **dict(_kinds(command))}
    rule = f"no such option of this command in {path}; `triaccel {word_of(command)} --help-all` lists all"
    for name in found:
        require(name in known and name not in ("config", "from_"), "option", name, rule)
    return {name: _read(name, known[name], value) for name, value in found.items()}


def _kinds(command: type) -> Iterator[tuple[str, Any]]:
    """Yields name and type of the options of a command, those of its option groups included."""
    kinds = get_type_hints(command)
    for name, hint in get_type_hints(command, include_extras=True).items():
        if is_group(hint):
            yield from _kinds(kinds[name])
        elif name != "task":
            yield name, kinds[name]


def _read(name: str, kind: Any, value: Any) -> Any:
    """Returns the dataclass value for the value that a caller gave; raises ValueError if it is not valid."""
    if kind in _PATHS:
        return _PATHS[kind](decode(str, os.fspath(value) if isinstance(value, os.PathLike) else value, name))
    if isinstance(value, tuple):
        value = list(value)
    elif name in _SIZES and type(value) is int:
        value = f"{value}B"
    elif name == "gpus" and type(value) is int:
        value = str(value)
    elif isinstance(value, bool) and {"on", "off"} <= {word for each in get_args(kind) for word in get_args(each)}:
        value = "on" if value else "off"
    return decode(kind, value, name)


def _filled(kind: type[C], values: Mapping[str, Any]) -> C:
    """Returns the dataclass and its option groups, each filled with the values of its own fields."""
    hints = get_type_hints(kind, include_extras=True).items()
    groups = {name: _filled(get_args(hint)[0], values) for name, hint in hints if is_group(hint)}
    return kind(**groups, **{name: values[name] for name, _ in hints if name in values})
