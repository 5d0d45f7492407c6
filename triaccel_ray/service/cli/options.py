"""The options of the command line: one for each field of the specs and configurations, and where results are kept."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from triaccel_ray.service.cli.settings import options, settings_of
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.runs.spec import METHODS, PROBE, TUNE_BATCH, RunSpec
from triaccel_ray.service.search.spec import SearchSpec, dimensions
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
"""An option group whose options have no prefix in their names."""


RUN_SETTINGS = {each.name: each for each in settings_of(RunSpec) if each.path[0] != "goal"}
"""Name of an option -> the field of a run that it sets."""
_METHODS = tuple(name for name in METHODS if name not in (PROBE, TUNE_BATCH))
_METHOD = replace(
    RUN_SETTINGS["method"],
    kind=Literal[_METHODS],
    doc="How to train. " + "; ".join(f"{name}: {METHODS[name]}" for name in _METHODS) + ".",
)
_KEEP = replace(RUN_SETTINGS["keep"], default="last")
_ELSEWHERE = {"task", "method", "purpose", "trials_per_gpu", "gpus", "seed", "keep", "target"}
_NO_THRESHOLDS = {"batch_size", "weights", "optimizer_state", "step_in_backward", "shard_optimizer"}
"""Settings of the control loop that are neither thresholds nor intervals."""
_TRAINING = [
    each
    for each in RUN_SETTINGS.values()
    if each.name in _NO_THRESHOLDS or each.path[1:2] == ("execution",) or each.path[0] not in {"control", *_ELSEWHERE}
]
_TRAINING.sort(key=lambda each: each.path[0] != "recipe")
_THRESHOLDS = [each for each in RUN_SETTINGS.values() if each.path[0] == "control" and each not in _TRAINING]
SEARCHED = {each.name for each in dimensions()}
"""Names of the options that every search tunes."""
_MEASURING = {"t_ctrl", "t_curv", "b_curv", "curvature", "top_k", "beta"}
_OFFERING = {"fp8", "allow_slow_precisions"}
_IN_THE_LOG = {*_MEASURING, *_OFFERING, "clip_norm", "max_skipped_steps", "loss_scale", "loss_scale_growth_interval"}
"""Settings that act only through what is measured or offered, which the log has: a replay does not read them."""


@options([_METHOD, *(RUN_SETTINGS[name] for name in ("gpus", "seed", "target")), _KEEP])
class RunOptions:
    """Training method, GPUs, seed, target, and which weights to keep."""


@options(RUN_SETTINGS[name] for name in ("batch_min", "batch_max", "lr_rule", "seed"))
class TuneBatchOptions:
    """Batch sizes to time, and the rule for the learning rate of the chosen one."""


_GPUS = (RUN_SETTINGS["gpus"], RUN_SETTINGS["trials_per_gpu"])


@options([*(each for each in settings_of(SearchSpec) if each.path[0] != "base"), *_GPUS])
class SearchOptions:
    """Search space, number of trials, and objective."""


@options(
    [
        *(each for each in settings_of(ComparisonSpec) if each.path[0] not in ("base", "ablation")),
        RUN_SETTINGS["target"],
        *_GPUS,
    ]
)
class CompareOptions:
    """Methods and seeds to compare, and trials for their settings."""


@options(_TRAINING)
class TrainingOptions:
    """Training recipe, data, memory and execution. Defaults come from the task."""


@options(_THRESHOLDS)
class ThresholdOptions:
    """Thresholds and intervals of the control loop. Defaults come from the task."""


@options(each for each in _THRESHOLDS if each.name not in SEARCHED)
class SearchThresholdOptions:
    """Settings that the search keeps fixed. Defaults come from the task."""


@options(RUN_SETTINGS[name] for name in ("precision", "fp8", "allow_slow_precisions", "accumulate", "clip_norm"))
class StepOptions:
    """Settings of a step that nothing adapts. Defaults come from the task."""


@options(each for each in _THRESHOLDS if each.name not in _IN_THE_LOG)
class ReplayThresholdOptions:
    """Thresholds for the replay. Defaults come from the run."""


# Help texts of more than one line: tyro would keep the line breaks of a field's docstring.
STORAGE_HELP = (
    "Folder for runs, searches and checkpoints; all machines of a cluster must share it. Or the URI of a store: "
    "s3://BUCKET/FOLDER, gs://, abfs://, hdfs:// or file:///FOLDER."
)
TRACKING_HELP = (
    "MLflow store: http://HOST:PORT of a server, or sqlite:///FILE. Default: that of the environment's "
    "MLFLOW_TRACKING_URI, else mlflow.db in the storage folder. Required where the storage path is a URI. User and "
    "password belong in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, which `ps` does not show."
)


@dataclass(frozen=True, kw_only=True)
class Locations:
    """Storage path, tracking store and Ray cluster."""

    storage_path: Annotated[StoragePath, _PLACE, tyro.conf.arg(help=STORAGE_HELP)] = DEFAULT_STORAGE
    tracking_uri: Annotated[str | None, tyro.conf.arg(metavar="URI", help=TRACKING_HELP, help_behavior_hint="")] = None
    address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = None
    """Ray cluster to join: HOST:PORT or auto. Default: starts Ray on this machine."""


def is_group(hint: Any) -> bool:
    """Returns whether a field with this type hint, extras included, is a group of options."""
    return tyro.conf.OmitArgPrefixes in getattr(hint, "__metadata__", ())


def settings_of_run(spec: RunSpec) -> dict[str, Any]:
    """Returns the options of `triaccel run` that have a value, by name, as they are typed."""
    values = {}
    for each in (_METHOD, RUN_SETTINGS["seed"], RUN_SETTINGS["target"], _KEEP, *_TRAINING, *_THRESHOLDS):
        value: Any = reduce(getattr, each.path, spec)
        if value not in (None, {}):
            values[each.name] = each.shown(value)
    if spec.is_distributed:
        values["gpus"] = spec.gpus
    return values


def settings_text(spec: RunSpec) -> str:
    """Returns the task and the options of `triaccel run` as TOML, for --config."""
    values = {"task": spec.task, **settings_of_run(spec)}
    if spec.purpose is Purpose.FINAL:
        values["final"] = True
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    """Returns the value as TOML; as JSON, but for infinity, DEL and characters outside the basic plane."""
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def command_for(words: str, folder: Path) -> str:
    """Returns the command `triaccel WORDS NAME`, ready to paste, for the result in `folder`.

    Outside the default storage, NAME is its path, which needs no --storage-path.
    """
    storage = DEFAULT_STORAGE.folder
    name = folder.relative_to(storage) if folder.is_relative_to(storage) else folder.absolute()
    return f"triaccel {words} {shlex.quote(str(name))}"
