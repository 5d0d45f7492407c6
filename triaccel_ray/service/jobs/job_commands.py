"""`submit`, `jobs`, `logs` and `stop`: what they do, in the order in which a person would tell it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from triaccel_ray.service.cluster.cluster import display_address
from triaccel_ray.service.console import err, out, rich_table
from triaccel_ray.service.jobs.job_api import STOP_TIMEOUT_S, JobApi
from triaccel_ray.service.jobs.jobs import jobs_grid, submission


def submit(words: Sequence[str], *, name: str | None, address: str | None) -> int:
    """Hands `triaccel WORDS` to the cluster and says how to look after it."""
    work = submission(words, name=name, folder=Path.cwd())
    JobApi(address).submit(work)
    for note in work.notes:
        err.print(note, soft_wrap=True)
    out.print(f"submitted: {work.id}", soft_wrap=True)
    to = _to(address)
    out.print(f"look: triaccel logs {work.id} --follow{to}    stop: triaccel stop {work.id}{to}", soft_wrap=True)
    return 0


def list_jobs(*, address: str | None) -> int:
    """Shows the cluster's jobs."""
    jobs = JobApi(address).list()
    if jobs:
        out.print(rich_table(jobs_grid(jobs, now_ms=time.time_ns() // 1_000_000)))
    else:
        out.print("no jobs yet; `triaccel submit -- search digits` hands one over")
    return 0


def show_logs(job: str, *, follow: bool, address: str | None) -> int:
    """Shows what a job has printed; following it, exits with 1 unless it succeeds."""
    api = JobApi(address)
    api.find(job)
    if not follow:
        _show(api.logs(job))
        return 0
    try:
        api.follow(job, _show)
    except KeyboardInterrupt:
        err.print(f"no longer following; {job} goes on, `triaccel stop {job}{_to(address)}` stops it")
        return 130
    ended = api.find(job)
    err.print(f"{job}: {ended.status}", soft_wrap=True)
    return 0 if ended.status == "SUCCEEDED" else 1


def stop(job: str, *, address: str | None) -> int:
    """Stops a job, as Ctrl-C would, and says how to go on with it."""
    stopped = JobApi(address).stop(job)
    if not stopped.ended:
        err.print(f"{job} was told to stop, and has not in {STOP_TIMEOUT_S:.0f} s; see `triaccel jobs`", style="red")
        return 1
    out.print(f"{job}: {stopped.status}", soft_wrap=True)
    if stopped.status == "STOPPED" and stopped.resume is not None:
        _point_to_resuming(stopped.resume, address)
    return 0


def _point_to_resuming(resume: str, address: str | None) -> None:
    out.print(f"go on, on the cluster: triaccel submit{_to(address)} -- {resume}", soft_wrap=True)
    out.print(f"go on, on this machine: triaccel {resume}", soft_wrap=True)


def _to(address: str | None) -> str:
    return "" if address is None else f" --address {display_address(address)}"


def _show(text: str) -> None:
    out.print(text, end="", soft_wrap=True)
