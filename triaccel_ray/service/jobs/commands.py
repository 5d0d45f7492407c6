"""The commands `submit`, `jobs`, `logs` and `stop`, on Ray's job client; each of its errors becomes one message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError, RayError

from triaccel_ray.service.cluster.cluster import (
    ClusterUnavailableError,
    display_address,
    environment_variables,
    require_listening,
    require_reachable,
    scoped_token_auth,
)
from triaccel_ray.service.console import err, out, rich_table
from triaccel_ray.service.credentials import without_passwords
from triaccel_ray.service.jobs.jobs import RESUME_KEY, WHAT_KEY, jobs_grid, submission

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_SERVER = "RAY_API_SERVER_ADDRESS"
_WAY_OUT = (
    "name a cluster with --address http://HOST:8265 or HOST:PORT, or start one with `ray start --head`, on a machine "
    "whose Ray is installed with its dashboard: `pip install 'ray[default]'`"
)


class JobError(ValueError):
    """The cluster refuses a request, such as for a job that it does not have; the message says why."""


def submit(words: Sequence[str], *, name: str | None, address: str | None) -> int:
    """Submits `triaccel WORDS` as a job and prints how to follow and stop it."""
    job = submission(words, name=name)
    with job_client(address) as client:
        client.submit_job(
            entrypoint=job.entrypoint,
            submission_id=job.id,
            runtime_env=job.runtime_env,
            metadata={WHAT_KEY: job.what, RESUME_KEY: job.resume},
        )
    err.print("\n".join(job.notes), soft_wrap=True)
    on = _address_option(address)
    out.print(f"submitted: {job.id}", soft_wrap=True)
    out.print(f"look: triaccel logs {job.id} --follow{on}    stop: triaccel stop {job.id}{on}", soft_wrap=True)
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


def stop(job: str, *, address: str | None) -> int:
    """Tells a job to stop, as Ctrl-C would, and prints how to resume it."""
    with job_client(address) as client:
        client.stop_job(job)
        found = client.get_job_info(job)
    out.print(f"{job} is told to stop; `triaccel logs {job} --follow` shows its end", soft_wrap=True)
    resume = (found.metadata or {}).get(RESUME_KEY)
    if resume is not None:
        out.print(f"go on, on the cluster: triaccel submit{_address_option(address)} -- {resume}", soft_wrap=True)
        out.print(f"go on, on this machine: triaccel {resume}", soft_wrap=True)
    return 0


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
        JobError: the cluster refuses a request.
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

    if address.startswith(("http://", "https://")):  # a quick check: Ray's client waits longer
        host = urlsplit(address).netloc.rpartition("@")[2]
        has_port = ":" in host.rpartition("]")[2]  # the colons of an IPv6 address stand in brackets
        require_listening(host if has_port else f"{host}:{443 if address.startswith('https') else 80}")
    else:
        require_reachable(address)
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with environment_variables({_SERVER: address}):  # overrides any address given to Ray's client
            return JobSubmissionClient()
    except (RuntimeError, ValueError, KeyError) as error:  # the server is not Ray, or Ray without an API server
        raise ConnectionError(str(error)) from error


def _reason(error: BaseException) -> str:
    """Returns the most informative line of the error, which can hold the server's traceback."""
    lines = [line.strip() for line in without_passwords(str(error)).replace("\\n", "\n").splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[-1] if "Traceback" in lines[0] else lines[0]
    return re.sub(r"[.\s]+$", "", said)[:300]
