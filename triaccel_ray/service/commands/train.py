"""Runs a training, search or comparison for the command line and Python."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import ray

from triaccel_ray.records.events import End
from triaccel_ray.service.cli.options import Where, settings_text
from triaccel_ray.service.cli.specs import Compare, Resume, Run, Search, Trains
from triaccel_ray.service.cli.translation import spec_of
from triaccel_ray.service.cluster.cluster import (
    cluster,
    display_address,
    gpus_of_a_run,
    joined_address,
    require_gpu_to_share,
    require_reachable,
)
from triaccel_ray.service.commands.model_delivery import deliver_model
from triaccel_ray.service.commands.next_steps import ONCE_IT_IS_BACK, print_outcome, resumable, resume_words
from triaccel_ray.service.commands.progress import Progress
from triaccel_ray.service.commands.recording import (
    experiment_of,
    recording,
    recording_parent,
    search_parent,
    with_recorded_store,
)
from triaccel_ray.service.compare import comparison
from triaccel_ray.service.compare.choosing import choose, trial_of
from triaccel_ray.service.compare.comparison import COMPARISON, read_comparison, summary_metrics
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.console import err, out
from triaccel_ray.service.failures import RunFailedError, reporting_full_disk
from triaccel_ray.service.report.comparison import view_comparison
from triaccel_ray.service.report.report import View
from triaccel_ray.service.report.run import view_run
from triaccel_ray.service.report.search import view_search
from triaccel_ray.service.runs.environment import require_budget
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.runs.record import read_if_begun, read_run, read_spec
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.runs.shared_data import NotSharedError, SharedSplits, share_splits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.search.search import (
    FOUND,
    REPEATS,
    SEARCH,
    TRIALS,
    best_trial,
    contenders,
    found_in,
    prepare,
    read_search,
    to_be_repeated,
    tune_trials,
)
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.session import find, new_name, open_tracker, require_experiment, storage_of
from triaccel_ray.service.storage.copies import PAGES
from triaccel_ray.service.storage.layout import (
    BASELINES,
    ERROR,
    SETTINGS,
    begin,
    claiming_name,
    write_atomically,
    write_value,
)
from triaccel_ray.service.storage.mirror import bring, mirrored, require_unused
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.tracking.shipper import Parent
from triaccel_ray.service.tracking.tracking import Tracker
from triaccel_ray.service.units import counted

MISTAKES = ("bug", "preempted", "store")
"""Causes of failures that are unrelated to the settings tried."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a command trains, stores and records its work, and what shows the result."""

    place: StoragePath
    where: Where
    experiment: str | None
    """MLflow experiment; None for the default."""
    resume: bool = False
    """Whether the command resumes what is at `place`."""
    show: Callable[[View], object]
    """Called with the result as soon as there is one, before the rest of it is recorded."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a command that trains."""

    context: Context
    view: View | None
    """None if nothing was left to train."""
    is_complete: bool
    """Whether all requested work was done; for a search, also whether a trial can be recommended."""
    failures: Sequence[str] = ()
    """Messages of the failed runs of a search or comparison, already printed."""
    num_finished: int = 1
    """Runs that are not in `failures`."""


def carry_out(command: Trains | Resume, show: Callable[[View], object] = lambda view: None) -> Outcome:
    """Carries out a command that trains and returns its outcome; `show` gets the result as soon as there is one.

    Raises:
        ValueError, TypeError, OSError: the request is invalid.
        RunFailedError: a run failed, and with it the whole command.
        HeadLostError: the cluster's head was lost; the message has the command that resumes the work.
        KeyboardInterrupt: the user interrupted the command; likewise.
    """
    where = replace(command.where, address=joined_address(command.where.address))
    if isinstance(command, Trains):
        asked = spec_of(command)
        place = storage_of(command.where) / new_name(command.name, *_task_and_kind(asked))
    else:
        place = find(command.name, command.where, writable=True)
        where = with_recorded_store(place.folder, where)
        asked = _asked_before(place.folder)
    resume = isinstance(command, Resume)
    context = Context(place=place, where=where, experiment=command.experiment, resume=resume, show=show)
    match asked:
        case SearchSpec():
            return _search(asked, context)
        case ComparisonSpec():
            return _compare(asked, context)
        case _:
            return _train(asked, context)


def _task_and_kind(asked: RunSpec | SearchSpec | ComparisonSpec) -> tuple[str, str]:
    """Returns the words that begin the default name of a result."""
    match asked:
        case SearchSpec():
            return asked.base.task, asked.space
        case ComparisonSpec():
            return asked.base.task, "comparison"
        case _:
            return asked.task, asked.method


def _asked_before(folder: Path) -> RunSpec | SearchSpec | ComparisonSpec:
    if (folder / SEARCH).exists():
        return read_search(folder).spec
    return read_comparison(folder).spec if (folder / COMPARISON).exists() else read_spec(folder)


def _prepare(spec: RunSpec, context: Context, usual: str) -> tuple[Tracker, str, str]:
    """Runs all checks that need no Ray; returns the tracker, the experiment and the command that resumes.

    Nothing is written at the place, so that a mistake does not use up the name.
    """
    place, where, given = context.place, context.where, context.experiment
    require_experiment(given)
    if not context.resume:
        require_unused(place)
    require_reachable(where.address)
    require_gpu_to_share(where.address, spec)
    if where.address is None:
        require_budget(spec)
    tracker = open_tracker(where.storage_path, where.tracking_uri)
    experiment = experiment_of(tracker, place.folder, given=given, usual=usual)
    return tracker, experiment, resume_words(place, where, experiment, usual)


def _train(spec: RunSpec, context: Context) -> Outcome:
    place, where, folder = context.place, context.where, context.place.folder
    tracker, experiment, words = _prepare(spec, context, Run.experiment)
    before = read_if_begun(folder) if context.resume else None
    if before is not None and before.has_outcome:
        print_outcome(before)
        _write_settings(spec, folder)
        if before.status != "failed (out_of_memory)":
            with mirrored(place), recording(tracker, folder, words, experiment=experiment):
                out.print(f"{folder.name} is {before.status}; recording in MLflow what is missing")
            is_handed_over = deliver_model(before, place, tracker, words)
            is_complete = before.status == "finished" and is_handed_over
            return Outcome(context=context, view=None, is_complete=is_complete)
    with (
        contextlib.nullcontext() if context.resume else claiming_name(folder),
        resumable(words, place),
        mirrored(place),
        _ray(where, words),
        recording(tracker, folder, words, experiment=experiment),
    ):
        specs, num_gpus = {folder.name: spec}, gpus_of_a_run(spec, where.address)
        title = f"{spec.task}: {METHODS[spec.method]}"
        with Progress(title, folder.parent, specs, goal=spec.goal, each_epoch=True):
            failures = run_all(specs, place.parent, num_gpus=num_gpus)
    if failures:  # or invalid input that only the run's own process could detect
        raise failures[folder.name]
    run = read_run(folder)
    _write_settings(spec, folder)
    view = view_run(run)
    context.show(view)
    bring(place, PAGES)
    return Outcome(context=context, view=view, is_complete=deliver_model(run, place, tracker, words))


def _write_settings(spec: RunSpec, folder: Path) -> None:
    with reporting_full_disk(folder):
        write_atomically(folder / SETTINGS, settings_text(spec))


def _search(spec: SearchSpec, context: Context) -> Outcome:
    base, place, where, folder = spec.base, context.place, context.where, context.place.folder
    tracker, experiment, words = _prepare(base, context, Search.experiment)
    if not context.resume:
        begin(folder, SEARCH, spec)
    parent = search_parent(spec, folder)
    recorded = recording_parent(tracker, folder, words, experiment, base.control, parent)
    with resumable(words, place), mirrored(place), recorded as log:
        with _ray(where, words):
            num_gpus, shared = gpus_of_a_run(base, where.address), _shared(base)
            with Progress(f"{base.task}: baselines and probe", folder / BASELINES, goal=base.goal):
                prepared = prepare(spec, place, num_gpus=num_gpus, shared=shared)
            title = f"{base.task}: {counted(spec.num_trials, 'trial')}"
            with Progress(title, folder / TRIALS, goal=base.goal, num_trials=spec.num_trials):
                tune_trials(
                    spec, prepared, place, num_gpus=num_gpus, resume=context.resume, shared=shared, claim=log.claim
                )
            if todo := to_be_repeated(read_search(folder)):
                title, again = f"{base.task}: the best trial and the baselines again", place / REPEATS
                with Progress(title, again.folder, goal=base.goal):
                    failed = run_all(todo, again, num_gpus=num_gpus, shared=shared, reuse_actors=True)
                for error in failed.values():
                    if not isinstance(error, RunFailedError):  # its failure is in its log
                        raise error
        record = read_search(folder)
        if (found := found_in(record)) is not None:
            write_value(folder / FOUND, found)
        view = view_search(record)
        context.show(view)
        mistakes = {run.name: run for run in record.trials if run.end is not None and run.end.cause in MISTAKES}
        best = best_trial(record)
        end = None if best is None else contenders(record)[best.name].end
        log.append(_ending(mistakes, len(record.trials), {} if end is None else end.results))
    failures = []
    for run in mistakes.values():
        trace = f"; the traceback is in {run.folder / ERROR}" if (run.folder / ERROR).exists() else ""
        failures.append(f"{run.name} {run.status}: {run.end.message if run.end is not None else ''}{trace}")
    if failures:
        err.print("\n".join(failures), style="red", soft_wrap=True)
        err.print(f"`{words}` tries these again", soft_wrap=True)
    return Outcome(
        context=context,
        view=view,
        is_complete=best is not None and not failures,
        failures=failures,
        num_finished=len(record.trials) - len(failures),
    )


def _compare(spec: ComparisonSpec, context: Context) -> Outcome:
    base, place, where, folder = spec.base, context.place, context.where, context.place.folder
    tracker, experiment, words = _prepare(base, context, Compare.experiment)
    if not context.resume:
        begin(folder, COMPARISON, spec)
    info = {"task": base.task, "kind": "comparison", "methods": ", ".join(spec.all_methods)}
    recorded = recording_parent(tracker, folder, words, experiment, base.control, Parent(name=folder.name, tags=info))
    with resumable(words, place), mirrored(place), recorded as log:
        with _ray(where, words):
            num_gpus = gpus_of_a_run(base, where.address)
            if read_comparison(folder).choices is None:
                title = f"{base.task}: trials on validation samples"
                with Progress(title, folder / comparison.TRIALS, goal=base.goal):
                    choose(spec, place, num_gpus=num_gpus, shared=_shared(trial_of(base)))
            todo = read_comparison(folder).unfinished()
            with Progress(f"{base.task}: comparison", folder, todo, goal=base.goal):
                failures = run_all(todo, place, num_gpus=num_gpus)
        record = read_comparison(folder)
        if not record.runs and failures:
            raise next(iter(failures.values()))  # none began, most likely because of input that only actors can check
        failed = {name: f"{name} failed: {run.end.message if run.end else ''}" for name, run in record.failed.items()}
        for name, error in failures.items():
            failed[name] = str(error) if isinstance(error, RunFailedError) else f"{name} failed: {error}"
        view = view_comparison(record)
        context.show(view)
        log.append(_ending(failed, len(record.runs), summary_metrics(record)))
    for name, text in failed.items():
        err.print(text, style="red", soft_wrap=True)
        if name in record.runs and record.runs[name].has_outcome:
            again = resume_words(place / name, where, experiment, experiment)
            err.print(f"that is its outcome; `{again}` tries it again", soft_wrap=True)
        if name in failures and os.environ.get("TRIACCEL_TRACEBACK"):
            err.print("".join(traceback.format_exception(failures[name])), soft_wrap=True)
    return Outcome(
        context=context,
        view=view,
        is_complete=not failed,
        failures=list(failed.values()),
        num_finished=sum(run.status == "finished" for run in record.runs.values()),
    )


def _ray(where: Where, words: str) -> AbstractContextManager[None]:
    """Prints a message and connects to Ray, which may take seconds; `words` is the command that resumes."""
    doing = "using the" if ray.is_initialized() else "joining"
    text = "starting Ray ..." if where.address is None else f"{doing} Ray at {display_address(where.address)} ..."
    err.print(text, soft_wrap=True)
    return cluster(where.address, last_words=f"{ONCE_IT_IS_BACK}\n{words}")


def _ending(failed: Collection[str], num_runs: int, results: Mapping[str, float]) -> End:
    """Returns the end record of a search or comparison, of which the runs `failed` can be retried."""
    if not failed:
        return End(status="finished", results=results)
    message = f"{len(failed)} of {num_runs} runs failed: {', '.join(failed)}"
    return End(status="failed", cause="runs", message=message, results=results)


def _shared(spec: RunSpec) -> SharedSplits | None:
    """Returns the samples in the object store; if that fails, prints why and returns None, and each run reads them."""
    try:
        return share_splits(spec)
    except NotSharedError as error:
        err.print(f"every trial reads the samples itself: {error}", style="yellow", soft_wrap=True)
        return None
