"""The commands `submit`, `jobs`, `logs` and `stop`, on Ray's job client; each of its errors becomes one message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError, RayError

from triaccel_ray.config import require
from triaccel_ray.service.cli.arguments import Resume, TrainingCommand
from triaccel_ray.service.cli.parsing import check, parse
from triaccel_ray.service.cli.spec_builder import spec_of
from triaccel_ray.service.cluster.cluster import (
    ClusterUnavailableError,
    environment_variables,
    reason_unreachable,
    scoped_token_auth,
)
from triaccel_ray.service.console import err, out, rich_table
from triaccel_ray.service.credentials import display_address, without_passwords
from triaccel_ray.service.locations import checked_name, named_store, new_name, require_experiment, tracking_uri_of
from triaccel_ray.service.report.tables import TextTable
from triaccel_ray.service.storage.storage_path import StoragePath

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_SERVER = "RAY_API_SERVER_ADDRESS"
_WAY_OUT = (
    "name a cluster with --address http://HOST:8265 or HOST:PORT, or start one with `ray start --head`, on a machine "
    "whose Ray is installed with its dashboard: `pip install 'ray[default]'`"
)


def submit(words: Sequence[str], *, name: str | None, address: str | None) -> None:
    """Submits `triaccel WORDS` as a job and prints how to follow and stop it."""
    job, notes = submission(words, name=name)
    with job_client(address) as client:
        job_id = client.submit_job(**job)
    err.print("\n".join(notes), soft_wrap=True)
    on = _address_option(address)
    out.print(f"submitted: {job_id}", soft_wrap=True)
    out.print(f"look: triaccel logs {job_id} --follow{on}    stop: triaccel stop {job_id}{on}", soft_wrap=True)


def list_jobs(*, address: str | None) -> None:
    """Prints the cluster's jobs."""
    with job_client(address) as client:
        jobs = [job for job in client.list_jobs() if job.submission_id]
    if jobs:
        out.print(rich_table(jobs_table(jobs, now_ms=time.time_ns() // 1_000_000)))
    else:
        out.print("no jobs yet; `triaccel submit -- search digits` submits one")


def show_logs(job: str, *, follow: bool, address: str | None) -> int:
    """Prints the output of a job; with `follow`, waits for its end and returns 1 unless it succeeds."""
    with job_client(address) as client:
        if not follow:
            out.print(client.get_job_logs(job), end="", soft_wrap=True)
            return 0
        client.get_job_status(job)  # an error if there is no such job
        try:
            asyncio.run(_follow(client, job))
        except KeyboardInterrupt:
            err.print(f"no longer following; {job} goes on, `triaccel stop {job}{_address_option(address)}` stops it")
            return 130
        status = client.get_job_status(job).value
    err.print(f"{job}: {status}", soft_wrap=True)
    return 0 if status == "SUCCEEDED" else 1


async def _follow(client: JobSubmissionClient, job: str) -> None:
    import aiohttp

    try:
        async for text in client.tail_job_logs(job):
            out.print(text, end="", soft_wrap=True)
    except aiohttp.ClientError as error:
        raise ConnectionError(str(error)) from error


def stop(job: str, *, address: str | None) -> None:
    """Tells a job to stop, as Ctrl-C would, and prints how to resume it."""
    with job_client(address) as client:
        client.stop_job(job)
        found = client.get_job_info(job)
    out.print(f"{job} has been asked to stop; `triaccel logs {job} --follow` shows its end", soft_wrap=True)
    resume = (found.metadata or {}).get(RESUME_KEY)
    if resume is not None:
        out.print(f"to resume on the cluster: triaccel submit{_address_option(address)} -- {resume}", soft_wrap=True)
        out.print(f"to resume on this machine: triaccel {resume}", soft_wrap=True)


def _address_option(address: str | None) -> str:
    return "" if address is None else f" --address {display_address(address)}"


@contextlib.contextmanager
def job_client(address: str | None) -> Iterator[JobSubmissionClient]:
    """Yields Ray's job client for the cluster, with Ray's log lines kept off the terminal.

    Args:
        address: `http://HOST:8265`, `HOST:PORT` of Ray itself, or `auto`. None stands for RAY_API_SERVER_ADDRESS or
            RAY_ADDRESS of the environment, else for the cluster on this machine.

    Raises:
        ClusterUnavailableError: there is no cluster, or it does not serve jobs.
        ValueError: the cluster refuses a request, such as for a job that it does not have.
    """
    address = address or os.environ.get(_SERVER) or os.environ.get("RAY_ADDRESS") or "auto"
    named = f"address = {display_address(address)!r}"
    logging.disable(logging.WARNING)
    try:
        with scoped_token_auth():
            yield _connect(address)
    except AuthenticationError as error:
        raise ClusterUnavailableError(
            f"{named}: the cluster does not let you in ({_reason(error)}); copy its head node's ~/.ray/auth_token to "
            "the same place here, or set RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
        ) from error
    except (OSError, RayError) as error:  # exceptions of `requests` are OSErrors
        rule = f"no Ray cluster serves jobs there ({_reason(error)}); {_WAY_OUT}"
        raise ClusterUnavailableError(f"{named}: {rule}") from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{named}: the cluster refuses: {_reason(error)}") from error
    finally:
        logging.disable(logging.NOTSET)


def _connect(address: str) -> JobSubmissionClient:
    # As `ray.init` does when it connects; the client alone would send no token and be rejected.
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.job_submission import JobSubmissionClient

    port = address
    if address.startswith(("http://", "https://")):  # Ray's client would wait for minutes
        host = urlsplit(address).netloc.rpartition("@")[2]
        has_port = ":" in host.rpartition("]")[2]  # the colons of an IPv6 address stand in brackets
        port = f"ray://{host}" if has_port else f"ray://{host}:{443 if address.startswith('https') else 80}"
    if reason := reason_unreachable(port):
        raise ConnectionError(reason)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with environment_variables({_SERVER: address}):  # overrides any address given to Ray's client
            return JobSubmissionClient()
    except (RuntimeError, ValueError, KeyError) as error:  # the server is not Ray, or Ray without an API server
        raise ConnectionError(str(error)) from error


def _reason(error: BaseException) -> str:
    """Returns the most informative line of the error, which can hold the server's traceback."""
    text = without_passwords(str(error)).replace("\\n", "\n")
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    if not lines:
        return type(error).__name__
    said = lines[-1] if "Traceback" in lines[0] else lines[0]
    return re.sub(r"[.\s]+$", "", said)[:300]


COMMANDS = ("run", "search", "compare", "tune-batch", "resume")
"""Commands that train; only these can be submitted to a cluster."""

_NEVER_UPLOADED = ("node_modules", "triaccel-runs", "mlruns", "mlflow.db")
"""Names of files and folders that are not uploaded. Ray leaves out .git, virtual environments and what a `.gitignore`
names; tools' caches have one of their own."""

WHAT_KEY, RESUME_KEY = "triaccel.what", "triaccel.resume"
"""Metadata keys of a job: for command and task, and for the words after `triaccel` that resume it."""


def submission(words: Sequence[str], *, name: str | None) -> tuple[dict[str, Any], list[str]]:
    """Returns the arguments of `JobSubmissionClient.submit_job` for `triaccel WORDS`, and notes for the user.

    The job runs as if typed in the current folder. All who may list jobs can read the arguments. Paths become absolute:
    a relative one would lie in the job's temporary folder, and be deleted with it.

    Args:
        words: command and options.
        name: the job's id; None for the name of its result, or one made of command, task and time.

    Raises:
        ValueError: the words are no such command, an option breaks its rule, or something makes no sense on a cluster.
        SystemExit: an option does not exist; the parser has printed a message.
    """
    command, folder = _checked_command(words), _project_folder()
    storage = command.where.storage_path
    storage = storage if storage.uri is not None else StoragePath(str(storage.folder))
    stays = [] if storage.uri is not None else [storage.folder]
    access = "share" if storage.uri is None else "reach, with credentials of their own"
    notes = [f"storage: {storage}, which all machines of the cluster must {access}"]
    if isinstance(command, Resume):
        given = command.where.tracking_uri
        store = None if given is None else named_store(given)  # else the store used before
        target, subject = _absolute_name(command.name), Path(command.name).name
        kept = [target if word == command.name else word for word in words]
        job = checked_name(name) if name is not None else new_name(None, "resume", subject)
    else:
        tracking_uri_of(command.where)
        store = named_store(command.where.tracking_uri)
        if command.experiment is not None:
            require_experiment(command.experiment)
        spec_of(command)  # raises errors in the options now; otherwise they would appear later, in the job's log
        kept = list(words)
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
    # Options that are added here come last, and so override those in `words`.
    where = ["--storage-path", storage.storage, *([] if store is None else ["--tracking-uri", store])]
    runtime_env = {
        "working_dir": str(folder),
        "excludes": [*_NEVER_UPLOADED, *_ignore_patterns(folder, stays)],
        # As Ctrl-C: the log is ended and shipped. Ray's default, SIGTERM, would leave it "running" for ever.
        "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "120"},
    }
    entrypoint = shlex.join(["python", "-m", "triaccel_ray.service", *kept, *where, "--address", "auto"])
    metadata = {WHAT_KEY: f"{words[0]} {subject}", RESUME_KEY: shlex.join(["resume", target, *where])}
    arguments = {"entrypoint": entrypoint, "submission_id": job, "runtime_env": runtime_env, "metadata": metadata}
    return arguments, notes


def _project_folder() -> Path:
    """Returns the current folder, which is uploaded with the job; raises ValueError if it is no project's."""
    folder = Path.cwd()
    rule = "is not a project's folder, and all of it would be uploaded; change into the project's folder"
    require(folder not in (Path.home(), Path(folder.anchor)), "working directory", str(folder), rule)
    return folder


def _ignore_patterns(folder: Path, paths: Sequence[Path]) -> list[str]:
    """Returns a pattern, as in `.gitignore`, for each of the paths inside `folder`."""
    inside = [path.relative_to(folder).as_posix() for path in paths if path.is_relative_to(folder) and path != folder]
    return [re.sub(r"([\\*?\[\]!# ])", r"\\\1", f"/{path}") for path in inside]


def _checked_command(words: Sequence[str]) -> TrainingCommand | Resume:
    rule = f"after -- comes one of {', '.join(COMMANDS)}, as in `triaccel submit -- search digits --trials 8`"
    require(bool(words) and words[0] in COMMANDS, "command", " ".join(words[:1]), rule)
    command = parse(words)
    check(command)
    assert isinstance(command, TrainingCommand | Resume)
    rule = "a job works on the cluster that runs it; name the cluster before the --"
    require(command.where.address in (None, "auto"), "address", command.where.address, rule)
    return command


def jobs_table(jobs: Sequence[JobDetails], *, now_ms: int) -> TextTable:
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
    return TextTable(header=("job", "what", "status", "started", "duration"), rows=rows)


def _absolute_name(name: str) -> str:
    """Returns `name`, or its absolute path if it is a path to an existing folder."""
    return os.path.abspath(name) if os.sep in name and os.path.isdir(name) else name
