"""Ray's Jobs API over HTTP: reaching it, and what it answers, as values or as one message."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ray.exceptions import AuthenticationError, RayError

from triaccel_ray.service.cluster.cluster import (
    CONNECT_TIMEOUT_S,
    ClusterUnavailableError,
    display_address,
    require_reachable,
)
from triaccel_ray.service.jobs.jobs import STOP_WAIT_S, Job, Submission
from triaccel_ray.service.tracking.tracking import without_passwords

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

POLL_INTERVAL_S = 0.3
STOP_TIMEOUT_S = STOP_WAIT_S + 15.0
_WHAT, _RESUME = "triaccel.what", "triaccel.resume"
_SERVER = "RAY_API_SERVER_ADDRESS"
_WAY_OUT = (
    "name a cluster with --address http://HOST:8265 or HOST:PORT, or start one with `ray start --head`, on a machine "
    "whose Ray is installed with its dashboard: `pip install 'ray[default]'`"
)


class JobError(ValueError):
    """The cluster does not do what was asked for; the message says why, and what to do."""


class JobApi:
    """The jobs of one cluster."""

    def __init__(self, address: str | None) -> None:
        """Finds the cluster's Jobs API.

        Args:
            address: `http://HOST:8265`, `HOST:PORT` of Ray itself, or `auto`; the environment's RAY_API_SERVER_ADDRESS
                or RAY_ADDRESS when None, else the cluster that runs on this machine.

        Raises:
            ClusterUnavailableError: no cluster is there, or none that serves jobs.
        """
        environment = os.environ.get(_SERVER) or os.environ.get("RAY_ADDRESS")
        self.address = address or environment or "auto"
        with self._speaking(), _outranking_environment(_reachable(self.address)):
            self._client = _connect()

    def submit(self, submission: Submission) -> None:
        """Uploads the working directory and starts the job.

        Raises:
            JobError: there is a job of that name, or the cluster refuses.
        """
        if any(job.id == submission.id for job in self.list()):
            raise JobError(
                f"name = {submission.id!r}: the cluster has a job of that name; choose another with --name, or see "
                f"`triaccel logs {submission.id}`"
            )
        runtime_env = {
            "working_dir": str(submission.working_dir),
            "excludes": list(submission.excludes),
            "env_vars": dict(submission.env_vars),
        }
        metadata = {_WHAT: submission.what, _RESUME: submission.resume}
        with self._speaking():
            self._client.submit_job(
                entrypoint=submission.entrypoint,
                submission_id=submission.id,
                runtime_env=runtime_env,
                metadata=metadata,
            )

    def list(self) -> list[Job]:
        """Returns all jobs that were submitted, those of other programs included."""
        with self._speaking():
            return [_job(details) for details in self._client.list_jobs() if details.submission_id]

    def find(self, job: str) -> Job:
        """Returns what is known of one job.

        Raises:
            JobError: there is none of that name.
        """
        found = {each.id: each for each in self.list()}
        if job not in found:
            names = ", ".join(list(found)[-3:]) or "none yet"
            raise JobError(
                f"job = {job!r}: the cluster has no such job; `triaccel jobs` lists them, the last are {names}"
            )
        return found[job]

    def logs(self, job: str) -> str:
        """Returns all that the job has printed so far."""
        with self._speaking():
            return str(self._client.get_job_logs(job))

    def follow(self, job: str, show: Callable[[str], None]) -> None:
        """Shows what the job has printed and prints, until it ends."""
        import aiohttp

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job):
                show(text)

        with self._speaking():
            try:
                asyncio.run(tail())
            except aiohttp.ClientError as error:
                raise ConnectionError(str(error)) from error

    def stop(self, job: str) -> Job:
        """Stops the job and returns what became of it, or of it so far if it takes longer than STOP_TIMEOUT_S.

        Raises:
            JobError: there is none of that name, or it has ended.
        """
        found = self.find(job)
        if found.ended:
            raise JobError(
                f"job = {job!r}: has ended already ({found.status}), there is nothing to stop; "
                f"`triaccel logs {job}` shows what it did"
            )
        with self._speaking():
            self._client.stop_job(job)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not (found := self.find(job)).ended and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        return found

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Keeps Ray's own log lines from the terminal, and turns what the API raises into one message."""
        logging.disable(logging.WARNING)
        try:
            yield
        except (ClusterUnavailableError, JobError):
            raise
        except AuthenticationError as error:
            raise ClusterUnavailableError(
                f"{_named(self.address)}: the cluster does not let you in ({_reason(error)}); copy its head node's "
                "~/.ray/auth_token to the same place here, or set RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
            ) from error
        except (OSError, RayError) as error:  # what `requests` raises are OSErrors
            raise ClusterUnavailableError(_no_jobs_there(self.address, error)) from error
        except (RuntimeError, ValueError) as error:
            raise JobError(f"{_named(self.address)}: the cluster refuses: {_reason(error)}") from error
        finally:
            logging.disable(logging.NOTSET)


def _connect() -> JobSubmissionClient:
    # As `ray.init` does where it connects; the client alone would send no token and be turned away.
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    from ray.job_submission import JobSubmissionClient

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        return JobSubmissionClient()
    except (RuntimeError, ValueError, KeyError) as error:  # what answers is no Ray, or Ray without an API server
        raise ConnectionError(str(error)) from error


def _reachable(address: str) -> str:
    """Returns the address, as http:// where an API server listens at HOST:PORT.

    Raises:
        ClusterUnavailableError: nothing listens there; Ray itself would wait for long.
    """
    if address.startswith(("http://", "https://")):
        try:
            parts = urlsplit(address)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_TIMEOUT_S):
                return address
        except (OSError, ValueError, OverflowError) as error:
            raise ClusterUnavailableError(_no_jobs_there(address, error)) from error
    try:
        require_reachable(address)
    except ClusterUnavailableError as error:
        raise ClusterUnavailableError(_no_jobs_there(address, error.__cause__ or error)) from error
    return f"http://{address}" if address != "auto" and "://" not in address and _speaks_http(address) else address


def _speaks_http(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/api/version", timeout=CONNECT_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:  # such as 401, where a token is needed
        return True
    except Exception:  # Ray's own port speaks something else, and the answer can be anything
        return False


@contextlib.contextmanager
def _outranking_environment(address: str) -> Iterator[None]:
    """Ray puts two environment variables above the address its client is given; here --address comes first."""
    before = os.environ.get(_SERVER)
    os.environ[_SERVER] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SERVER]
        else:
            os.environ[_SERVER] = before


def _job(details: Any) -> Job:
    metadata = details.metadata or {}
    return Job(
        id=details.submission_id,
        status=details.status.value,
        what=metadata.get(_WHAT, details.entrypoint),
        resume=metadata.get(_RESUME),
        started_ms=details.start_time,
        ended_ms=details.end_time,
    )


def _named(address: str) -> str:
    return f"address = {display_address(address)!r}"


def _no_jobs_there(address: str, error: BaseException) -> str:
    return f"{_named(address)}: no Ray cluster serves jobs there ({_reason(error)}); {_WAY_OUT}"


def _reason(error: BaseException) -> str:
    """Returns the line of the error that says most: an answer can hold the server's traceback."""
    lines = [line.strip() for line in without_passwords(str(error)).replace("\\n", "\n").splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[-1] if "Traceback" in lines[0] else lines[0]
    return re.sub(r"[.\s]+$", "", said)[:300]
