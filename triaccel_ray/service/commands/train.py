"""Runs a training, search or comparison for the command line and Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import ray

from triaccel_ray.records.events import Claim, End
from triaccel_ray.service.cli.arguments import Resume, TrainingCommand
from triaccel_ray.service.cli.options import Locations, settings_text
from triaccel_ray.service.cli.spec_builder import spec_of
from triaccel_ray.service.cluster.cluster import cluster, gpus_of_a_run, joined_address, require_gpus, require_reachable
from triaccel_ray.service.commands.next_steps import command_to_resume, print_model, print_outcome, resumable
from triaccel_ray.service.commands.progress import ProgressPrinter
from triaccel_ray.service.commands.recording import (
    CommandContext,
    recording,
    search_parent,
    set_of_runs,
    with_recorded_store,
)
from triaccel_ray.service.compare.comparison import read_comparison, summary_metrics
from triaccel_ray.service.compare.fixed_setting import choose_fixed_setting
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.console import err, out
from triaccel_ray.service.credentials import display_address
from triaccel_ray.service.failures import RunFailedError
from triaccel_ray.service.locations import find, new_name, require_experiment, require_storage, storage_of, tracker_of
from triaccel_ray.service.report.comparison import view_comparison
from triaccel_ray.service.report.provenance import troubles
from triaccel_ray.service.report.report import View
from triaccel_ray.service.report.run import view_run
from triaccel_ray.service.report.search import view_search
from triaccel_ray.service.runs.environment import require_budget
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.record import read_if_begun, read_run, read_spec
from triaccel_ray.service.runs.shared_data import NotSharedError, SharedSplits, share_splits
from triaccel_ray.service.runs.spec import METHODS, TUNE_BATCH, RunSpec
from triaccel_ray.service.search.search import best_trial, candidates, prepare, read_search, to_be_repeated, tune_trials
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import (
    BASELINES,
    COMPARISON,
    PAGE_FILES,
    REPEATS,
    SEARCH,
    SETTINGS,
    TRIALS,
    TUNED_THRESHOLDS,
    claiming_name,
    write_atomically,
    write_value,
)
from triaccel_ray.service.storage.mirror import mirrored, require_unused, upload
from triaccel_ray.service.tracking.shipment import ParentRun
from triaccel_ray.service.tracking.shipment_state import read_shipment_state
from triaccel_ray.service.units import counted
from triaccel_ray.trainables.task import Purpose

RETRIED_CAUSES = ("bug", "preempted", "store")
"""Causes of failures that are unrelated to the settings tried."""

Show: TypeAlias = Callable[[View], object]
"""Called with the result as soon as there is one, before the rest of it is recorded."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a command that trains."""

    context: CommandContext
    view: View | None
    """None if nothing was left to train."""
    is_complete: bool
    """Whether all requested work was done; for a search, also whether a trial can be recommended."""
    failures: Sequence[str] = ()
    """Messages of the failed runs of a search or comparison, already printed, if none has finished."""


def carry_out(command: TrainingCommand | Resume, show: Show = lambda view: None) -> Outcome:
    """Carries out a command that trains and returns its outcome; `show` gets the result as soon as there is one.

    Raises:
        ValueError, TypeError, OSError: the request is invalid.
        RunFailedError: a run failed, and with it the whole command.
        KeyboardInterrupt: the user interrupted the command; likewise.
    """
    where = replace(command.where, address=joined_address(command.where.address))
    if isinstance(command, TrainingCommand):
        spec, experiment = spec_of(command), command.experiment
    else:
        place = find(command.name, command.where, writable=True)
        where = with_recorded_store(place.folder, where)
        spec, shipped = _stored_spec(place.folder), read_shipment_state(place.folder)
        experiment = None if shipped is None else shipped.experiment
    kind: str
    train: Callable[[CommandContext, Show], Outcome]
    match spec:
        case SearchSpec(base=base):
            kind, usual_experiment, train = spec.space, "triaccel-searches", partial(_search, spec)
        case ComparisonSpec(base=base):
            kind, usual_experiment, train = "comparison", "triaccel-comparisons", partial(_compare, spec)
        case base:
            kind, usual_experiment, train = base.method, "triaccel-runs", partial(_train, base)
    tracker = tracker_of(where)
    if isinstance(command, TrainingCommand):
        place = storage_of(where, writable=True) / new_name(command.name, base.task, kind)
    context = CommandContext(
        place=place,
        where=where,
        tracker=tracker,
        experiment=usual_experiment if experiment is None else experiment,
        resume=isinstance(command, Resume),
    )
    _check(base, context)
    if place.uri is None and (where.tracking_uri is None or isinstance(command, TrainingCommand)):
        require_storage(where.storage_path.folder, create=True)  # also the place of the SQLite file
    tracker.prepare()
    return train(context, show)


def _stored_spec(folder: Path) -> RunSpec | SearchSpec | ComparisonSpec:
    if (folder / SEARCH).exists():
        return read_search(folder).spec
    if (folder / COMPARISON).exists():
        return read_comparison(folder).spec
    return read_spec(folder)


def _check(spec: RunSpec, context: CommandContext) -> None:
    """Checks everything that needs no Ray. Nothing is written, so that a mistake does not use up the name."""
    address = context.where.address
    require_experiment(context.experiment)
    if not context.resume:
        require_unused(context.place)
    require_reachable(address)
    require_gpus(address, spec)
    if address is None:
        require_budget(spec)


def _train(spec: RunSpec, context: CommandContext, show: Show) -> Outcome:
    place, folder = context.place, context.folder
    before = read_if_begun(folder) if context.resume else None
    if before is not None and before.has_outcome:
        print_outcome(before)
        if before.status != "failed (out_of_memory)":
            with mirrored(place), recording(context):
                out.print(f"{folder.name} is {before.status}; recording in MLflow what is missing")
            print_model(before, place)
            return Outcome(context=context, view=None, is_complete=before.status == "finished")
    with (
        contextlib.nullcontext() if context.resume else claiming_name(folder),
        resumable(context.resume_command, place),
        mirrored(place),
        _ray(context.where),
        recording(context),
    ):
        specs, num_gpus = {folder.name: spec}, gpus_of_a_run(spec, context.where.address)
        title = ", ".join(filter(None, (f"{spec.task}: {METHODS[spec.method]}", spec.ranks_text)))
        with ProgressPrinter(title, folder.parent, specs):
            failures = run_all(specs, place.parent, num_gpus=num_gpus)
    if failures:  # or invalid input that only the run's own process could detect
        raise failures[folder.name]
    run = read_run(folder)
    if spec.method != TUNE_BATCH:  # `triaccel run` cannot read this method
        write_atomically(folder / SETTINGS, settings_text(spec))
    view = view_run(run)
    show(view)
    upload(place, PAGE_FILES)
    print_model(run, place)
    return Outcome(context=context, view=view, is_complete=True)


def _search(spec: SearchSpec, context: CommandContext, show: Show) -> Outcome:
    folder = context.folder
    with set_of_runs(spec, SEARCH, context, search_parent(spec, folder)) as log:
        with _ray(context.where):
            _run_search(spec, context, log.claim)
        record = read_search(folder)
        view = view_search(record)
        if view.best is not None:
            write_value(folder / TUNED_THRESHOLDS, view.best)
        show(view)
        retried = [run for run in record.trials if run.end is not None and run.end.cause in RETRIED_CAUSES]
        failures = {run.name: troubles({run.name: run}) for run in retried}
        best = best_trial(record)
        end = None if best is None else candidates(record)[best.name].end
        log.append(_end_record(failures, len(record.trials), {} if end is None else end.results))
    if failures:
        err.print("\n".join(failures.values()), style="red", soft_wrap=True)
        err.print(f"`{context.resume_command}` tries these again", soft_wrap=True)
    return Outcome(
        context=context,
        view=view,
        is_complete=best is not None and not failures,
        failures=list(failures.values()) if len(failures) == len(record.trials) else (),
    )


def _run_search(spec: SearchSpec, context: CommandContext, claim: Claim) -> None:
    """Runs what is missing of a search: baselines and probe, then the trials, then repeats of short runs."""
    base, place, folder = spec.base, context.place, context.folder
    num_gpus, shared = gpus_of_a_run(base, context.where.address), _share_samples(base)
    with ProgressPrinter(f"{base.task}: baselines and probe", folder / BASELINES):
        prepared = prepare(spec, place, num_gpus=num_gpus, shared=shared)
    title = f"{base.task}: {counted(spec.num_trials, 'trial')}"
    with ProgressPrinter(title, folder / TRIALS, num_trials=spec.num_trials):
        tune_trials(spec, prepared, place, num_gpus=num_gpus, shared=shared, claim=claim)
    missing_repeats = to_be_repeated(read_search(folder))
    if missing_repeats:
        title = f"{base.task}: the best trial and the baselines again"
        with ProgressPrinter(title, folder / REPEATS):
            failed = run_all(missing_repeats, place / REPEATS, num_gpus=num_gpus, shared=shared, reuse_actors=True)
        for error in failed.values():
            if not isinstance(error, RunFailedError):  # its failure is in its log
                raise error


def _compare(spec: ComparisonSpec, context: CommandContext, show: Show) -> Outcome:
    base, place, folder = spec.base, context.place, context.folder
    parent = ParentRun(tags={"task": base.task, "kind": "comparison", "methods": ", ".join(spec.all_methods)})
    with set_of_runs(spec, COMPARISON, context, parent) as log:
        with _ray(context.where):
            num_gpus = gpus_of_a_run(base, context.where.address)
            if spec.num_fixed and read_comparison(folder).fixed is None:
                title, trial = f"{base.task}: trials on validation samples", replace(base, purpose=Purpose.SEARCH)
                with ProgressPrinter(title, folder / TRIALS):
                    choose_fixed_setting(spec, place, num_gpus=num_gpus, shared=_share_samples(trial))
            missing = read_comparison(folder).unfinished()
            with ProgressPrinter(f"{base.task}: comparison", folder, missing):
                failures = run_all(missing, place, num_gpus=num_gpus)
        record = read_comparison(folder)
        if not record.runs and failures:
            raise next(iter(failures.values()))  # none began, most likely because of input that only actors can check
        failed = {name: f"{name} failed: {run.end.message if run.end else ''}" for name, run in record.failed.items()}
        for name, error in failures.items():
            failed[name] = str(error) if isinstance(error, RunFailedError) else f"{name} failed: {error}"
        view = view_comparison(record)
        show(view)
        log.append(_end_record(failed, len(record.runs), summary_metrics(record)))
    for name, text in failed.items():
        err.print(text, style="red", soft_wrap=True)
        if name in record.failed and record.failed[name].has_outcome:
            retry_command = command_to_resume(place / name, context.where)
            err.print(f"that is its outcome; `{retry_command}` tries it again", soft_wrap=True)
    is_any_left = any(run.status == "finished" for run in record.runs.values())
    return Outcome(
        context=context, view=view, is_complete=not failed, failures=() if is_any_left else list(failed.values())
    )


def _ray(where: Locations) -> AbstractContextManager[None]:
    """Prints a message and connects to Ray, which may take seconds."""
    if where.address is None:
        text = "starting Ray ..."
    else:
        verb = "using the" if ray.is_initialized() else "joining"
        text = f"{verb} Ray at {display_address(where.address)} ..."
    err.print(text, soft_wrap=True)
    return cluster(where.address)


def _end_record(failed: Collection[str], num_runs: int, results: Mapping[str, float]) -> End:
    """Returns the end record of a search or comparison, of which the runs `failed` can be retried."""
    if not failed:
        return End(status="finished", results=results)
    message = f"{len(failed)} of {num_runs} runs failed: {', '.join(failed)}"
    return End(status="failed", cause="runs", message=message, results=results)


def _share_samples(spec: RunSpec) -> SharedSplits | None:
    """Returns the samples in the object store; if that fails, prints why and returns None, and each run reads them."""
    try:
        return share_splits(spec)
    except NotSharedError as error:
        err.print(f"every trial reads the samples itself: {error}", style="yellow", soft_wrap=True)
        return None
