from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from tests.service.browser import num_colours
from tests.service.build import CONTROL, RESNET, SMALL, SimulatedRun
from triaccel_ray.events import End, Epoch, Event, Start, Tick, read_events
from triaccel_ray.plan import Fault, FaultKind, Precision
from triaccel_ray.service.reports.figure_style import shorten
from triaccel_ray.service.reports.figures import (
    PRECISION_COLOURS,
    batch_and_memory,
    curvature_and_lr,
    learning_curve,
    precision_heatmap,
    save_run_figures,
)
from triaccel_ray.service.reports.pareto import Outcome, pareto_front, pareto_indices

DEEP = tuple(f"blocks.{index // 4}.attention.projection_{'qkvo'[index % 4]}" for index in range(80))


def events_of(folder: Path, names: tuple[str, ...] = SMALL, epochs: int = 3, **settings: object) -> list[Event]:
    run = SimulatedRun(folder, names=names, **settings)  # type: ignore[arg-type]  # fields of a test's own dataclass
    run.complete(epochs=epochs)
    return list(read_events(run.path))


def ticks_of(events: Sequence[Event]) -> list[Tick]:
    return [event.record for event in events if isinstance(event.record, Tick)]


def epochs_of(events: Sequence[Event]) -> list[Epoch]:
    return [event.record for event in events if isinstance(event.record, Epoch)]


def pixels(figure: Figure) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The picture as it would be saved: rows x columns x 3."""
    buffer = io.BytesIO()
    figure.savefig(buffer)
    return np.asarray(Image.open(buffer).convert("RGB"))


def texts(figure: Figure) -> set[str]:
    """Every text in the picture."""
    return {found.get_text() for found in figure.findobj(Text)}


@pytest.mark.parametrize("names", [SMALL, RESNET, DEEP], ids=["3 layers", "21 layers", "80 layers"])
def test_a_run_has_four_pictures(tmp_path: Path, names: tuple[str, ...]) -> None:
    paths = save_run_figures(events_of(tmp_path, names), tmp_path / "pictures")
    assert [path.stem for path in paths] == ["precision", "batch_and_memory", "curvature_and_lr", "learning_curve"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            width, height = picture.size
            assert 900 <= width <= 1300
            assert 200 <= height <= 1200
            assert num_colours(np.asarray(picture.convert("RGB"))) > 30


def test_only_what_there_is_data_for_is_drawn(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    start = next(event for event in events if isinstance(event.record, Start))
    without_ticks = [event for event in events if not isinstance(event.record, Tick)]
    assert [path.name for path in save_run_figures(without_ticks, tmp_path / "a")] == ["learning_curve.png"]
    assert save_run_figures([start], tmp_path / "b") == []
    assert save_run_figures([], tmp_path / "c") == []
    assert save_run_figures([events[-1]], tmp_path / "c") == []
    assert isinstance(events[-1].record, End)


def test_the_heatmap_shows_each_precision_as_long_as_it_was_in_force(tmp_path: Path) -> None:
    ticks = ticks_of(events_of(tmp_path, RESNET, epochs=18))
    figure = precision_heatmap(ticks, about="digits")
    picture = pixels(figure).reshape(-1, 3)
    areas = {}
    for level, colour in PRECISION_COLOURS.items():
        rgb = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        areas[level] = (np.abs(picture.astype(int) - rgb).max(axis=1) <= 2).sum()
    counts = {
        level: sum(list(tick.observation.plan.precision.values()).count(level) for tick in ticks) for level in Precision
    }
    for level in Precision:
        assert counts[level] > 0
        expected = counts[level] / sum(counts.values())
        assert areas[level] / sum(areas.values()) == pytest.approx(expected, abs=0.02)
    assert {*RESNET, "digits", "optimizer step", "Precision of each layer"} <= texts(figure)


def test_names_of_many_layers_are_shortened_and_thinned(tmp_path: Path) -> None:
    figure = precision_heatmap(ticks_of(events_of(tmp_path, DEEP, epochs=1)))
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert 20 <= len(rows) <= 32
    assert max(map(len, rows)) <= 26


def test_faults_the_limit_and_the_band_are_marked(tmp_path: Path) -> None:
    ticks = ticks_of(events_of(tmp_path, epochs=6, capacity=128))
    assert any(tick.observation.faults for tick in ticks)
    figure = batch_and_memory(ticks, CONTROL.batch)
    assert {"out of memory", "limit", "rho_low 60%", "rho_high 85%", "GB", "samples a step"} <= texts(figure)
    quiet = batch_and_memory(ticks_of(events_of(tmp_path / "quiet")), CONTROL.batch)
    assert "out of memory" not in texts(quiet)


def test_parts_of_a_batch_and_plans_not_applied_are_shown(tmp_path: Path) -> None:
    tick = ticks_of(events_of(tmp_path, epochs=1))[0]
    plan = replace(tick.observation.plan, num_micro_batches=4)
    fault = Fault(kind=FaultKind.APPLY_FAILED, step=tick.observation.step, phase="apply")
    tick = replace(tick, observation=replace(tick.observation, plan=plan, faults=(fault,)))
    assert {"plan not applied", "at once on the device"} <= texts(batch_and_memory([tick], CONTROL.batch))


def test_captures_without_memory_are_marked(tmp_path: Path) -> None:
    tick = ticks_of(events_of(tmp_path, epochs=1))[0]
    fault = Fault(kind=FaultKind.CAPTURE_OUT_OF_MEMORY, step=tick.observation.step, phase="capture", batch_size=96)
    tick = replace(tick, observation=replace(tick.observation, faults=(fault,)))
    assert "no memory to capture" in texts(batch_and_memory([tick], CONTROL.batch))


def test_curvature_is_coloured_by_depth(tmp_path: Path) -> None:
    figure = curvature_and_lr(ticks_of(events_of(tmp_path, RESNET, epochs=4)), CONTROL.curvature)
    upper, _, bar = figure.axes
    colours = [line.get_color() for line in upper.lines[: len(RESNET)]]
    assert len({tuple(colour) for colour in colours}) == len(RESNET)
    assert {"input", "output", "conv1", "fc", "tau_curv"} <= texts(figure)
    assert bar.get_ylim()[0] > bar.get_ylim()[1]


@pytest.mark.parametrize("measured", [False, True])
def test_nothing_measured_is_said(tmp_path: Path, measured: bool) -> None:
    ticks = ticks_of(events_of(tmp_path, measures_curvature=measured))
    if measured:
        # Measured, but in no layer a number above zero.
        flat = {
            name: replace(layer, eigenvalues=(value,))
            for (name, layer), value in zip(ticks[-1].decision.state.layers.items(), (0.0, -1.0, math.nan), strict=True)
        }
        state = replace(ticks[-1].decision.state, layers=flat)
        ticks = [replace(ticks[-1], decision=replace(ticks[-1].decision, state=state))]
    figure = curvature_and_lr(ticks, CONTROL.curvature)
    assert any("no curvature was measured" in text for text in texts(figure))
    assert num_colours(pixels(figure)) > 10


def test_the_learning_curve_ends_at_the_last_accuracy(tmp_path: Path) -> None:
    epochs = epochs_of(events_of(tmp_path, epochs=5))
    figure = learning_curve(epochs)
    assert {f"{epochs[-1].held_out_accuracy:.1f}", "training", "validation", "percent"} <= texts(figure)


def test_a_run_that_does_not_look_says_so(tmp_path: Path) -> None:
    epochs = [
        replace(epoch, held_out_accuracy=None, held_out_loss=None, score=None)
        for epoch in epochs_of(events_of(tmp_path))
    ]
    assert "not looked at before the end of the run" in texts(learning_curve(epochs))


def test_one_tick_and_one_epoch_are_enough(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=1)
    kept = [events[0], events[4], events[5]]
    assert len(save_run_figures(kept, tmp_path / "pictures")) == 4


def test_names_keep_their_numbers() -> None:
    assert shorten("layer2.0.downsample.0") == "layer2.0.downsample.0"
    assert shorten("blocks.12.attention.projection_q") == "blocks.12.att…on.pro…_q"
    assert len(shorten(".".join(["word"] * 30))) > 24  # nothing left to leave out


coordinates = st.one_of(st.integers(0, 4).map(float), st.floats(allow_nan=False))


@given(costs=st.integers(1, 3).flatmap(lambda size: st.lists(st.tuples(*[coordinates] * size), max_size=25)))
@settings(deadline=None)
def test_the_front_is_what_nothing_dominates(costs: list[tuple[float, ...]]) -> None:
    expected = [
        index
        for index, one in enumerate(costs)
        if not any(
            all(a <= b for a, b in zip(other, one, strict=True)) and any(a < b for a, b in zip(other, one, strict=True))
            for other in costs
        )
    ]
    assert pareto_indices(costs) == expected


def outcome(label: str, accuracy: float, seconds: float, peak_gb: float, *, method: str = "triaccel") -> Outcome:
    return Outcome(
        label=label,
        method=method,
        accuracy=accuracy,
        seconds=seconds,
        peak_gb=peak_gb,
        score=accuracy / seconds / peak_gb,
        feasible=accuracy >= 91.0,
    )


def test_the_pareto_picture_joins_the_front_and_marks_the_baselines() -> None:
    outcomes = [
        outcome("fast", 91.0, 1.0, 3.0),
        outcome("good", 93.0, 2.0, 2.0),
        outcome("beaten", 92.0, 2.5, 2.5),
        outcome("small", 92.5, 3.0, 1.0),
        outcome("poor", 60.0, 0.5, 0.5),
        outcome("fp32", 93.5, 5.0, 4.0, method="fp32"),
        outcome("amp", 93.0, 3.0, 2.8, method="amp"),
    ]
    figure = pareto_front(outcomes, accuracy_floor=91.0, about="digits")
    by_time, by_memory = (
        next(line for line in axes.lines if line.get_label() == "beaten by no other trial") for axes in figure.axes
    )
    assert by_time.get_xydata().tolist() == [[1.0, 91.0], [2.0, 93.0]]
    assert by_memory.get_xydata().tolist() == [[1.0, 92.5], [2.0, 93.0]]
    assert {"FP32", "AMP", "margin", "seconds per epoch", "peak memory, GB", "accuracy, percent"} <= texts(figure)
    assert "best score 30.8: small" in texts(figure)
    assert num_colours(pixels(figure)) > 30


@pytest.mark.parametrize("method", ["triaccel", "amp"])
def test_few_outcomes_make_a_picture_too(method: str) -> None:
    for outcomes in ([], [outcome("one", 90.0, 1.0, 1.0, method=method)]):
        assert pixels(pareto_front(outcomes)).shape[2] == 3
