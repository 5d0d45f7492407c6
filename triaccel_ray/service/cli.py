"""The command `triaccel`: parses, dispatches, and turns what a user can mend into one message and exit status 2."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_type_hints

import tyro

from triaccel_ray.service.command_line import hide_credentials
from triaccel_ray.service.endings import nothing_begun
from triaccel_ray.service.options import (
    CHOICES,
    Flag,
    Flat,
    JobName,
    JobsAddress,
    Name,
    NewName,
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
from triaccel_ray.trainables.registry import require_name

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
KEEP_HELP = (
    "Weights that model.pt in the run's folder holds: of the last epoch, or of the one that was best on the validation "
    "samples."
)
REGISTER_HELP = (
    'Register the trained model in MLflow under this name. `mlflow.pytorch.load_model("models:/NAME/1")` loads it, and '
    "imports the module of the task for that."
)
OBJECTIVE_HELP = (
    "What to optimize among trials within --margin of AMP. metric is what the task is judged by, such as accuracy. "
    "pareto draws trials for metric, time and memory at once, and ranks them by score."
)
MARGIN_HELP = (
    "What a trial may lose against AMP on validation samples: percentage points of accuracy, percent of other metrics."
)
FIXED_HELP = (
    "Fixed settings to try on validation samples: pairs of precision and batch size. The best becomes the row `fixed`. "
    "Give as many as the search had trials."
)
TUNE_HELP = (
    "Learning rates and weight decays to try for each method on validation samples. The task's recipe counts as one."
)
SUBMIT_HELP = (
    "The command after `--`, such as `triaccel submit -- search digits --trials 8`. The working directory travels with "
    "the job, without .git, virtual environments, caches, data, results, ignored files and files over 20 MiB. The "
    "cluster's Python needs triaccel-ray."
)
SHARING = "that share a GPU. Each gets an equal part of its memory, and its timings are marked."


@dataclass(frozen=True, kw_only=True)
class Run:
    """Train one job on a GPU or the CPU."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task (`triaccel doctor --tasks` lists them) or your own, as package.module:Class."""
    method: Annotated[Method, tyro.conf.arg(metavar="METHOD", help=METHOD_HELP)] = "triaccel"
    seed: int = 0
    """Seed of initialization, sample order and augmentation."""
    final: Flag = False
    """Train on training and validation samples, and read the test set once, at the end."""
    keep: Annotated[Literal["last", "best"], tyro.conf.arg(help=KEEP_HELP)] = "last"
    register: Annotated[Name, tyro.conf.arg(help=REGISTER_HELP)] = None
    name: Name = None
    """Name of the run. Default: task, method and time."""
    experiment: NewName = "triaccel-runs"
    """MLflow experiment to record in."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[Thresholds] = field(default_factory=Thresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find thresholds on the validation split, against FP32 and AMP baselines."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task (`triaccel doctor --tasks` lists them) or your own, as package.module:Class."""
    space: Literal["thresholds", "thresholds-absolute"] = "thresholds"
    """Search space: scaled to the variances of a short probe, or absolute."""
    also: Annotated[
        tuple[Literal["alpha", "tau_curv", "t_ctrl", "batch_steps"], ...], tyro.conf.arg(help_behavior_hint="")
    ] = ()
    """Settings to search besides tau_low, tau_high, rho_low and rho_high."""
    trials: int = 16
    """Configurations to try."""
    objective: Annotated[
        Literal["score", "metric", "accuracy", "time", "memory", "pareto"], tyro.conf.arg(help=OBJECTIVE_HELP)
    ] = "score"
    margin: Annotated[float, tyro.conf.arg(help=MARGIN_HELP)] = 1.0
    trials_per_gpu: Annotated[int, tyro.conf.arg(help=f"Trials {SHARING}")] = 1
    seed: int = 0
    """Seed of the sampler and of every run."""
    name: Name = None
    """Name of the search. Default: task, space and time."""
    experiment: NewName = "triaccel-searches"
    """MLflow experiment to record in."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[SearchThresholds] = field(default_factory=SearchThresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare FP32, AMP and Tri-Accel on the test set, over several seeds."""

    task: tyro.conf.Positional[TaskName]
    """A bundled task (`triaccel doctor --tasks` lists them) or your own, as package.module:Class."""
    methods: Annotated[str, tyro.conf.arg(metavar="METHOD,...")] = "fp32,amp,engine-amp,triaccel"
    """Methods to compare; `triaccel run --help` explains them."""
    ablation: Flag = False
    """Add a table of ablations: FP32, dynamic-batch, dynamic-precision, dynamic-both, triaccel."""
    fixed: Annotated[int, tyro.conf.arg(help=FIXED_HELP)] = 0
    tune_baselines: Annotated[int, tyro.conf.arg(help=TUNE_HELP)] = 0
    seeds: int = 3
    """Runs of each method; seeds count from 0."""
    trials_per_gpu: Annotated[int, tyro.conf.arg(help=f"Runs {SHARING}")] = 1
    name: Name = None
    """Name of the comparison. Default: task and time."""
    experiment: NewName = "triaccel-comparisons"
    """MLflow experiment to record in."""
    training: Flat[Training] = field(default_factory=Training)
    thresholds: Flat[Thresholds] = field(default_factory=Thresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Show a run, search or comparison: tables here, pictures and a page in its folder."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a folder."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Show why a run decided as it did, and what other thresholds would have changed."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a run's folder."""
    reasons: int = 20
    """Reasons to show at most."""
    thresholds: Flat[ReplayThresholds] = field(default_factory=ReplayThresholds)
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Resume a run, search or comparison, and record what a tracking outage left behind."""

    name: tyro.conf.Positional[RunName]
    """Name in the storage folder, or a folder."""
    experiment: Name = None
    """MLflow experiment, if nothing is recorded yet. Default: the one it is recorded in."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Ui:
    """Open the MLflow UI on the recorded runs."""

    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the UI to the network."""
    port: int = 5000
    """Port to listen on."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check that this machine is ready: versions, GPU, Triton, Ray, MLflow. Writes nothing."""

    tasks: Flag = False
    """List the bundled tasks instead."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True, kw_only=True)
class Submit:
    """Hand a run, search, comparison or resume to a cluster and go home."""

    words: tyro.conf.Positional[
        Annotated[tuple[str, ...], tyro.conf.arg(metavar="-- COMMAND ...", help=SUBMIT_HELP, help_behavior_hint="")]
    ] = ()
    name: Name = None
    """Name of the job and of its result. Default: COMMAND's --name, else made of command, task and time."""
    address: JobsAddress = None


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """List the jobs of a cluster, newest first."""

    address: JobsAddress = None


@dataclass(frozen=True, kw_only=True)
class Logs:
    """Show the output of a job."""

    job: tyro.conf.Positional[JobName]
    """The job's name, as `triaccel jobs` lists it."""
    follow: Flag = False
    """Follow until the job ends; exit with 1 unless it succeeds."""
    address: JobsAddress = None


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop a job, as Ctrl-C would. It can be resumed."""

    job: tyro.conf.Positional[JobName]
    """The job's name, as `triaccel jobs` lists it."""
    address: JobsAddress = None


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


MOST_USED: Mapping[type, str] = {
    Run: "task method name seed epochs lr batch_size memory_budget device storage_path address",
    Search: "task trials objective margin name seed epochs memory_budget device storage_path address",
    Compare: "task methods seeds ablation name epochs memory_budget device data_dir storage_path address",
    Replay: "name reasons tau_low tau_high rho_low rho_high tau_curv alpha storage_path",
}
"""Command -> what its --help shows; --help-all shows all options. The other commands have few."""
LOADING: Mapping[type, str] = {
    **dict.fromkeys((Run, Search, Compare, Resume), "loading PyTorch, Ray and MLflow ...\n"),
    Ui: "loading MLflow ...\n",
}
"""Command -> what is said at once, before imports that take seconds."""


def parse(arguments: Sequence[str] | None) -> Command:
    """Returns the command that the arguments mean, the process's own when None.

    Raises:
        SystemExit: they mean none, or ask for help; what there is to say has been printed, without passwords.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words  # what follows is another command's
    try:
        if own[:1] == ["--version"]:
            number = "(not installed)"
            with contextlib.suppress(PackageNotFoundError):
                number = version("triaccel-ray")
            sys.stdout.write(f"triaccel {number}\n")
            sys.exit(0)
        command = [word for word in own[:1] if not word.startswith("-")]
        if "--help-all" in own:
            _parse(Command, [*command, "--help"])
        if "--help" in own or "-h" in own:
            _parse(_briefly(Command) if command else Command, [*command, "--help"])
        shown = [without_credentials(word) for word in words]
        if shown != words:
            _parse(Command, shown)  # what is wrong with the words is said here, of words that hold no password
        return _parse(Command, words)
    except BrokenPipeError:  # `triaccel search --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails, too
        sys.exit(1)


def _parse(commands: Any, words: Sequence[str]) -> Command:
    parsed: Command = tyro.cli(
        commands,
        prog="triaccel",
        description=(
            "An elastic experiment service on Ray.\n"
            "`triaccel COMMAND --help` explains a command, `triaccel --version` shows the version."
        ),
        args=words,
        config=(tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff),
        registry=CHOICES,
    )
    return parsed


def _briefly(commands: Any) -> Any:
    """Returns the union of commands with the options that are used most; to show help, not to parse with."""
    brief = []
    for kind, subcommand in map(get_args, get_args(commands)):
        names = MOST_USED.get(kind)
        brief.append(Annotated[_only(kind, names.split()) if names else kind, subcommand])
    return Union[tuple(brief)]  # noqa: UP007  # of a tuple


def _only(kind: Any, names: Sequence[str]) -> Any:
    """Returns the dataclass `kind` with all options suppressed but those of these names, in its groups as well."""
    members: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    hints = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        group, *marks = get_args(hint) or (hint,)
        if tyro.conf.OmitArgPrefixes in marks:
            inner = _only(group, names)
            hints[name] = Annotated[(inner, *marks)]
            members[name] = field(default_factory=inner)
        elif name not in names:
            hints[name] = Annotated[hint, tyro.conf.Suppress]
    if kind in MOST_USED:
        members["__doc__"] += "\n--help-all shows all options."
    return dataclass(frozen=True, kw_only=True)(type(kind.__name__, (kind,), {**members, "__annotations__": hints}))


def check(command: Command) -> None:
    """Returns if nothing is wrong with the options that can be seen without PyTorch, which takes seconds to load.

    Raises:
        ValueError: an option breaks its rule; the message names it.
    """
    if isinstance(command, Run | Search | Compare):
        require_name(command.task)
        command.training.check()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; exits with 0 when done, 1 when something is not ready or failed, 2 on bad input."""
    hide_credentials()
    if os.environ.get("RAY_JOB_STOP_SIGNAL") == "SIGINT":
        # What a script starts in the background ignores this signal, and so would the jobs of a head started so.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's own tables, even when told to be silent
    try:
        with nothing_begun():
            command = parse(arguments)
            check(command)
            sys.stderr.write(LOADING.get(type(command), ""))
            sys.stderr.flush()
            from triaccel_ray.service import commands
        sys.exit(commands.execute(command))
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"{str(interrupt) or 'stopped'}\n")
        sys.exit(130)
    except Exception as error:
        status = None if os.environ.get("TRIACCEL_TRACEBACK") else _explain(error)
        if status is None:
            raise
        sys.exit(status)


def _explain(error: Exception) -> int | None:
    """Says what a user can mend, and returns the exit status; None for a bug, of which nothing has been said."""
    if isinstance(error, USER_ERRORS):
        text, status = str(error), 2
    else:
        from triaccel_ray.service.failures import PreemptedError, RunFailedError, is_disk_full

        if isinstance(error, RunFailedError | PreemptedError):
            text, status = str(error), 1
        elif isinstance(error, OSError) and is_disk_full(error):
            text = f"{error}: make room, then go on with `triaccel resume`; nothing that was complete is lost"
            status = 2
        else:
            return None
    from triaccel_ray.service.console import err

    err.print("triaccel:", without_passwords(text), style="red", soft_wrap=True)
    return status
