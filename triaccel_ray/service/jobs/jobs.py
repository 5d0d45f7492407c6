"""Turns a command into a job of a Ray cluster: its entrypoint, its name, and the files uploaded with it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triaccel_ray.config import require
from triaccel_ray.service.cli.parsing import check, parse
from triaccel_ray.service.cli.specs import Resume, Trains
from triaccel_ray.service.cli.translation import spec_of
from triaccel_ray.service.report.tables import Grid
from triaccel_ray.service.session import checked_name, named_store, new_name, require_experiment, tracking_uri_of
from triaccel_ray.service.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

COMMANDS = ("run", "search", "compare", "tune-batch", "resume")
"""Commands that train; only these can be submitted to a cluster."""

_CACHES = ("node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")
NEVER_TRAVELS = (".git", ".venv", "venv", *_CACHES, "triaccel-runs", "mlruns", "mlflow.db")
"""Names of files and folders that are not uploaded, nor is what `.gitignore` names."""

WHAT_KEY, RESUME_KEY = "triaccel.what", "triaccel.resume"
"""Metadata keys of a job: for command and task, and for the words after `triaccel` that resume it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One job, in the form that Ray's Jobs API takes."""

    id: str
    """The submission id."""
    entrypoint: str
    """Shell command that the cluster's head node runs."""
    what: str
    """Command and task, for display."""
    resume: str
    """Words after `triaccel` that resume the job if it was stopped."""
    runtime_env: dict[str, Any]
    """Ray's runtime environment: folder to upload, exclusions, variables. All who may list jobs can read these."""
    notes: Sequence[str]
    """For the user: how the job differs from a run on this machine."""


def submission(words: Sequence[str], *, name: str | None) -> Submission:
    """Returns the job that runs `triaccel WORDS` on a cluster, as if it were typed in the current folder.

    Paths become absolute: a relative one would lie in the job's temporary folder and be deleted with it.

    Args:
        words: command and options.
        name: the job's id; None for the name of its result, or one made of command, task and time.

    Raises:
        ValueError: the words are no such command, an option breaks its rule, or something makes no sense on a cluster.
        SystemExit: an option does not exist; the parser has printed a message.
    """
    command, folder = _checked_command(words), Path.cwd()
    rule = "is no folder of a project, and would travel whole; change into the project's folder"
    require(folder not in (Path.home(), Path(folder.anchor)), "working directory", str(folder), rule)
    storage = command.where.storage_path
    storage = storage if storage.uri is not None else StoragePath(str(storage.folder))
    stays = [] if storage.uri is not None else [storage.folder]
    access = "share" if storage.uri is None else "reach, with credentials of their own"
    notes = [f"storage: {storage}, which all machines of the cluster must {access}"]
    kept = _without(words, "storage-path", "tracking-uri", "address", "name", "data-dir", "from")
    if isinstance(command, Resume):
        given = command.where.tracking_uri
        store = None if given is None else named_store(given)  # else the store used before
        target, subject = _absolute_name(command.name), Path(command.name).name
        kept = [target if word == command.name else word for word in kept]
        job = checked_name(name) if name is not None else new_name(None, "resume", subject)
    else:
        tracking_uri_of(storage, command.where.tracking_uri)
        store = named_store(command.where.tracking_uri)
        require_experiment(command.experiment)
        spec_of(command)  # raises errors in the options now; otherwise they would appear later, in the job's log
        subject = command.task or Path(command.from_ or "").name
        job = new_name(name or command.name, words[0], subject)
        target = job if command.name is None else checked_name(command.name)
        if command.from_ is not None:
            kept += ["--from", _absolute_name(command.from_)]
        kept += ["--name", target]
        data_dir = vars(command.training)["data_dir"]
        if data_dir is not None:
            data_dir = data_dir.expanduser().absolute()
            kept += ["--data-dir", str(data_dir)]
            stays.append(data_dir)
            notes.append(f"data: {data_dir}, which the cluster's machines must have too")
    where = ["--storage-path", storage.storage, *([] if store is None else ["--tracking-uri", store])]
    inside = [path.relative_to(folder).as_posix() for path in stays if path.is_relative_to(folder) and path != folder]
    return Submission(
        id=job,
        entrypoint=shlex.join(["python", "-m", "triaccel_ray.service", *kept, *where, "--address", "auto"]),
        what=f"{words[0]} {subject}",
        resume=shlex.join(["resume", target, *where]),
        runtime_env={
            "working_dir": str(folder),
            "excludes": [*NEVER_TRAVELS, *(re.sub(r"([\\*?\[\]!# ])", r"\\\1", f"/{path}") for path in inside)],
            # As Ctrl-C: the log is ended and shipped. Ray's default, SIGTERM, would leave it "running" for ever.
            "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "120"},
        },
        notes=notes,
    )


def _checked_command(words: Sequence[str]) -> Trains | Resume:
    rule = f"after -- comes one of {', '.join(COMMANDS)}, as in `triaccel submit -- search digits --trials 8`"
    require(bool(words) and words[0] in COMMANDS, "command", " ".join(words[:1]), rule)
    command = parse(words)
    check(command)
    assert isinstance(command, Trains | Resume)
    rule = "a job works on the cluster that runs it; name the cluster before the --"
    require(command.where.address in (None, "auto"), "address", command.where.address, rule)
    return command


def jobs_grid(jobs: Sequence[JobDetails], *, now_ms: int) -> Grid:
    """Returns the table of jobs, newest first, with times in this machine's time zone."""
    rows = []
    for job in sorted(jobs, key=lambda job: now_ms if job.start_time is None else job.start_time, reverse=True):
        started, seconds = "", 0
        if job.start_time is not None:
            started = f"{datetime.fromtimestamp(job.start_time / 1000):%Y-%m-%d %H:%M:%S}"
            seconds = max((job.end_time or now_ms) - job.start_time, 0) // 1000
        what = (job.metadata or {}).get(WHAT_KEY, job.entrypoint)
        what = what if len(what) <= 60 else f"{what[:57]}..."
        rows.append([job.submission_id or "", what, job.status.value, started, str(timedelta(seconds=seconds))])
    return Grid(header=("job", "what", "status", "started", "duration"), rows=rows)


def _absolute_name(name: str) -> str:
    """Returns `name`, or its absolute path if it is a path to an existing folder."""
    return os.path.abspath(name) if os.sep in name and os.path.isdir(name) else name


def _without(words: Sequence[str], *options: str) -> list[str]:
    """Returns the words without these options and their values, in any of their spellings."""
    kept: list[str] = []
    remaining = iter(words)
    for word in remaining:
        option, equals, _ = word.partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") in options:
            if not equals:
                next(remaining, None)
        else:
            kept.append(word)
    return kept
