"""The commands `submit`, `jobs`, `logs` and `stop`, on Ray's job client; each of its errors becomes one message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError, RayError

from triaccel_ray.service.cluster.cluster import (
    CONNECT_TIMEOUT_S,
    ClusterUnavailableError,
    display_address,
    environment_variables,
    require_listening,
    require_reachable,
    scoped_token_auth,
)
from triaccel_ray.service.console import err, out, rich_table
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.service.jobs.jobs import RESUME_KEY, STOP_WAIT_S, WHAT_KEY, jobs_grid, submission

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

POLL_INTERVAL_S = 0.3
STOP_TIMEOUT_S = STOP_WAIT_S + 15.0
_SERVER = "RAY_API_SERVER_ADDRESS"
_WAY_OUT = (
    "name a cluster with --address http://HOST:8265 or HOST:PORT, or start one with `ray start --head`, on a machine "
    "whose Ray is installed with its dashboard: `pip install 'ray[default]'`"
)


class JobError(ValueError):
    """The cluster refuses a request; the message says why, and what to do."""


def submit(words: Sequence[str], *, name: str | None, address: str | None) -> int:
    """Submits `triaccel WORDS` as a job and prints how to follow and stop it."""
    new_job = submission(words, name=name, folder=Path.cwd())
    with job_client(address) as client:
        if any(job.submission_id == new_job.id for job in client.list_jobs()):
            raise JobError(
                f"name = {new_job.id!r}: the cluster has a job of that name; choose another with --name, or see "
                f"`triaccel logs {new_job.id}`"
            )
        client.submit_job(
            entrypoint=new_job.entrypoint,
            submission_id=new_job.id,
            runtime_env=new_job.runtime_env,
            metadata={WHAT_KEY: new_job.what, RESUME_KEY: new_job.resume},
        )
    for note in new_job.notes:
        err.print(note, soft_wrap=True)
    out.print(f"submitted: {new_job.id}", soft_wrap=True)
    on = _address_option(address)
    out.print(f"look: triaccel logs {new_job.id} --follow{on}    stop: triaccel stop {new_job.id}{on}", soft_wrap=True)
    return 0


def list_jobs(*, address: str | None) -> int:
    """Prints the cluster's jobs."""
    with job_client(address) as client:
        jobs = [job for job in client.list_jobs() if job.submission_id]
    if jobs:
        out.print(rich_table(jobs_grid(jobs, now_ms=time.time_ns() // 1_000_000)))
    else:
        out.print("no jobs yet; `triaccel submit -- search digits` hands one over")
    return 0


def show_logs(job: str, *, follow: bool, address: str | None) -> int:
    """Prints the output of a job; with `follow`, waits for its end and returns 1 unless it succeeds."""
    with job_client(address) as client:
        _find(client, job)
        if not follow:
            out.print(client.get_job_logs(job), end="", soft_wrap=True)
            return 0
        try:
            asyncio.run(_follow(client, job))
        except KeyboardInterrupt:
            err.print(f"no longer following; {job} goes on, `triaccel stop {job}{_address_option(address)}` stops it")
            return 130
        status = _find(client, job).status.value
    err.print(f"{job}: {status}", soft_wrap=True)
    return 0 if status == "SUCCEEDED" else 1


async def _follow(client: JobSubmissionClient, job: str) -> None:
    import aiohttp

    try:
        async for text in client.tail_job_logs(job):
            out.print(text, end="", soft_wrap=True)
    except aiohttp.ClientError as error:
        raise ConnectionError(str(error)) from error


def stop(job: str, *, address: str | None) -> int:
    """Stops a job, as Ctrl-C would, and prints how to resume it."""
    with job_client(address) as client:
        found = _find(client, job)
        if found.status.is_terminal():
            raise JobError(
                f"job = {job!r}: has ended already ({found.status.value}), there is nothing to stop; "
                f"`triaccel logs {job}` shows what it did"
            )
        client.stop_job(job)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        found = _find(client, job)
        while not found.status.is_terminal() and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
            found = _find(client, job)
    if not found.status.is_terminal():
        err.print(f"{job} was told to stop, and has not in {STOP_TIMEOUT_S:.0f} s; see `triaccel jobs`", style="red")
        return 1
    out.print(f"{job}: {found.status.value}", soft_wrap=True)
    resume = (found.metadata or {}).get(RESUME_KEY)
    if found.status.value == "STOPPED" and resume is not None:
        out.print(f"go on, on the cluster: triaccel submit{_address_option(address)} -- {resume}", soft_wrap=True)
        out.print(f"go on, on this machine: triaccel {resume}", soft_wrap=True)
    return 0


def _find(client: JobSubmissionClient, job: str) -> JobDetails:
    jobs = {each.submission_id: each for each in client.list_jobs() if each.submission_id}
    if job not in jobs:
        names = ", ".join(list(jobs)[-3:]) or "none yet"
        raise JobError(f"job = {job!r}: the cluster has no such job; `triaccel jobs` lists them, the last are {names}")
    return jobs[job]


def _address_option(address: str | None) -> str:
    return "" if address is None else f" --address {display_address(address)}"


@contextlib.contextmanager
def job_client(address: str | None) -> Iterator[JobSubmissionClient]:
    """Yields Ray's job client for the cluster, with Ray's log lines kept off the terminal.

    Args:
        address: `http://HOST:8265`, with or without http://; `HOST:PORT` of Ray itself; or `auto`. None stands for
            RAY_API_SERVER_ADDRESS or RAY_ADDRESS of the environment, else for the cluster on this machine.

    Raises:
        ClusterUnavailableError: there is no cluster, or it does not serve jobs.
        JobError: the cluster refuses a request.
    """
    address = address or os.environ.get(_SERVER) or os.environ.get("RAY_ADDRESS") or "auto"
    named = f"address = {display_address(address)!r}"
    logging.disable(logging.WARNING)
    try:
        with scoped_token_auth():
            yield _connect(_reachable(address))
    except JobError:
        raise
    except AuthenticationError as error:
        raise ClusterUnavailableError(
            f"{named}: the cluster does not let you in ({_reason(error)}); copy its head node's ~/.ray/auth_token to "
            "the same place here, or set RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
        ) from error
    except (OSError, RayError, ClusterUnavailableError) as error:  # exceptions of `requests` are OSErrors
        reason = error.reason if isinstance(error, ClusterUnavailableError) else _reason(error)
        raise ClusterUnavailableError(f"{named}: no Ray cluster serves jobs there ({reason}); {_WAY_OUT}") from error
    except (RuntimeError, ValueError) as error:
        raise JobError(f"{named}: the cluster refuses: {_reason(error)}") from error
    finally:
        logging.disable(logging.NOTSET)


def _connect(address: str) -> JobSubmissionClient:
    # As `ray.init` does when it connects; the client alone would send no token and be rejected.
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.job_submission import JobSubmissionClient

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with environment_variables({_SERVER: address}):  # overrides any address given to Ray's client
            return JobSubmissionClient()
    except (RuntimeError, ValueError, KeyError) as error:  # the server is not Ray, or Ray without an API server
        raise ConnectionError(str(error)) from error


def _reachable(address: str) -> str:
    """Returns the address after a quick check, with http:// if HOST:PORT is an API server; Ray's client waits longer.

    Raises:
        ClusterUnavailableError: nothing listens there, or something other than Ray.
    """
    if address.startswith(("http://", "https://")):
        host = urlsplit(address).netloc.rpartition("@")[2]
        has_port = ":" in host.rpartition("]")[2]  # the colons of an IPv6 address stand in brackets
        default_port = 443 if address.startswith("https") else 80
        require_listening(host if has_port else f"{host}:{default_port}")
        return address
    require_listening(address)
    if ":" in address and "://" not in address and _speaks_http(address):
        return f"http://{address}"
    require_reachable(address)
    return address


def _speaks_http(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/api/version", timeout=CONNECT_TIMEOUT_S).close()
    except urllib.error.HTTPError:  # such as 401, if a token is required
        return True
    except Exception:  # Ray's own port does not speak HTTP, and its answer can be anything
        return False
    return True


def _reason(error: BaseException) -> str:
    """Returns the most informative line of the error, which can hold the server's traceback."""
    lines = [line.strip() for line in without_passwords(str(error)).replace("\\n", "\n").splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[-1] if "Traceback" in lines[0] else lines[0]
    return re.sub(r"[.\s]+$", "", said)[:300]
