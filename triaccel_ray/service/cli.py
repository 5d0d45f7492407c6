"""The command `triaccel`: parses, dispatches, and turns what a user can mend into one message and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

import tyro

from triaccel_ray.service.command_line import hide_credentials
from triaccel_ray.service.options import (
    Flat,
    Given,
    JobName,
    ReplayThresholds,
    RunName,
    SearchThresholds,
    TaskName,
    Thresholds,
    Training,
    Where,
)
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.tracking.tracking import without_credentials, without_passwords

USER_ERRORS = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
"""What the boundary raises for input that a user can mend; anything else is a bug and shows its traceback."""

Method = Literal["triaccel", "fp32", "amp", "engine-amp", "fixed", "dynamic-batch", "dynamic-precision", "dynamic-both"]
"""The methods that a user may name; a search has one more, the probe."""
# Long ones: of a field's docstring tyro would keep the line breaks.
METHOD_HELP = "How to train. " + "; ".join(f"{name}: {METHODS[name]}" for name in get_args(Method)) + "."
OBJECTIVE_HELP = (
    "What to maximise, among configurations within --margin of the AMP baseline's accuracy. With pareto, trials are "
    "drawn for accuracy, time and memory at once, with no such condition; the one that is printed as a command has the "
    "best score within --margin."
)
FIXED_HELP = (
    "How many pairs of a precision and a batch size to try on validation samples, each kept from the first step to the "
    "last; the best pair becomes the row `fixed`. Give as many as the search for Tri-Accel's thresholds had trials."
)
TUNE_HELP = (
    "How many samples of learning rate and weight decay to try for every method on validation samples, its own "
    "recipe being one."
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train one job on one actor that owns one GPU, or the CPU."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task (`triaccel doctor --tasks` lists them), or package.module:Class."""
    method: Annotated[Method, tyro.conf.arg(metavar="METHOD", help=METHOD_HELP)] = "triaccel"
    seed: int = 0
    """Of initialisation, order and augmentation."""
    final: bool = False
    """Train on training and validation samples together, and read the test set once, at the end."""
    name: Given[str] = None
    """The run's name. Default: made of task, method and time."""
    experiment: str = "triaccel-runs"
    """MLflow experiment."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[Thresholds] = field(default_factory=Thresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find thresholds on the validation split: FP32 and AMP baselines first, then Tri-Accel trials under Ray Tune."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task, or package.module:Class."""
    space: Literal["thresholds", "thresholds-absolute"] = "thresholds"
    """Calibrated from a short probe's variances, or on absolute scales."""
    also: tuple[Literal["alpha", "tau_curv", "t_ctrl", "batch_steps"], ...] = ()
    """Further dimensions to search."""
    trials: int = 16
    """Configurations to try."""
    objective: Annotated[
        Literal["score", "accuracy", "time", "memory", "pareto"], tyro.conf.arg(help=OBJECTIVE_HELP)
    ] = "score"
    margin: float = 1.0
    """Percentage points of validation accuracy that may be given up."""
    trials_per_gpu: int = 1
    """Trials that share a GPU, each held to its part of the memory; their timings are marked as such."""
    seed: int = 0
    """Of the sampler and of every run."""
    name: Given[str] = None
    """The search's name. Default: made of task, space and time."""
    experiment: str = "triaccel-searches"
    """MLflow experiment."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[SearchThresholds] = field(default_factory=SearchThresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare FP32, AMP, Tri-Accel and its ablations over seeds; the test set is read once, by each final run."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task, or package.module:Class."""
    methods: str = "fp32,amp,engine-amp,triaccel"
    """Methods, separated by commas; `triaccel run --help` says what each is."""
    ablation: bool = False
    """Also the ablation, as a second table: FP32, dynamic-batch, dynamic-precision, dynamic-both, triaccel."""
    fixed: Annotated[int, tyro.conf.arg(help=FIXED_HELP)] = 0
    tune_baselines: Annotated[int, tyro.conf.arg(help=TUNE_HELP)] = 0
    seeds: int = 3
    """Runs of each method, with seeds from 0."""
    trials_per_gpu: int = 1
    """Runs that share a GPU, each held to its part of the memory; their timings are marked as such."""
    name: Given[str] = None
    """The comparison's name. Default: made of task and time."""
    experiment: str = "triaccel-comparisons"
    """MLflow experiment."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[Thresholds] = field(default_factory=Thresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show a run, a search or a comparison: tables here, pictures and one page in its folder."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a folder."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Show why a run decided what it did; with other thresholds, where it would have decided otherwise."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a run's folder."""
    reasons: int = 20
    """Reasons shown at most."""
    thresholds: Flat[ReplayThresholds] = field(default_factory=ReplayThresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run, search or comparison that was cut off; records what a tracking outage left behind."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a folder."""
    experiment: Given[str] = None
    """MLflow experiment, where nothing is recorded yet. Default: the one that it is recorded in."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Ui:
    """Open the MLflow UI on what is recorded, on this machine alone unless told otherwise."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 5000
    """Port to listen on."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check GPU, NVML, Triton, Ray, MLflow, versions, and the names of our packages."""

    tasks: bool = False
    """List the bundled tasks instead."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Hand run, search, compare or resume to a cluster and go home: `triaccel submit -- search digits --trials 8`.

    The working directory travels with the job, with a task module of your own in it; not .git, virtual environments,
    caches, the storage folder, the data folder, what .gitignore and .rayignore name, and files over 20 MiB. The
    `python` of the cluster's machines must have triaccel-ray installed.
    """

    words: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="-- COMMAND ...")]] = ()
    """The command and its options, after `--`."""
    name: Given[str] = None
    """The job's name, and that of what it trains. Default: COMMAND's --name, else made of command, task and time."""
    address: Given[str] = None
    """Ray cluster: http://HOST:8265, HOST:PORT or `auto`. Default: RAY_ADDRESS, or the cluster on this machine."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """List the jobs of a cluster, newest first."""

    address: Given[str] = None
    """Ray cluster: http://HOST:8265, HOST:PORT or `auto`. Default: RAY_ADDRESS, or the cluster on this machine."""


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Show what a job has printed."""

    job: tyro.conf.Positional[JobName]
    """The job's name, as `triaccel jobs` lists it."""
    follow: bool = False
    """Go on until the job ends; exits with 1 unless it succeeds."""
    address: Given[str] = None
    """Ray cluster: http://HOST:8265, HOST:PORT or `auto`. Default: RAY_ADDRESS, or the cluster on this machine."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a job as Ctrl-C would; it can be resumed."""

    job: tyro.conf.Positional[JobName]
    """The job's name, as `triaccel jobs` lists it."""
    address: Given[str] = None
    """Ray cluster: http://HOST:8265, HOST:PORT or `auto`. Default: RAY_ADDRESS, or the cluster on this machine."""


Command: TypeAlias = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Search, tyro.conf.subcommand("search")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Replay, tyro.conf.subcommand("replay")]
    | Annotated[Resume, tyro.conf.subcommand("resume")]
    | Annotated[Ui, tyro.conf.subcommand("ui")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Submit, tyro.conf.subcommand("submit")]
    | Annotated[Jobs, tyro.conf.subcommand("jobs")]
    | Annotated[Logs, tyro.conf.subcommand("logs")]
    | Annotated[Stop, tyro.conf.subcommand("stop")]
)


def parse(arguments: Sequence[str] | None) -> Command:
    """Returns the command that the arguments mean, the process's own when None.

    Raises:
        SystemExit: they mean none, or ask for help; what there is to say has been printed, without passwords.
    """
    words = sys.argv[1:] if arguments is None else arguments
    shown = [without_credentials(word) for word in words]
    if shown != list(words):
        _parse(shown)  # what is wrong with the words is said here, of words that hold no password
    return _parse(words)


def _parse(words: Sequence[str]) -> Command:
    return tyro.cli(
        Command,
        prog="triaccel",
        description="An elastic experiment service on Ray.",
        args=words,
        config=(tyro.conf.DisallowNone,),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with 0 when done, 1 when something is not ready or failed, 2 on bad input."""
    hide_credentials()
    try:
        command = parse(arguments)
    except BrokenPipeError:  # `triaccel search --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails, too
        sys.exit(1)
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        # What a script starts in the background ignores this signal, and so would the jobs of a head started so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's own tables, even when told to be silent
    # After parsing: help and mistakes in options should not wait for Ray and MLflow to load.
    try:
        from triaccel_ray.service import commands
        from triaccel_ray.service.console import err
        from triaccel_ray.service.failures import RunFailedError, is_disk_full
    except KeyboardInterrupt:  # before anything has begun
        sys.exit(130)

    try:
        sys.exit(commands.execute(command))
    except RunFailedError as error:
        if os.environ.get("TRIACCEL_TRACEBACK"):
            raise
        err.print("triaccel:", without_passwords(str(error)), style="red", soft_wrap=True)
        sys.exit(1)
    except USER_ERRORS as error:
        if os.environ.get("TRIACCEL_TRACEBACK"):
            raise
        err.print("triaccel:", without_passwords(str(error)), style="red", soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if not is_disk_full(error):
            raise
        text = f"triaccel: {error}: make room, then go on with `triaccel resume`; nothing that was complete is lost"
        err.print(text, style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        trains = isinstance(command, Run | Search | Compare | Resume)
        err.print("stopped" + "; what had begun goes on with `triaccel resume NAME`" * trains, style="yellow")
        sys.exit(130)
