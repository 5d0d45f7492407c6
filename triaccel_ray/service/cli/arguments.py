"""The commands of `triaccel` and their options, as dataclasses; the docstrings are the help texts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro

from triaccel_ray.service.cli.options import (
    CompareOptions,
    Flat,
    Locations,
    ReplayThresholdOptions,
    RunOptions,
    SearchOptions,
    SearchThresholdOptions,
    StepOptions,
    ThresholdOptions,
    TrainingOptions,
    TuneBatchOptions,
)

Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
"""An option without a value."""
Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""Name that a user gives."""
TaskName = tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="TASK", help_behavior_hint="")]]
RunName = Annotated[str, tyro.conf.arg(metavar="NAME")]
FromName = Annotated[str | None, tyro.conf.arg(name="from", metavar="NAME", help_behavior_hint="")]
ConfigFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
JobName = tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="JOB")]]
Address = Annotated[str | None, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")]
SUBMIT_HELP = (
    "The command after `--`, such as `triaccel submit -- search digits --trials 8`. The working directory is uploaded "
    "with the job, without .git, virtual environments, caches, data, results and what .gitignore names. The "
    "cluster's Python needs triaccel-ray."
)


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """A command that trains something new."""

    task: TaskName = None
    """A bundled task (`triaccel doctor --tasks` lists them) or your own, as package.module:Class."""
    from_: FromName = None
    """Repeat the result of this name, of the same command; other options change its settings."""
    config: ConfigFile = None
    """TOML file of options and of the task, as config.toml in a run's folder. What is typed overrides it."""
    main: Flat[Any] = None
    name: Name = None
    """Name of the result. Default: made of task, method or command, and time."""
    experiment: Name = None
    """MLflow experiment. Default: triaccel-runs, triaccel-searches or triaccel-comparisons."""
    training: Flat[TrainingOptions] = field(default_factory=TrainingOptions)
    thresholds: Flat[Any] = None
    where: Flat[Locations] = field(default_factory=Locations)


@dataclass(frozen=True, kw_only=True)
class Run(TrainingCommand):
    """Train one job on a GPU or the CPU."""

    main: Flat[RunOptions] = field(default_factory=RunOptions)
    final: Flag = False
    """Train on training and validation samples, and read the test set once, at the end."""
    thresholds: Flat[ThresholdOptions] = field(default_factory=ThresholdOptions)


@dataclass(frozen=True, kw_only=True)
class Search(TrainingCommand):
    """Find thresholds on the validation split, against FP32 and AMP baselines."""

    main: Flat[SearchOptions] = field(default_factory=SearchOptions)
    thresholds: Flat[SearchThresholdOptions] = field(default_factory=SearchThresholdOptions)


@dataclass(frozen=True, kw_only=True)
class Compare(TrainingCommand):
    """Compare FP32, AMP and Tri-Accel on the test set, over several seeds."""

    main: Flat[CompareOptions] = field(default_factory=CompareOptions)
    ablation: Flag = False
    """Add a table of ablations: FP32, dynamic-batch, dynamic-precision, dynamic-both, triaccel."""
    thresholds: Flat[ThresholdOptions] = field(default_factory=ThresholdOptions)


@dataclass(frozen=True, kw_only=True)
class TuneBatch(TrainingCommand):
    """Time batch sizes, and find the smallest with 97 % of the best samples per second."""

    main: Flat[TuneBatchOptions] = field(default_factory=TuneBatchOptions)
    thresholds: Flat[StepOptions] = field(default_factory=StepOptions)


@dataclass(frozen=True, kw_only=True)
class ResultCommand:
    """A command on a result that exists."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a folder."""
    where: Flat[Locations] = field(default_factory=Locations)


@dataclass(frozen=True, kw_only=True)
class Report(ResultCommand):
    """Show the tables of a run, search or comparison, and write pictures and a page to its folder."""


@dataclass(frozen=True, kw_only=True)
class Replay(ResultCommand):
    """Show why a run decided as it did, and what other thresholds would have changed."""

    reasons: int = 20
    """Maximum number of reasons to show."""
    thresholds: Flat[ReplayThresholdOptions] = field(default_factory=ReplayThresholdOptions)


@dataclass(frozen=True, kw_only=True)
class Resume(ResultCommand):
    """Resume a run, search or comparison, and record in MLflow what an outage left out."""


@dataclass(frozen=True, kw_only=True)
class Ui:
    """Open the MLflow UI on the recorded runs."""

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the UI to the network."""
    port: int = 5000
    """Port to listen on."""
    where: Flat[Locations] = field(default_factory=Locations)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check that this machine is ready: versions, GPU, Triton, Ray, MLflow. Writes nothing."""

    tasks: Flag = False
    """List the bundled tasks instead."""
    where: Flat[Locations] = field(default_factory=Locations)


@dataclass(frozen=True, kw_only=True)
class ClusterCommand:
    """A command on the jobs of a cluster."""

    address: Address = None
    """Ray cluster: http://HOST:8265, HOST:PORT or auto. Default: RAY_ADDRESS, or this machine's cluster."""


@dataclass(frozen=True, kw_only=True)
class Submit(ClusterCommand):
    """Submit a run, search, comparison, tune-batch or resume as a job of a Ray cluster."""

    words: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="-- COMMAND ...", help=SUBMIT_HELP, help_behavior_hint="")]
    ] = ()
    name: Name = None
    """Name of the job and of its result. Default: COMMAND's --name, else made of command, task and time."""


@dataclass(frozen=True, kw_only=True)
class Jobs(ClusterCommand):
    """List the jobs of a cluster, newest first."""


@dataclass(frozen=True, kw_only=True)
class Logs(ClusterCommand):
    """Show the output of a job."""

    job: JobName
    """The job's name, as `triaccel jobs` lists it."""
    follow: Flag = False
    """Follow until the job ends; exit with 1 unless it succeeds."""


@dataclass(frozen=True, kw_only=True)
class Stop(ClusterCommand):
    """Stop a job, as Ctrl-C would. It can be resumed."""

    job: JobName
    """The job's name, as `triaccel jobs` lists it."""


Command: TypeAlias = (
    Run | Search | Compare | TuneBatch | Report | Replay | Resume | Ui | Doctor | Submit | Jobs | Logs | Stop
)


def word_of(command: type) -> str:
    """Returns the word that stands for the command after `triaccel`, such as tune-batch for `TuneBatch`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "-", command.__name__).lower()
