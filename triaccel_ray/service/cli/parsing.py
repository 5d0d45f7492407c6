"""Makes commands from the words of a command line, from keywords of Python functions, and from files of options."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_type_hints

import tyro

from triaccel_ray.config import require
from triaccel_ray.records.codec import decode
from triaccel_ray.service.cli.arguments import (
    Command,
    Compare,
    Replay,
    Run,
    Search,
    TrainingCommand,
    TuneBatch,
    word_of,
)
from triaccel_ray.service.cli.options import is_group
from triaccel_ray.service.cli.settings import given
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.registry import name_of, require_name, suggestion

C = TypeVar("C")
_PATHS: Final[Mapping[Any, Callable[[str], Any]]] = {StoragePath: StoragePath, Path | None: Path}
"""Type of a path option -> its constructor from text."""
_SIZES: Final = ("memory_budget", "memory_headroom")
MOST_USED: Mapping[type, str] = {
    Run: "task from_ method name seed epochs lr batch_size memory_budget device storage_path",
    Search: "task from_ trials objective margin name seed epochs memory_budget device storage_path",
    Compare: "task from_ methods seeds ablation name epochs memory_budget device data_dir storage_path",
    TuneBatch: "task from_ batch_min batch_max batch_size name memory_budget precision device storage_path",
    Replay: "name reasons tau_low tau_high rho_low rho_high tau_curv alpha storage_path",
}
"""Command -> the options in its --help; --help-all shows all options. The other commands have few."""


def parse(arguments: Sequence[str] | None) -> Command:
    """Returns the command that the arguments specify; None stands for the arguments of the process.

    Raises:
        SystemExit: they are invalid, or ask for help; the message has been printed, without passwords.
        ValueError: there is no such command, or the file given as --config breaks a rule.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    own_words = words[: words.index("--")] if "--" in words else words  # words after -- belong to another command
    if own_words[:1] == ["--version"]:
        sys.stdout.write(f"triaccel {version('triaccel-ray')}\n")
        sys.exit(0)
    command = [word for word in own_words[:1] if not word.startswith("-")]
    known = [word_of(kind) for kind in get_args(Command)]
    for name in command:
        meant = suggestion(name, known) or ";"
        require(name in known, "command", name, f"no such command{meant} the commands are {', '.join(known)}")
    try:
        if not {"--help-all", "--help", "-h"}.isdisjoint(own_words):
            is_brief = bool(command) and "--help-all" not in own_words
            _parse(_briefly(Command) if is_brief else Command, [*command, "--help"])
    except BrokenPipeError:  # `triaccel search --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails, too
        sys.exit(1)
    masked = [without_passwords(word) for word in words]
    if masked != words:
        _parse(Command, masked)  # reports invalid words here, without passwords in them
    parsed = _parse(Command, words)
    if isinstance(parsed, TrainingCommand) and parsed.config is not None:  # what is typed overrides what is in the file
        return _parse(type(parsed), words[1:], default=command_of(type(parsed), None, {"config": parsed.config}))
    return parsed


def _parse(commands: Any, words: Sequence[str], default: Command | None = None) -> Command:
    parsed: Command = tyro.cli(
        commands,
        default=tyro.MISSING_NONPROP if default is None else default,
        prog="triaccel",
        description=(
            "An elastic experiment service on Ray.\n"
            "`triaccel COMMAND --help` explains a command, `triaccel --version` shows the version."
        ),
        args=words,
        config=(tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
    )
    return parsed


def _briefly(commands: Any) -> Any:
    """Returns the union of commands reduced to their most used options, only to show help."""
    brief = (_only(kind, MOST_USED[kind].split()) if kind in MOST_USED else kind for kind in get_args(commands))
    return Union[tuple(brief)]  # noqa: UP007  # of a tuple


def _only(kind: Any, names: Sequence[str]) -> Any:
    """Returns the dataclass `kind` with all options hidden except those named, also in its groups."""
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    hints = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if is_group(hint):
            inner = _only(get_args(hint)[0], names)
            hints[name] = Annotated[inner, tyro.conf.OmitArgPrefixes]
            members[name] = field(default_factory=inner)
        elif name not in names:
            hints[name] = Annotated[hint, tyro.conf.Suppress]
    if kind in MOST_USED:
        members["__doc__"] += "\n--help-all shows all options."
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), {**members, "__annotations__": hints}))


def check(command: Any) -> None:
    """Checks all that can be checked without importing PyTorch; raises a ValueError that names the option."""
    if not isinstance(command, TrainingCommand):
        return
    named = [name for name in (command.task, command.from_) if name is not None]
    word = word_of(type(command))
    rule = f"give either: `triaccel {word} TASK`, or `triaccel {word} --from NAME` to repeat what has this name"
    require(len(named) == 1, "TASK, --from", (command.task, command.from_), rule)
    if command.task is not None:
        require_name(command.task)
    given(command.main, command.training, command.thresholds)  # raises if a value breaks its rule


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
