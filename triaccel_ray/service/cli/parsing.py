"""Parses the words of a command line into a command, or prints the requested help."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any, Union, get_args, get_type_hints

import tyro

from triaccel_ray.config import require
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
from triaccel_ray.service.cli.keywords import command_of
from triaccel_ray.service.cli.options import is_group
from triaccel_ray.service.cli.settings import given
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.trainables.registry import require_name

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
        ValueError: the file given as --config breaks a rule.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    own_words = words[: words.index("--")] if "--" in words else words  # words after -- belong to another command
    if own_words[:1] == ["--version"]:
        sys.stdout.write(f"triaccel {version('triaccel-ray')}\n")
        sys.exit(0)
    command = [word for word in own_words[:1] if not word.startswith("-")]
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
