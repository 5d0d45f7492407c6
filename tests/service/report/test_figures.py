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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from PIL import Image

from tests.service.browser import num_colours
from tests.service.build import CONTROL, RESNET, SMALL, SimulatedRun
from triaccel_ray.records.events import End, Epoch, Event, Start, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Fault, FaultKind, Precision
from triaccel_ray.service.report.curves import Curve, learning_curves
from triaccel_ray.service.report.figure_style import PRECISION_COLOURS, shorten
from triaccel_ray.service.report.figures import curvature_and_lr, precision_heatmap, run_figures, save_run_figures
from triaccel_ray.service.report.overview import overview
from triaccel_ray.service.report.pareto import Outcome, pareto_front, pareto_indices

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
def test_a_run_has_three_pictures(tmp_path: Path, names: tuple[str, ...]) -> None:
    paths = save_run_figures(events_of(tmp_path, names), tmp_path / "pictures")
    assert [path.stem for path in paths] == ["overview", "precision", "curvature_and_lr"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            width, height = picture.size
            assert 900 <= width <= 1400
            assert 200 <= height <= 1300
            assert num_colours(np.asarray(picture.convert("RGB"))) > 30


def test_only_what_there_is_data_for_is_drawn(tmp_path: Path) -> None:
    events = events_of(tmp_path)
    start = next(event for event in events if isinstance(event.record, Start))
    without_ticks = [event for event in events if not isinstance(event.record, Tick)]
    assert [path.name for path in save_run_figures(without_ticks, tmp_path / "a")] == ["overview.png"]
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


def overview_of(events: Sequence[Event], ticks: Sequence[Tick] | None = None) -> Figure:
    return overview(
        epochs_of(events), ticks_of(events) if ticks is None else ticks, CONTROL.batch, Goal(), about="digits"
    )


def axes_titled(figure: Figure, title: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def heights(figure: Figure, title: str) -> list[float]:
    """The values of the panel's steps, the last interval's plan included."""
    return next(p for p in axes_titled(figure, title).patches if isinstance(p, StepPatch)).get_data().values.tolist()


def test_one_picture_tells_what_was_learned_changed_and_spent(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=6, capacity=128)
    epochs, ticks = epochs_of(events), ticks_of(events)
    assert any(tick.observation.faults for tick in ticks)
    figure = overview_of(events)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("Loss", "Validation accuracy", "Precision", "Batch size", "Memory of the process on the device", "Speed"),
        *("Time", "Validation accuracy over time"),
    ]
    units = {"samples a step", "GB", "samples per second", "seconds per epoch", "percent of the layers", "percent"}
    assert units | {"epoch", "seconds of training", "digits", "training", "validation"} <= texts(figure)
    assert {"out of memory", "limit", "rho_high 85%", "rho_low 60%", *Precision.__members__} <= texts(figure)
    assert f"{epochs[-1].held_out(Goal()):.1f}" in texts(figure)
    sizes = [tick.observation.plan.batch_size for tick in ticks] + [ticks[-1].applied.plan.batch_size]
    assert heights(figure, "Batch size") == sizes
    assert heights(figure, "Time") == [epoch.seconds for epoch in epochs]
    assert heights(figure, "Speed") == [epoch.images_per_second for epoch in epochs]
    assert "out of memory" not in texts(overview_of(events_of(tmp_path / "quiet")))
    (curve,) = axes_titled(figure, "Validation accuracy over time").lines
    assert curve.get_xdata()[-1] == pytest.approx(sum(epoch.seconds for epoch in epochs))


def test_what_changing_plans_took_is_part_of_its_epoch(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=3)
    ticks = ticks_of(events)
    slow = [tick for tick in ticks if 1.0 < tick.observation.epoch <= 2.0]
    spent = [replace(tick, applied=replace(tick.applied, adapt_ms=500.0 * (tick in slow))) for tick in ticks]
    axes = axes_titled(overview_of(events, spent), "Time")
    adapting = next(patch for patch in axes.patches if patch.get_label() == "of which adapting")
    assert adapting.get_data().values.tolist() == [0.0, 0.5 * len(slow), 0.0]


def test_a_baseline_without_ticks_has_the_same_picture(tmp_path: Path) -> None:
    figure = overview_of(events_of(tmp_path), [])
    assert "the same from the first step to the last" in texts(figure)
    assert len(heights(figure, "Memory of the process on the device")) == 3


def test_parts_of_a_batch_and_plans_not_applied_are_shown(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=1)
    tick = ticks_of(events)[0]
    plan = replace(tick.observation.plan, num_micro_batches=4)
    fault = Fault(kind=FaultKind.APPLY_FAILED, step=tick.observation.step, phase="apply")
    tick = replace(tick, observation=replace(tick.observation, plan=plan, faults=(fault,)))
    assert {"plan not applied", "at once on the device"} <= texts(overview_of(events, [tick]))


def test_captures_without_memory_are_marked(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=1)
    tick = ticks_of(events)[0]
    fault = Fault(kind=FaultKind.CAPTURE_OUT_OF_MEMORY, step=tick.observation.step, phase="capture", batch_size=96)
    tick = replace(tick, observation=replace(tick.observation, faults=(fault,)))
    assert "no memory to capture" in texts(overview_of(events, [tick]))


def test_pictures_of_another_version_are_drawn_anew(tmp_path: Path) -> None:
    log = SimulatedRun(tmp_path, has_pictures=False).complete(epochs=1) / "events.jsonl"
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "precision.png").write_bytes(b"old")
    drawn = run_figures(log, tmp_path / "figures")
    assert [path.stem for path in drawn] == ["overview", "precision", "curvature_and_lr"]
    times = [path.stat().st_mtime_ns for path in drawn]
    assert [path.stat().st_mtime_ns for path in run_figures(log, tmp_path / "figures")] == times


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


def blind(epochs: Sequence[Epoch]) -> list[Epoch]:
    """The epochs of a run that reads the test samples at its end."""
    return [replace(epoch, held_out_metrics={}, held_out_loss=None, score=None) for epoch in epochs]


def test_a_run_that_does_not_look_says_so(tmp_path: Path) -> None:
    epochs = blind(epochs_of(events_of(tmp_path)))
    assert "not looked at before the end of the run" in texts(overview(epochs, [], CONTROL.batch, Goal()))


def test_curves_of_many_runs_go_over_epochs_and_seconds(tmp_path: Path) -> None:
    epochs = epochs_of(events_of(tmp_path, epochs=4))
    curves = [
        Curve(label="trial", colour="#0072B2", epochs=epochs),
        Curve(label="trial", colour="#0072B2", epochs=epochs[:2], pruned=True),
        Curve(label="AMP", colour="#D98200", epochs=epochs),
    ]
    figure = learning_curves(curves, Goal(), about="a search")
    over_epochs, over_seconds = (axes_titled(figure, f"Validation accuracy over {what}") for what in ("epochs", "time"))
    assert over_epochs.lines[0].get_ydata().tolist() == [epoch.held_out(Goal()) for epoch in epochs]
    assert over_seconds.lines[0].get_xdata()[1] == pytest.approx(epochs[0].seconds + epochs[1].seconds)
    assert sum(line.get_marker() == "x" for line in over_epochs.lines) == 1
    assert axes_titled(figure, "Time").lines[0].get_ydata().tolist() == [epoch.seconds for epoch in epochs]
    speeds = axes_titled(figure, "Speed").lines[0].get_ydata().tolist()
    assert speeds == [epoch.images_per_second for epoch in epochs]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["trial", "AMP"]


def test_runs_that_do_not_look_have_curves_of_the_training_loss(tmp_path: Path) -> None:
    epochs = blind(epochs_of(events_of(tmp_path)))
    figure = learning_curves([Curve(label="amp", colour="#D98200", epochs=epochs)], Goal())
    losses = axes_titled(figure, "Training loss over epochs").lines[0].get_ydata().tolist()
    assert losses == [epoch.train_loss for epoch in epochs]


def test_one_tick_and_one_epoch_are_enough(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=1)
    kept = [events[0], events[4], events[5]]
    assert len(save_run_figures(kept, tmp_path / "pictures")) == 3


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


def outcome(
    label: str, accuracy: float, seconds: float, peak_gb: float, *, method: str = "triaccel", pruned: bool = False
) -> Outcome:
    return Outcome(
        label=label,
        method=method,
        metric=accuracy,
        seconds=seconds,
        peak_gb=peak_gb,
        score=accuracy / seconds / peak_gb,
        feasible=accuracy >= 91.0,
        pruned=pruned,
    )


def test_the_pareto_picture_joins_the_front_and_marks_the_baselines() -> None:
    outcomes = [
        outcome("fast", 91.0, 1.0, 3.0),
        outcome("good", 93.0, 2.0, 2.0),
        outcome("beaten", 92.0, 2.5, 2.5),
        outcome("small", 92.5, 3.0, 1.0),
        outcome("poor", 60.0, 0.5, 0.5),
        outcome("pruned", 94.0, 0.1, 0.1, pruned=True),
        outcome("fp32", 93.5, 5.0, 4.0, method="fp32"),
        outcome("amp", 93.0, 3.0, 2.8, method="amp"),
    ]
    figure = pareto_front(outcomes, Goal(), limit=91.0, about="digits")
    by_time, by_memory = (
        next(line for line in axes.lines if line.get_label() == "beaten by no other trial") for axes in figure.axes
    )
    assert by_time.get_xydata().tolist() == [[1.0, 91.0], [2.0, 93.0]]
    assert by_memory.get_xydata().tolist() == [[1.0, 92.5], [2.0, 93.0]]
    assert {"FP32", "AMP", "margin", "seconds per epoch", "peak memory, GB", "accuracy, percent"} <= texts(figure)
    assert {"best score 30.8: small", "stopped early (pruned), at its last epoch"} <= texts(figure)
    assert num_colours(pixels(figure)) > 30


@pytest.mark.parametrize("method", ["triaccel", "amp"])
def test_few_outcomes_make_a_picture_too(method: str) -> None:
    for outcomes in ([], [outcome("one", 90.0, 1.0, 1.0, method=method)]):
        assert pixels(pareto_front(outcomes, Goal())).shape[2] == 3
