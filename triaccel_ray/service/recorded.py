"""Finds the tracking store and experiment that a resumed run is recorded in: MLflow shows no tree across two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from triaccel_ray.config import require
from triaccel_ray.service.cli.options import Where
from triaccel_ray.service.console import err
from triaccel_ray.service.search.search import JOURNAL, best_trial, read_search
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.search.suggestions import ended_trials
from triaccel_ray.service.session import tracking_uri_of
from triaccel_ray.service.tracking.shipped import Shipped, read_shipped
from triaccel_ray.service.tracking.shipper import Parent
from triaccel_ray.service.tracking.sqlite_file import holds_run
from triaccel_ray.service.tracking.tracking import HIDDEN, Tracker, TrackingUnavailableError
from triaccel_ray.service.units import format_bytes


def in_its_store(folder: Path, where: Where) -> Where:
    """Returns `where` with the tracking store in which the run of `folder` is, unless `where` names one.

    Raises:
        TrackingUnavailableError: the store wants a password, or no store is named or known.
    """
    shipped = read_shipped(folder)
    if where.tracking_uri is None and shipped is not None and not _is_in_usual_store(shipped, where):
        if HIDDEN in shipped.store:
            raise TrackingUnavailableError(
                f"tracking uri = None: {folder.name} is recorded in {shipped.store}, whose user and password are not "
                "kept; give --tracking-uri as before, or without them where MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD hold them"
            )
        err.print(f"recorded in {shipped.store}, as before; --tracking-uri names another store", soft_wrap=True)
        where = replace(where, tracking_uri=shipped.store)
    tracking_uri_of(where.storage_path, where.tracking_uri)
    return where


def experiment_of(tracker: Tracker, folder: Path, *, given: str | None, usual: str) -> str:
    """Returns the experiment in which the run of `folder` is; of a new run the one given, or else the usual one.

    Raises:
        ValueError: it is in another experiment than the one given.
    """
    shipped = read_shipped(folder)
    if shipped is None:
        return given or usual
    there = None
    if shipped.run_id is not None and shipped.store == tracker.display_uri:
        there = tracker.experiment_of(shipped.run_id)
    if there is None:  # recorded anew, in another store
        return given or shipped.experiment or usual
    rule = (
        f"{folder.name} is recorded in {there!r}, and MLflow moves no run from one experiment to another; leave it out"
    )
    require(given in (None, there), "experiment", given, rule)
    return there


def _is_in_usual_store(shipped: Shipped, where: Where) -> bool:
    """Returns whether the store that need not be named will do.

    A SQLite file may have been moved or copied together with the runs, or left behind: it counts if the run is in it.
    """
    if not shipped.store.startswith("sqlite:///"):
        return False
    if shipped.run_id is None or not holds_run(shipped.store, shipped.run_id):
        return True
    storage = where.storage_path
    return storage.uri is None and holds_run(tracking_uri_of(storage, None), shipped.run_id)


def search_parent(spec: SearchSpec, folder: Path) -> Parent:
    """Returns the MLflow run that stands for the search in `folder`."""
    tags = {
        "task": spec.base.task,
        "kind": "search",
        "seed": str(spec.seed),
        "space": spec.space,
        "objective": spec.objective,
        "margin": f"{spec.margin:g}",
    }

    def closing_tags() -> dict[str, str]:
        record = read_search(folder)
        best, prepared = best_trial(record), record.prepared
        found = {} if best is None else {"best_trial": best.name}
        if prepared is not None and prepared.headroom_bytes is not None:
            found["memory_headroom"] = format_bytes(prepared.headroom_bytes)
        return found

    pruned = folder / JOURNAL
    return Parent(name=folder.name, tags=tags, pruned=lambda: ended_trials(pruned), closing_tags=closing_tags)
