"""The options of the command line: one for each field of the specs and configurations, and where results are kept."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import shlex
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from triaccel_ray.config import check_field
from triaccel_ray.records.codec import decode
from triaccel_ray.service.comparisons.spec import ComparisonSpec
from triaccel_ray.service.runs.methods import METHODS, PROBE
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.searches.spec import SearchSpec
from triaccel_ray.service.storage.place import Place
from triaccel_ray.service.units import format_exactly, parse_bytes

T = TypeVar("T")
DEFAULT_STORAGE = Place("triaccel-runs")
_PLACE: PrimitiveConstructorSpec[Place] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="FOLDER|URI",
    instance_from_str=lambda words: Place(words[0]),
    is_instance=lambda value: isinstance(value, Place),
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
NewName = Annotated[str, tyro.conf.arg(metavar="NAME")]
CHOICES = ConstructorRegistry()
"""How options are read beside tyro's own rules."""


@CHOICES.primitive_rule
def _choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str | None] | None:
    """Reads an option that is one of several words where it is given; None, which is not typed, is no choice."""
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


TaskName = Annotated[str | None, tyro.conf.arg(metavar="TASK", help_behavior_hint="")]
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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a spec, or of a configuration in it, as an option."""

    name: str
    """Of the option, with underscores."""
    path: tuple[str, ...]
    """Names of the fields that lead to it."""
    kind: Any
    """Type of the field, None left out."""
    default: Any
    """Of the field; a task has its own recipe and control."""
    doc: str
    bounds: str = ""
    unit: str = ""

    @property
    def option(self) -> str:
        """The name as it is typed, without the dashes before it."""
        return self.name.replace("_", "-")

    @property
    def words(self) -> tuple[str, ...]:
        """What it may be, if that is one or several of a few words."""
        if self.kind is bool:
            return "on", "off"
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(member.value for member in self.kind)
        literal = next((kind for kind in (self.kind, *get_args(self.kind)) if get_origin(kind) is Literal), None)
        return get_args(literal)

    @property
    def metavar(self) -> str | None:
        """What stands for its value in the help; None: the name of its type."""
        if get_origin(self.kind) is Mapping:
            return "LAYER=PRECISION"
        if self.kind == tuple[str, ...]:
            return f"{self.name[:-1].upper()},..."
        return {"bytes": "SIZE", "folder": "FOLDER"}.get(self.unit)

    @property
    def typed(self) -> Any:
        """Type of the option, which is None where it is not given."""
        kind = {"bytes": str, "folder": Path}.get(self.unit, self.kind)
        if get_origin(kind) is Mapping:
            kind = tuple[str, ...]
        elif kind == tuple[str, ...]:
            kind = str
        elif self.words and get_origin(kind) is not tuple:
            kind = Literal[self.words]
        is_the_tasks = self.path[0] in ("recipe", "control") or self.default in (None, ())
        text = self.doc if is_the_tasks else f"{self.doc} Default: {worded(self.default)}."
        return Annotated[kind | None, tyro.conf.arg(help=text, help_behavior_hint="", metavar=self.metavar)]

    def read(self, value: Any) -> Any:
        """Returns the field's value for the option's.

        Raises:
            ValueError: it breaks the field's rule.
        """
        if self.kind is bool:
            value = value == "on"
        elif self.unit == "bytes":
            value = parse_bytes(value)
        elif self.unit == "folder":
            value = str(Path(value).expanduser().absolute())
        elif self.kind == tuple[str, ...]:
            value = tuple(word.strip() for word in value.split(",") if word.strip())
        elif get_origin(self.kind) is Mapping:
            words = dict(word.rpartition("=")[::2] for word in value)
            value = decode(self.kind, words, self.name)
        elif isinstance(self.kind, type) and issubclass(self.kind, Enum):
            value = self.kind(value)
        field = self.path[-1]
        check_field(f"{field} ({self.name})" if field != self.name else field, value, self.kind, self.bounds)
        return value

    def shown(self, value: Any) -> Any:
        """Returns what a file of settings holds for the field's value, `read` the other way."""
        if self.unit == "bytes":
            return format_exactly(value)
        if isinstance(value, Mapping):
            return [f"{name}={member.value}" for name, member in value.items()]
        return value.value if isinstance(value, Enum) else value


def settings_of(kind: type, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Yields the fields of a dataclass and of those in it, with their docstrings."""
    kinds, docs = get_type_hints(kind), _docstrings(kind)
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
            doc=docs.get(each.name, ""),
            bounds=each.metadata.get("bounds", ""),
            unit=each.metadata.get("unit", ""),
        )


def worded(value: Any) -> str:
    """Returns a default as it would be typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _docstrings(kind: type) -> dict[str, str]:
    """Returns the texts below the fields of a class, each in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body  # type: ignore[attr-defined]  # a class
    texts = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = " ".join(str(text.value.value).split())  # type: ignore[union-attr]  # a name
    return texts


def _options(settings: Iterable[Setting]) -> Callable[[type[T]], type[T]]:
    """Gives a class one field for each of the settings, None where the option is not given."""
    known = tuple(settings)

    def make(group: type[T]) -> type[T]:
        namespace = {"__doc__": group.__doc__, "__module__": group.__module__, "settings": known}
        own = [(each.name, each.typed, None) for each in known]
        return make_dataclass(group.__name__, own, frozen=True, kw_only=True, namespace=namespace)

    return make


def given(group: Any) -> dict[tuple[str, ...], Any]:
    """Returns the fields that were given among the options of a group, by their paths.

    Raises:
        ValueError: a value breaks its field's rule.
    """
    values = ((each, getattr(group, each.name)) for each in group.settings)
    return {each.path: each.read(value) for each, value in values if value is not None}


def changed(value: T, changes: Mapping[tuple[str, ...], Any]) -> T:
    """Returns the dataclass with other values at these paths."""
    own = {path[0]: new for path, new in changes.items() if len(path) == 1}
    for name in {path[0] for path in changes if len(path) > 1}:
        inner = {path[1:]: new for path, new in changes.items() if path[0] == name}
        own[name] = changed(getattr(value, name), inner)
    return replace(value, **own)  # type: ignore[type-var]  # a dataclass


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
_TRAINING = [
    each
    for each in RUN_SETTINGS.values()
    if each.name == "batch_size" or each.path[1:2] == ("execution",) or each.path[0] not in {"control", *_ELSEWHERE}
]
_TRAINING.sort(key=lambda each: each.path[0] != "recipe")
_THRESHOLDS = [each for each in RUN_SETTINGS.values() if each.path[0] == "control" and each not in _TRAINING]
SEARCHED = ("tau_low", "tau_high", "rho_low", "rho_high")
"""What every search looks for."""
_IN_THE_LOG = ("t_ctrl", "t_curv", "b_curv", "curvature")
"""When a run ticked and how it measured curvature: no decision depends on it otherwise."""


@_options([_METHOD, RUN_SETTINGS["seed"], _KEEP, RUN_SETTINGS["register"]])
class RunOptions:
    """What to train with, and what to keep."""


@_options([*(each for each in settings_of(SearchSpec) if each.path[0] != "base"), RUN_SETTINGS["trials_per_gpu"]])
class SearchOptions:
    """What to look for."""


@_options(
    [
        *(each for each in settings_of(ComparisonSpec) if each.path[0] not in ("base", "ablation")),
        RUN_SETTINGS["trials_per_gpu"],
    ]
)
class CompareOptions:
    """What to compare."""


@_options(_TRAINING)
class Training:
    """How a run trains. Defaults are the task's."""


@_options(_THRESHOLDS)
class Thresholds:
    """Thresholds and intervals of the control loop. Defaults are the task's."""


@_options(each for each in _THRESHOLDS if each.name not in SEARCHED)
class SearchThresholds:
    """Settings that the search keeps fixed. Defaults are the task's."""


@_options(each for each in _THRESHOLDS if each.name not in _IN_THE_LOG)
class ReplayThresholds:
    """Thresholds to decide by. Defaults are the run's."""


# Texts of more than one line: of a field's docstring tyro would keep the line breaks.
STORAGE_HELP = (
    "Folder for runs, searches and checkpoints; all machines of a cluster must share it. Or the URI of a store: "
    "s3://BUCKET/FOLDER, gs://, abfs://, hdfs:// or file:///FOLDER."
)
TRACKING_HELP = (
    "MLflow store: http://HOST:PORT of a server, or sqlite:///FILE. Default: mlflow.db in the storage folder. Required "
    "where the storage path is a URI. User and password belong in MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, which `ps` does not show."
)
CONFIG_HELP = (
    "TOML file of options, such as epochs = 5, and of the task, as config.toml in a run's folder. Options given beside "
    "it go first."
)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where results are kept, and where work is done."""

    storage_path: Annotated[Place, _PLACE, tyro.conf.arg(help=STORAGE_HELP)] = DEFAULT_STORAGE
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
            help="Repeat what has this name in the storage folder, with the options given beside it.",
            help_behavior_hint="",
        ),
    ] = None
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help=CONFIG_HELP, help_behavior_hint="")] = None


def settings_of_run(spec: RunSpec) -> dict[str, Any]:
    """Returns the task and the value of every option of `triaccel run`, as a file of settings holds them."""
    values: dict[str, Any] = {"task": spec.task}
    for each in (_METHOD, RUN_SETTINGS["seed"], _KEEP, *_TRAINING, *_THRESHOLDS):
        value: Any = spec
        for name in each.path:
            value = getattr(value, name)
        if value not in (None, {}):
            values[each.name] = each.shown(value)
    return values


def settings_text(spec: RunSpec) -> str:
    """Returns `settings_of_run` as TOML, which --config reads."""
    values = settings_of_run(spec)
    texts = {name: str(value) if isinstance(value, float) else json.dumps(value) for name, value in values.items()}
    return "".join(f"{name} = {text}\n" for name, text in texts.items())


def to_repeat(command: str, folder: Path) -> str:
    """Returns the command that does again what is in `folder`, ready to paste; from elsewhere it is named by its path.

    The path needs no --storage-path.
    """
    storage = DEFAULT_STORAGE.folder
    name = folder.relative_to(storage) if folder.is_relative_to(storage) else folder.absolute()
    return shlex.join(["triaccel", command, "--from", str(name)])
