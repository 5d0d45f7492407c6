"""Where something is recorded already: what goes on goes on there, for MLflow shows no tree across experiments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from triaccel_ray.config import require
from triaccel_ray.service.console import err
from triaccel_ray.service.options import Where
from triaccel_ray.service.session import tracking_uri_of
from triaccel_ray.service.tracking.shipment import Shipped, read_shipped
from triaccel_ray.service.tracking.tracking import HIDDEN, Tracker, TrackingUnavailableError, holds_run


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
