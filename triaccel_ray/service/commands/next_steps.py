"""Messages about what to do next: where results are, how to view them, how to resume."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from triaccel_ray.service.cli.options import Locations
from triaccel_ray.service.cluster.head_watch import HeadLostError
from triaccel_ray.service.console import err, out
from triaccel_ray.service.credentials import display_address
from triaccel_ray.service.locations import tracking_uri_of
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import MODEL, SPEC, is_set_of_runs
from triaccel_ray.service.storage.storage_path import StoragePath


def command_to_resume(place: StoragePath, where: Locations) -> str:
    """Returns the command that resumes what is at `place`."""
    is_in_storage = place.uri is not None or StoragePath(place.storage).folder == where.storage_path.folder
    name = place.name if is_in_storage else str(place.folder)
    options = [*_storage_option(where), *_tracking_option(where)]
    if where.address is not None:
        options += ["--address", display_address(where.address)]
    return shlex.join(["triaccel", "resume", name, *options])


@contextlib.contextmanager
def resumable(resume_command: str, place: StoragePath) -> Iterator[None]:
    """Adds `resume_command`, the command that resumes what is at `place`, to the message of a Ctrl-C or a lost head.

    After Ctrl-C, a run that has not written its settings yet cannot be resumed, and the message says so.

    Raises:
        KeyboardInterrupt: the user interrupted the work.
        HeadLostError: the cluster's head was lost.
    """
    try:
        yield
    except KeyboardInterrupt:
        text = f"stopped; nothing was trained, and there is no {place.base_name} yet"
        if (place.folder / SPEC).exists() or is_set_of_runs(place.folder):
            text = f"stopped; to go on from the last checkpoint:\n{resume_command}"
        raise KeyboardInterrupt(text) from None
    except HeadLostError as error:
        raise HeadLostError(f"{error}; once it answers again:\n{resume_command}") from error


def print_outcome(run: RunRecord) -> None:
    """Prints how a run that is being resumed failed, and what happens now; prints nothing if it did not fail."""
    if run.end is None or run.end.status != "failed":
        return
    consequence = "the same settings would end the same way: nothing is trained; try others, such as a smaller --lr"
    if run.end.cause == "out_of_memory":
        consequence = "trying again from its last checkpoint, for there may be more memory now"
    err.print(f"{run.name} {run.status}: {run.end.message}", style="yellow", soft_wrap=True)
    err.print(consequence, soft_wrap=True)


def print_model(run: RunRecord, place: StoragePath) -> None:
    """Prints where the trained model of a finished run is, and which epoch its weights are from."""
    if run.end is None or run.end.kept_epoch is None:
        return
    kept, goal = run.end.kept_epoch, run.start.goal
    origin = f"epoch {kept}, the last"
    if run.spec.keep == "best":
        figure = next(epoch.held_out(goal) for epoch in run.epochs if epoch.epoch == kept)
        origin = f"epoch {kept}, the best of {run.epochs[-1].epoch}: {'' if figure is None else goal.named(figure)}"
    out.print(f"model:    {place}/{MODEL} ({origin})", soft_wrap=True)


def print_next_steps(place: StoragePath, where: Locations) -> None:
    """Prints where results are kept, and the commands that show them."""
    storage = _storage_option(where)
    copy = "" if place.uri is None else f" (working copy: {place.folder})"
    report = shlex.join(["triaccel", "report", place.base_name, *storage])
    ui = shlex.join(["triaccel", "ui", *storage, *_tracking_option(where)])
    out.print(f"files:    {place}{copy}\nrecorded: {tracking_uri_of(where)}", soft_wrap=True)
    out.print(f"next:     {report}\n          {ui}", soft_wrap=True)


def _storage_option(where: Locations) -> tuple[str, ...]:
    return () if where.storage_path == Locations().storage_path else ("--storage-path", where.storage_path.storage)


def _tracking_option(where: Locations) -> tuple[str, ...]:
    return () if where.tracking_uri is None else ("--tracking-uri", where.tracking_uri)
