"""What the MLflow UI shows of a search, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.service.browser import needs_chromium, num_colors, screenshot, shown
from tests.service.mlflow_server import Recorded, Server, runs, ship
from tests.service.search_folder import simulated_search
from triaccel_ray.service.commands.ui import runs_pages
from triaccel_ray.service.tracking.shipment import ParentRun
from triaccel_ray.service.tracking.tracker import Tracker

SCRIPTS_S = 30
"""Of the page's own time, which runs as fast as its scripts and the server do."""


@pytest.fixture
def recorded(server: Server, tmp_path: Path, experiment: str) -> dict[str, Recorded]:
    """The runs of a search as the server has them, by name."""
    tracker = Tracker(server.uri, tmp_path / "artifacts")
    folder = simulated_search(tmp_path / "hunt", 4)
    ship(tracker, folder, experiment, ParentRun(tags={"kind": "search"}))
    return {run.name: run for run in runs(tracker, experiment)}


@needs_chromium
def test_a_search_is_a_tree_with_children_to_compare(
    server: Server, tmp_path: Path, experiment: str, recorded: dict[str, Recorded]
) -> None:
    parent, trials = recorded["hunt"], [run for name, run in recorded.items() if name.startswith("trial")]
    assert len(trials) == 4
    assert {run.tags["mlflow.parentRunId"] for run in trials} == {parent.id}
    assert max(len(run.keys) for run in recorded.values()) < 60
    number = Tracker(server.uri, tmp_path).experiment_id(experiment)

    pages = runs_pages(Tracker(server.uri, tmp_path), server.uri)
    listed = shown(pages[experiment], tmp_path, wait_s=SCRIPTS_S)
    assert ">hunt<" in listed
    assert ">trial00<" not in listed  # folded away under their parent
    assert ">fp32 of hunt<" in listed
    assert ">amp of hunt<" in listed

    chosen = f"runs={quote(json.dumps([run.id for run in trials]))}&experiments={quote(json.dumps([number]))}"
    compare = f"{server.uri}/#/compare-runs?{chosen}"
    text = shown(compare, tmp_path, wait_s=SCRIPTS_S)
    assert "Comparing 4 Runs from 1 Experiment" in text
    thresholds = ("precision.tau_low", "precision.tau_high", "batch.rho_low", "batch.rho_high")
    for name in (*thresholds, "control/batch_size", *(run.name for run in trials)):
        assert name in text
    seen = screenshot(compare, tmp_path / "compare.png", width=1600, height=2000, wait_s=SCRIPTS_S)
    assert num_colors(seen) > 500
