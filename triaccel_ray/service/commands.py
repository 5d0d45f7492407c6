"""What each command does, in the order in which a person would tell it."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any

from trainables.registry import TASKS, load_task
from trainables.task import Purpose
from triaccel_ray.config import ControlConfig, require
from triaccel_ray.events import End, EventLog, LogError, Start, TakenOverError
from triaccel_ray.service import cli
from triaccel_ray.service.clusters.cluster import (
    cluster,
    display_address,
    gpu_fraction,
    gpus_available,
    require_gpu_to_share,
    require_reachable,
)
from triaccel_ray.service.comparisons.choosing import choose, trial_of
from triaccel_ray.service.comparisons.comparison import (
    COMPARISON,
    ComparisonSpec,
    begin_comparison,
    read_comparison,
    summary_metrics,
)
from triaccel_ray.service.console import err, out, rich_table
from triaccel_ray.service.doctor import show_findings
from triaccel_ray.service.failures import RunFailedError, StoreError, cause_of, needing_room
from triaccel_ray.service.hand_over import hand_over
from triaccel_ray.service.jobs import job_commands
from triaccel_ray.service.locating import find, storage_of
from triaccel_ray.service.mlflow_ui import require_store, show
from triaccel_ray.service.next_steps import ONCE_IT_IS_BACK, point_to, resumable, resume_words, say_how_it_ended
from triaccel_ray.service.options import Where
from triaccel_ray.service.progress import RunProgress, TrialProgress
from triaccel_ray.service.recorded import experiment_of, in_its_store, search_parent
from triaccel_ray.service.replay import reasons_grid, verdict
from triaccel_ray.service.reports.comparison_view import view_comparison
from triaccel_ray.service.reports.views import view_run, view_search
from triaccel_ray.service.runs.methods import METHODS
from triaccel_ray.service.runs.record import has_begun, read_if_begun, read_run, read_spec
from triaccel_ray.service.runs.runs import run_all
from triaccel_ray.service.runs.shared_data import NotSharedError, SharedSplits, share_splits
from triaccel_ray.service.runs.spec import RunSpec, require_budget
from triaccel_ray.service.searches.search import (
    SEARCH,
    TRIALS,
    SearchSpec,
    begin_search,
    best_trial,
    prepare,
    read_search,
    tune_trials,
)
from triaccel_ray.service.session import (
    new_name,
    open_tracker,
    recording,
    require_experiment,
    tracking_uri_of,
)
from triaccel_ray.service.storage.layout import ERROR, EVENTS
from triaccel_ray.service.storage.mirror import push_commands, require_unused
from triaccel_ray.service.storage.mirroring import mirrored
from triaccel_ray.service.storage.place import Place
from triaccel_ray.service.tracking.shipper import Parent
from triaccel_ray.service.tracking.tracking import Tracker
from triaccel_ray.service.translation import comparison_spec, search_spec, spec_from

MISTAKES = ("bug", "preempted", "store")
"""Causes of failures that have nothing to do with what was tried."""


@singledispatch
def execute(command: Any) -> int:
    """Carries out one command and returns its exit status."""
    raise TypeError(f"{type(command).__name__} is not a command")


@execute.register
def _(command: cli.Run) -> int:
    purpose = Purpose.FINAL if command.final else Purpose.SEARCH
    spec = spec_from(
        command.task,
        command.training,
        command.thresholds,
        method=command.method,
        seed=command.seed,
        purpose=purpose,
    )
    spec = replace(spec, keep=command.keep, register=command.register)
    place = storage_of(command.where) / new_name(command.name, command.task, command.method)
    return _train(spec, place, command.where, command.experiment, resume=False)


@execute.register
def _(command: cli.Search) -> int:
    spec = search_spec(command)
    place = storage_of(command.where) / new_name(command.name, command.task, command.space)
    return _search(spec, place, command.where, command.experiment, resume=False)


@execute.register
def _(command: cli.Compare) -> int:
    spec = comparison_spec(command)
    place = storage_of(command.where) / new_name(command.name, command.task, "comparison")
    return _compare(spec, place, command.where, command.experiment, resume=False)


@execute.register
def _(command: cli.Resume) -> int:
    place = find(command.name, command.where, writable=True)
    folder, experiment = place.folder, command.experiment
    where = in_its_store(folder, command.where)
    if (folder / SEARCH).exists():
        return _search(read_search(folder).spec, place, where, experiment, resume=True)
    if (folder / COMPARISON).exists():
        return _compare(read_comparison(folder).spec, place, where, experiment, resume=True)
    return _train(read_spec(folder), place, where, experiment, resume=True)


@execute.register
def _(command: cli.Report) -> int:
    place = find(command.name, command.where)
    folder = place.folder
    if (folder / SEARCH).exists():
        view_search(read_search(folder))
    elif (folder / COMPARISON).exists():
        view_comparison(read_comparison(folder))
    else:
        view_run(read_run(folder))
    try:
        push_commands(place)
    except StoreError as error:  # reading was allowed, and all that was asked for
        err.print(f"the page stays on this machine: {error}", style="yellow", soft_wrap=True)
    return 0


@execute.register
def _(command: cli.Replay) -> int:
    folder = find(command.name, command.where).folder
    if (folder / SEARCH).exists() or (folder / COMPARISON).exists():
        logs = sorted(folder.glob(f"*/**/{EVENTS}"))
        names = ", ".join(str(path.parent.relative_to(folder.parent)) for path in logs[:3])
        raise LogError(f"name = {command.name!r}: holds many runs; name one of them, such as {names or 'none yet'}")
    run = read_run(folder)
    control = command.thresholds.onto(run.start.control)
    lines = list(verdict(run, control))
    out.print(rich_table(reasons_grid(run, most=command.reasons), title=f"{run.name}: decisions and their reasons"))
    for line in lines:
        out.print(line, soft_wrap=True)
    return 0


@execute.register
def _(command: cli.Ui) -> int:
    require(1 <= command.port <= 65535, "port", command.port, "must lie in 1 to 65535")
    storage, given = command.where.storage_path, command.where.tracking_uri
    require_store(Tracker(tracking_uri_of(storage, given), storage.folder))
    return show(open_tracker(storage, given), command.host, command.port)


@execute.register
def _(command: cli.Doctor) -> int:
    if command.tasks:
        for name in TASKS:
            task = load_task(name, None)
            out.print(f"{name:40} {task.recipe.epochs} epochs, batch {task.control.batch.start}, {task.goal.words}")
        return 0
    return show_findings(command.where.storage_path, command.where.tracking_uri, command.where.address)


@execute.register
def _(command: cli.Submit) -> int:
    return job_commands.submit(command.words, name=command.name, address=command.address)


@execute.register
def _(command: cli.Jobs) -> int:
    return job_commands.list_jobs(address=command.address)


@execute.register
def _(command: cli.Logs) -> int:
    return job_commands.show_logs(command.job, follow=command.follow, address=command.address)


@execute.register
def _(command: cli.Stop) -> int:
    return job_commands.stop(command.job, address=command.address)


def _prepare(
    spec: RunSpec, place: Place, where: Where, given: str | None, usual: str, *, resume: bool
) -> tuple[Tracker, str, str]:
    """Returns the tracker, the experiment and the command that resumes, once all is checked that needs no Ray.

    A mistake must not use up the name: nothing is written at `place`.
    """
    require_experiment(given)
    if not resume:
        require_unused(place)
    require_reachable(where.address)
    require_gpu_to_share(where.address, spec)
    if where.address is None:
        require_budget(spec)
    tracker = open_tracker(where.storage_path, where.tracking_uri)
    experiment = experiment_of(tracker, place.folder, given=given, usual=usual)
    return tracker, experiment, resume_words(place, where, experiment, usual)


def _train(spec: RunSpec, place: Place, where: Where, given: str | None, *, resume: bool) -> int:
    folder = place.folder
    tracker, experiment, words = _prepare(spec, place, where, given, cli.Run.experiment, resume=resume)
    before = read_if_begun(folder) if resume else None
    if before is not None and before.has_outcome:
        say_how_it_ended(before)
        if before.status != "failed (out_of_memory)":
            with mirrored(place, has_own_log=False), recording(tracker, folder, words, experiment=experiment):
                out.print(f"{folder.name} is {before.status}; what was not yet recorded is being recorded")
            hand_over(before, place, tracker, words)
            return int(before.status != "finished")
    with (
        resumable(words, place),
        mirrored(place, has_own_log=False),
        _ray(where, words),
        recording(tracker, folder, words, experiment=experiment),
    ):
        specs, num_gpus = {folder.name: spec}, _num_gpus(spec, where.address)
        with RunProgress(f"{spec.task}: {METHODS[spec.method]}", specs, goal=spec.goal, each_epoch=True) as progress:
            outcomes = run_all(specs, place.parent, num_gpus=num_gpus, on_glance=progress.update, resume=resume)
    outcome = outcomes[folder.name]
    if isinstance(outcome, Exception):  # or input that only the actor could judge
        raise outcome
    run = read_run(folder)
    view_run(run)
    push_commands(place)
    hand_over(run, place, tracker, words)
    point_to(place, where)
    return 0


def _search(spec: SearchSpec, place: Place, where: Where, given: str | None, *, resume: bool) -> int:
    folder = place.folder
    tracker, experiment, words = _prepare(spec.base, place, where, given, cli.Search.experiment, resume=resume)
    if not resume:
        begin_search(spec, folder)
    parent = search_parent(spec, folder)
    mirror = mirrored(place, has_own_log=True)
    with resumable(words, place), mirror, _parent(tracker, folder, words, experiment, spec.base.control, parent) as log:
        with _ray(where, words):
            num_gpus, shared = _num_gpus(spec.base, where.address), _shared(spec.base)
            with RunProgress(f"{spec.base.task}: baselines and probe", goal=spec.base.goal) as progress:
                prepared = prepare(spec, place, num_gpus=num_gpus, on_glance=progress.update, shared=shared)
            title = f"{spec.base.task}: {spec.num_trials} trials"
            with TrialProgress(title, spec.num_trials, folder / TRIALS, prepared.objective):
                tune_trials(spec, prepared, place, num_gpus=num_gpus, resume=resume, shared=shared, claim=log.claim)
        record = read_search(folder)
        view_search(record)
        mistakes = [run for run in record.trials if run.end is not None and run.end.cause in MISTAKES]
        best = best_trial(record)
        results = {} if best is None or best.end is None else best.end.results
        log.append(_ending([run.name for run in mistakes], len(record.trials), results))
    for run in mistakes:
        message = run.end.message if run.end is not None else ""
        trace = f"; the traceback is in {run.folder / ERROR}" if (run.folder / ERROR).exists() else ""
        err.print(f"{run.name} {run.status}: {message}{trace}", style="red", markup=False, soft_wrap=True)
    if mistakes:
        err.print(f"`{words}` tries these again", markup=False, soft_wrap=True)
    point_to(place, where)
    return 0 if best is not None and not mistakes else 1


def _compare(spec: ComparisonSpec, place: Place, where: Where, given: str | None, *, resume: bool) -> int:
    folder = place.folder
    tracker, experiment, words = _prepare(spec.base, place, where, given, cli.Compare.experiment, resume=resume)
    if not resume:
        begin_comparison(spec, folder)
    info = {"task": spec.base.task, "kind": "comparison", "methods": ", ".join(spec.all_methods)}
    parent = Parent(name=folder.name, tags=info)
    mirror = mirrored(place, has_own_log=True)
    with resumable(words, place), mirror, _parent(tracker, folder, words, experiment, spec.base.control, parent) as log:
        with _ray(where, words):
            num_gpus = _num_gpus(spec.base, where.address)
            if read_comparison(folder).choices is None:
                _choose(spec, place, num_gpus)
            todo = read_comparison(folder).unfinished()
            with RunProgress(f"{spec.base.task}: comparison", todo, goal=spec.base.goal) as progress:
                outcomes = run_all(todo, place, num_gpus=num_gpus, on_glance=progress.update, resume=True)
        record = read_comparison(folder)
        refused = next(iter(outcomes.values()), None)
        if not record.runs and isinstance(refused, Exception):
            raise refused  # none could begin: most likely input that only the actors could judge
        failed = {
            name: f"{name} failed: {run.end.message}" for name, run in record.failed.items() if run.end is not None
        }
        for name, outcome in outcomes.items():
            if isinstance(outcome, Exception):
                failed[name] = str(outcome) if isinstance(outcome, RunFailedError) else f"{name} failed: {outcome}"
        view_comparison(record)
        log.append(_ending(list(failed), len(record.runs), summary_metrics(record)))
    for name, text in failed.items():
        err.print(text, style="red", markup=False, soft_wrap=True)
        if name in record.runs and record.runs[name].has_outcome:
            again = resume_words(place / name, where, experiment, experiment)
            err.print(f"that is its outcome; `{again}` tries it again", soft_wrap=True)
        error = outcomes.get(name)
        if isinstance(error, Exception) and os.environ.get("TRIACCEL_TRACEBACK"):
            err.print("".join(traceback.format_exception(error)), markup=False, soft_wrap=True)
    point_to(place, where)
    return 1 if failed else 0


def _ray(where: Where, words: str) -> AbstractContextManager[None]:
    """Connects to Ray, which takes seconds, and says so at once; `words` resume what is broken off."""
    text = "starting Ray ..." if where.address is None else f"joining Ray at {display_address(where.address)} ..."
    err.print(text, soft_wrap=True)
    return cluster(where.address, last_words=f"{ONCE_IT_IS_BACK}\n{words}")


def _choose(spec: ComparisonSpec, place: Place, num_gpus: float) -> None:
    """Has the trials on validation samples run; the object store has these samples meanwhile, and no longer."""
    shared = _shared(trial_of(spec.base))
    with RunProgress(f"{spec.base.task}: trials on validation samples", goal=spec.base.goal) as progress:
        choose(spec, place, num_gpus=num_gpus, on_glance=progress.update, shared=shared)


def _ending(failed: Sequence[str], num_runs: int, results: Mapping[str, float]) -> End:
    """Returns the last record of a search or comparison of which the runs `failed` are to be tried again."""
    if not failed:
        return End(status="finished", results=results)
    message = f"{len(failed)} of {num_runs} runs failed: {', '.join(failed)}"
    return End(status="failed", cause="runs", message=message, results=results)


def _num_gpus(spec: RunSpec, address: str | None) -> float:
    """Returns what each run asks Ray for: a GPU or its part of one, or none.

    `--device cuda` asks for one also where no machine of the cluster has any: Ray lets the runs wait for a machine that
    joins, and tells an autoscaler of them. `auto` uses what is there now, to the end.
    """
    if spec.device == "cpu":
        return 0.0
    if not gpus_available():
        if address is None or spec.device == "auto":
            if address is not None:
                text = "the cluster has no GPU now: everything trains on CPUs; with --device cuda it waits for a GPU"
                err.print(text, style="yellow", markup=False, soft_wrap=True)
            return 0.0
        text = "the cluster has no GPU yet: what is to be trained waits for a machine with one to join"
        err.print(text, style="yellow", markup=False, soft_wrap=True)
    return gpu_fraction(spec.trials_per_gpu)


def _shared(spec: RunSpec) -> SharedSplits | None:
    """Returns the samples in the object store; None, and says why, where every run has to read them itself."""
    try:
        return share_splits(spec)
    except NotSharedError as error:
        err.print(f"every trial reads the samples itself: {error}", style="yellow", markup=False, soft_wrap=True)
        return None


@contextlib.contextmanager
def _parent(
    tracker: Tracker, folder: Path, words: str, experiment: str, control: ControlConfig, parent: Parent
) -> Iterator[EventLog]:
    """Yields the log that stands for the whole of a search or comparison, everything below it being recorded.

    Work that is broken off ends the log too, so that nothing stays "running" for ever; `resume`, of which `words` are
    the command, cuts the end away.
    """
    with needing_room(folder):
        log = EventLog(folder / EVENTS, keep=1 if has_begun(folder) else 0)
        if log.num_records == 0:
            log.append(Start(control=control, info=parent.tags))
    with recording(tracker, folder, words, experiment=experiment, parent=parent):
        try:
            yield log
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            end = End(status="stopped") if stopped else End(status="failed", cause=cause_of(error), message=str(error))
            # A full disk, perhaps, or another process that goes on: what is raised says it all.
            with contextlib.suppress(OSError, TakenOverError):
                log.append(end)
            raise
        finally:
            with needing_room(folder):
                log.close()
