"""The options of the command line: one for each field of the specs and configurations, and where results are kept."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from triaccel_ray.service.cli.settings import options, settings_of
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.runs.methods import METHODS, PROBE
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose

T = TypeVar("T")
DEFAULT_STORAGE = StoragePath("triaccel-runs")
_PLACE: PrimitiveConstructorSpec[StoragePath] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="FOLDER|URI",
    instance_from_str=lambda words: StoragePath(words[0]),
    is_instance=lambda value: isinstance(value, StoragePath),
    str_from_instance=lambda place: [place.storage],
)
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
"""A group of options without a prefix to their names."""
Size = Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")]
"""An amount of memory."""
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
"""An option without a value."""
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""What a user calls a result."""
CHOICES = ConstructorRegistry()
"""How options are read beside tyro's own rules."""


@CHOICES.primitive_rule
def _choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str | None] | None:
    """Returns how to read one of several words; tyro's own rule would offer None among them."""
    literals = [kind for kind in get_args(info.type) if get_origin(kind) is Literal]
    if len(literals) != 1 or set(get_args(info.type)) != {*literals, NoneType}:
        return None
    words: tuple[str, ...] = get_args(literals[0])
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(words)}}}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: value is None or value in words,
        str_from_instance=lambda value: [str(value)],
        choices=words,
    )


@CHOICES.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[float | None] | None:
    """Returns how to read a number; of what is none tyro's own rule would say how it tried to read it."""
    nouns = {int: "an integer", float: "a number"}
    kind = next((kind for kind in nouns if info.type in (kind, kind | None)), None)
    if kind is None:
        return None

    def read(given: list[str]) -> float:
        try:
            return float(given[0]) if kind is float else int(given[0])
        except ValueError:
            raise ValueError(f"{given[0]!r} must be {nouns[kind]}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


Experiment = Annotated[str, tyro.conf.arg(metavar="NAME", help="MLflow experiment to record in.")]
TaskName = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="TASK", help_behavior_hint="")]]
RunName = Annotated[str, tyro.conf.arg(metavar="NAME")]
JobName = Annotated[str, tyro.conf.arg(metavar="JOB")]
JobsAddress = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="ADDRESS",
        help="Ray cluster: http://HOST:8265, HOST:PORT or auto. Default: RAY_ADDRESS, or this machine's cluster.",
        help_behavior_hint="",
    ),
]


RUN_SETTINGS = {each.name: each for each in settings_of(RunSpec) if each.path[0] != "goal"}
"""Name of an option -> what of a run it sets."""
_METHODS = tuple(name for name in METHODS if name != PROBE)
_METHOD = replace(
    RUN_SETTINGS["method"],
    kind=Literal[_METHODS],
    doc="How to train. " + "; ".join(f"{name}: {METHODS[name]}" for name in _METHODS) + ".",
)
_KEEP = replace(RUN_SETTINGS["keep"], default="last")
_ELSEWHERE = {"task", "method", "purpose", "trials_per_gpu", "seed", "keep", "register"}
_NO_THRESHOLDS = {"batch_size", "weights", "optimizer_state", "step_in_backward"}
"""What of the control loop's settings decides nothing."""
_TRAINING = [
    each
    for each in RUN_SETTINGS.values()
    if each.name in _NO_THRESHOLDS or each.path[1:2] == ("execution",) or each.path[0] not in {"control", *_ELSEWHERE}
]
_TRAINING.sort(key=lambda each: each.path[0] != "recipe")
_THRESHOLDS = [each for each in RUN_SETTINGS.values() if each.path[0] == "control" and each not in _TRAINING]
SEARCHED = {each.name for each in dimensions()}
"""What every search looks for."""
_IN_THE_LOG = (
    *("t_ctrl", "t_curv", "b_curv", "curvature", "top_k", "beta"),
    *("clip_norm", "max_skipped_steps", "loss_scale", "loss_scale_growth_interval"),
)
"""What decides through what was measured alone, which is in the log: a replay does not read it."""


@options([_METHOD, RUN_SETTINGS["seed"], _KEEP, RUN_SETTINGS["register"]])
class RunOptions:
    """What to train with, and what to keep."""


@options([*(each for each in settings_of(SearchSpec) if each.path[0] != "base"), RUN_SETTINGS["trials_per_gpu"]])
class SearchOptions:
    """What to look for."""


@options(
    [
        *(each for each in settings_of(ComparisonSpec) if each.path[0] not in ("base", "ablation")),
        RUN_SETTINGS["trials_per_gpu"],
    ]
)
class CompareOptions:
    """What to compare."""


@options(_TRAINING)
class Training:
    """How a run trains. Defaults are the task's."""


@options(_THRESHOLDS)
class Thresholds:
    """Thresholds and intervals of the control loop. Defaults are the task's."""


@options(each for each in _THRESHOLDS if each.name not in SEARCHED)
class SearchThresholds:
    """Settings that the search keeps fixed. Defaults are the task's."""


@options(each for each in _THRESHOLDS if each.name not in _IN_THE_LOG)
class ReplayThresholds:
    """Thresholds to decide by. Defaults are the run's."""


# Texts of more than one line: of a field's docstring tyro would keep the line breaks.
STORAGE_HELP = (
    "Folder for runs, searches and checkpoints; all machines of a cluster must share it. Or the URI of a store: "
    "s3://BUCKET/FOLDER, gs://, abfs://, hdfs:// or file:///FOLDER."
)
TRACKING_HELP = (
    "MLflow store: http://HOST:PORT of a server, or sqlite:///FILE. Default: that of the environment's "
    "MLFLOW_TRACKING_URI, else mlflow.db in the storage folder. Required where the storage path is a URI. User and "
    "password belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which `ps` does not show."
)
CONFIG_HELP = (
    "TOML file of options, such as epochs = 5, and of the task, as config.toml in a run's folder. Options on the "
    "command line override it."
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where results are kept, and where work is done."""

    storage_path: Annotated[StoragePath, _PLACE, tyro.conf.arg(help=STORAGE_HELP)] = DEFAULT_STORAGE
    tracking_uri: Annotated[str | None, tyro.conf.arg(metavar="URI", help=TRACKING_HELP, help_behavior_hint="")] = None
    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Ray cluster to join: HOST:PORT or auto. Default: starts Ray on this machine."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What to begin with, in place of the task's own settings."""

    from_: Annotated[
        str | None,
        tyro.conf.arg(
            name="from",
            metavar="NAME",
            help="Repeat the run, search or comparison of this name; other options change its settings.",
            help_behavior_hint="",
        ),
    ] = None
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help=CONFIG_HELP, help_behavior_hint="")] = None


def is_group(hint: Any) -> bool:
    """Returns whether a field of this type, its annotations included, is a group of options."""
    return tyro.conf.OmitArgPrefixes in getattr(hint, "__metadata__", ())


def settings_of_run(spec: RunSpec) -> dict[str, Any]:
    """Returns the task and the value of every option of `triaccel run`, as a file of settings holds them."""
    values: dict[str, Any] = {"task": spec.task}
    for each in (_METHOD, RUN_SETTINGS["seed"], _KEEP, *_TRAINING, *_THRESHOLDS):
        value: Any = reduce(getattr, each.path, spec)
        if value not in (None, {}):
            values[each.name] = each.shown(value)
    return values | ({"final": True} if spec.purpose is Purpose.FINAL else {})


def settings_text(spec: RunSpec) -> str:
    """Returns `settings_of_run` as TOML, which --config reads."""
    values = settings_of_run(spec)
    texts = {name: str(value) if isinstance(value, float) else _toml(value) for name, value in values.items()}
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def _toml(value: Any) -> str:
    """Returns the value as JSON that TOML reads alike: no surrogate pairs, and no bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_repeat(command: str, folder: Path) -> str:
    """Returns the command that does again what is in `folder`, ready to paste; from elsewhere it is named by its path.

    The path needs no --storage-path.
    """
    storage = DEFAULT_STORAGE.folder
    name = folder.relative_to(storage) if folder.is_relative_to(storage) else folder.absolute()
    return shlex.join(["triaccel", command, "--from", str(name)])
