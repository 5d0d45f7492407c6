"""The page of a search: what is on it, and what a browser makes of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from tests.service.browser import Tags, needs_chromium, num_colours, screenshot
from tests.service.records import run_of, search_of
from tests.service.search_folder import controls, simulated_search
from triaccel_ray.config import ControlConfig
from triaccel_ray.records.events import End
from triaccel_ray.service.report.importance import MIN_TRIALS, Importance, importance
from triaccel_ray.service.report.recommendation import recommendation
from triaccel_ray.service.report.report import REPORT
from triaccel_ray.service.report.search_figures import coordinates, importance_bars, parallel_coordinates
from triaccel_ray.service.report.tables import search_grid
from triaccel_ray.service.report.view import show
from triaccel_ray.service.report.views import view_search
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.dimensions import dimensions
from triaccel_ray.service.search.search import SearchRecord, read_search

THRESHOLDS = ("tau_low", "tau_high", "rho_low", "rho_high")


def trial(index: int, control: ControlConfig, accuracy: float = 90.0, num_epochs: int = 4) -> RunRecord:
    status = "finished" if num_epochs == 4 else "stopped"
    run = run_of(f"trial{index}", accuracy=accuracy, num_epochs=num_epochs, status=status)
    return replace(run, spec=replace(run.spec, control=control))


def search_by_rho(num_trials: int, num_epochs: Sequence[int] = (4,)) -> SearchRecord:
    """Trials whose accuracy is rho_low's doing alone."""
    trials = [
        trial(index, control, 50.0 + 40.0 * control.batch.rho_low, num_epochs[index % len(num_epochs)])
        for index, control in enumerate(controls(num_trials))
    ]
    return search_of(*trials)


def test_what_decides_is_found_important() -> None:
    found = importance(search_by_rho(24))
    assert found is not None
    assert list(found.shares) == sorted(found.shares, key=lambda name: -found.shares[name])
    assert next(iter(found.shares)) == "rho_low"
    assert found.shares["rho_low"] > 0.6
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert (found.epoch, found.num_trials) == (4, 24)
    for name, (low, high) in found.intervals.items():
        assert 0.0 <= low <= high <= 1.0
        assert found.intervals["rho_low"][1] >= high, name
    assert found.intervals["rho_low"][0] < found.intervals["rho_low"][1]
    assert "between 24 trials" in found.sentence
    assert "12 bootstrap samples" in found.sentence
    assert found == importance(search_by_rho(24))


def test_trials_stopped_early_count_at_the_epoch_that_half_have_reached() -> None:
    found = importance(search_by_rho(40, num_epochs=(1, 2, 3, 4)))
    assert found is not None
    assert (found.epoch, found.num_trials) == (3, 20)
    assert "after epoch 3" in found.sentence


@pytest.mark.parametrize("num_trials", [0, 1, MIN_TRIALS - 1])
def test_too_few_trials_say_nothing_of_importance(num_trials: int) -> None:
    assert importance(search_by_rho(num_trials)) is None


def test_trials_without_a_difference_are_said_to_be() -> None:
    found = importance(search_of(*(trial(index, control) for index, control in enumerate(controls(MIN_TRIALS)))))
    assert found is not None
    assert not found.shares
    assert "do not differ" in found.sentence


def test_dimensions_asked_for_are_in_table_and_picture() -> None:
    names = ("alpha", "tau_curv", "t_ctrl", "batch_steps")
    record = search_by_rho(3)
    record = replace(record, spec=replace(record.spec, optional=names))
    searched = [*THRESHOLDS, "alpha", "tau_curv", "t_ctrl", "step_up", "step_down"]
    assert [scale.name for scale in dimensions(names)] == searched
    grid = search_grid(record)
    assert list(grid.header[2 : 2 + len(searched)]) == searched
    assert {len(row) for row in grid.rows} == {len(grid.header)}
    scales, lines = coordinates(record, None)
    assert [scale.name for scale in scales] == [*searched, "accuracy, %", "s/epoch", "peak GB", "score"]
    assert len(lines) == 3


def test_a_line_goes_through_each_trials_values() -> None:
    record = search_by_rho(5)
    best = record.trials[2]
    scales, lines = coordinates(record, best)
    assert sorted(line.rank for line in lines) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert sum(line.best for line in lines) == 1
    figure = parallel_coordinates(scales, lines, about="a search")
    drawn = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_xdata()) == len(scales)]
    assert len(drawn) == 5
    heights = np.array(drawn, dtype=float)
    assert heights.min() == 0.0
    assert heights.max() == 1.0
    said = {found.get_text() for found in figure.findobj(Text)}
    assert {*THRESHOLDS, "score", "best trial", "beyond the margin", "a search"} <= said
    assert f"{max(run.spec.control.precision.tau_high for run in record.trials):.2e}" in said


def test_thresholds_without_a_place_on_a_scale_are_left_out() -> None:
    zero, inf = (
        replace(control, precision=replace(control.precision, **{name: value}))
        for control, name, value in zip(controls(2), ("tau_low", "tau_high"), (0.0, float("inf")), strict=True)
    )
    assert coordinates(search_of(trial(0, zero), trial(1, inf)), None)[1] == []


def test_bars_name_thresholds_and_shares() -> None:
    shares, intervals = {"rho_low": 0.75, "tau_low": 0.25}, {"rho_low": (0.5, 0.9), "tau_low": (0.1, 0.3)}
    figure = importance_bars(Importance(shares=shares, intervals=intervals, epoch=4, num_trials=20))
    assert {"rho_low", "75%", "25%"} <= {found.get_text() for found in figure.findobj(Text)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with its page; one trial's pictures are real ones."""
    folder = simulated_search(tmp_path_factory.mktemp("a") / "hunt", 30, has_pictures=True)
    (folder / "trials" / "trial00" / "figures" / "overview.png").unlink()
    view_search(read_search(folder))
    return folder


def test_a_page_has_table_pictures_and_every_trials_timeline(folder: Path) -> None:
    text = (folder / REPORT).read_text()
    tags = Tags(text)
    headings = (
        *("Accuracy against time and memory", "Trials, best first", "Learning curves and time"),
        *("Trials across thresholds", "Importance of each threshold", "What the loop did in each trial", *THRESHOLDS),
    )
    for heading in headings:
        assert heading in tags.texts
    assert tags.count("details") == 30
    pictures = [attributes["alt"] for tag, attributes in tags.tags if tag == "img"]
    assert pictures[:4] == ["pareto", "curves", "parallel_coordinates", "importance"]
    timeline = ["overview", "precision", "curvature_and_lr"]
    assert any(pictures[place : place + 3] == timeline for place in range(len(pictures)))


def test_a_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    text = (folder / REPORT).read_text()
    assert not re.search(r"https?:|//[a-z]|url\(|@import", re.sub(r"(base64,|sha256-)[^']*", "", text))
    tags = Tags(text)
    assert not {"link", "iframe", "object"} & {tag for tag, _ in tags.tags}
    assert [attributes for tag, attributes in tags.tags if tag == "script"] == [{}]
    assert all(
        (attributes["src"] or "").startswith("data:image/png;base64,") for tag, attributes in tags.tags if tag == "img"
    )
    (policy,) = [attributes["content"] for tag, attributes in tags.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-")


@needs_chromium
@pytest.mark.parametrize("width", [1200, 700])
def test_a_browser_shows_the_pictures(folder: Path, tmp_path: Path, width: int) -> None:
    seen = screenshot(f"file://{folder / REPORT}", tmp_path / "page.png", width=width, height=6000)
    assert seen.shape == (6000, width, 3)
    assert num_colours(seen) > 500
    # the bars of the importance are the page's only wide areas of this blue
    assert (np.abs(seen.astype(int) - (0x00, 0x72, 0xB2)).max(axis=2) <= 2).sum() > 5_000


def test_a_damaged_trial_is_listed_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = simulated_search(tmp_path / "hunt", 4, has_pictures=True)
    (folder / "trials" / "trial02" / "events.jsonl").write_text("no event\n")
    record = read_search(folder)
    assert [run.name for run in record.trials] == ["trial00", "trial01", "trial03"]
    assert search_grid(record).rows[-1][:2] == ["trial02", "damaged"]
    show(view_search(record))
    assert "trial02 is left out: event log" in capsys.readouterr().out
    assert "<td>trial02</td><td>is left out</td><td>event log" in (folder / REPORT).read_text()


@pytest.mark.parametrize(
    ("causes", "text"),
    [
        (("out_of_memory", "out_of_memory"), r"\(2 failed \(out_of_memory\)\): give more --memory-headroom"),
        (("non_finite",), "give a smaller --lr"),
        (("bug",), "triaccel resume"),
        ((), "none has begun"),
    ],
)
def test_a_search_without_a_trial_to_its_end_says_what_ended_them(causes: Sequence[str], text: str) -> None:
    runs = [run_of(f"trial{index}", status="failed") for index in range(len(causes))]
    ended = [replace(run, end=End(status="failed", cause=cause)) for run, cause in zip(runs, causes, strict=True)]
    said = recommendation(search_of(*ended)).sentence
    assert re.search(text, said)
    assert "--margin" not in said
