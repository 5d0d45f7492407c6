"""Shipping to MLflow stores in the tests, and what has to be there afterwards."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stores import Recorded as Recorded
from benchmarks.stores import Server as Server
from benchmarks.stores import assert_equals_log as assert_equals_log
from benchmarks.stores import free_port as free_port
from benchmarks.stores import history as history
from benchmarks.stores import only_run as only_run
from benchmarks.stores import runs as runs
from triaccel_ray.service.tracking.shipper import Parent, Shipper
from triaccel_ray.service.tracking.tracking import Tracker


def ship(tracker: Tracker, root: Path, experiment: str, parent: Parent | None = None) -> int:
    """Ships as a new process would, that has read nothing yet."""
    shipper = Shipper(tracker, root, experiment=experiment, parent=parent)
    num_events = shipper.ship_once()
    assert shipper.last_error is None
    return num_events


def assert_arrived_once(tracker: Tracker, run: Recorded, num_epochs: int) -> None:
    """Every tick and epoch is on record, with one value."""
    assert tracker.client.get_run(run.id)
    for key, distance in (("train/loss", 50), ("memory/used_gb", 50), ("val/accuracy", 200), ("epoch", 200)):
        steps = [step for step, _, _ in history(tracker, run.id, key)]
        assert steps == list(range(distance, 200 * num_epochs + 1, distance)), key
