"""Pictures of one run and of many: what they show, read from their axes and pixels."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from PIL import Image

from tests.decide.build import USUAL
from tests.service.browser import num_colors
from tests.service.build import CONTROL, RESNET, SMALL, SimulatedRun
from tests.service.records import RUN_SPEC
from triaccel_ray.measure.memory import MIB
from triaccel_ray.records.events import Epoch, Event, Tick, read_events
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision, Storage
from triaccel_ray.records.signals import MemoryProfile, RegionSignal
from triaccel_ray.service.report.drawing import PRECISION_COLORS, front
from triaccel_ray.service.report.figures import (
    draw_run,
    memory_plan,
    overview,
    precision_heatmap,
    run_figures,
    step_edges,
)
from triaccel_ray.service.runs.objective import Performance
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import SPEC, write_value


def events_of(folder: Path, names: tuple[str, ...] = SMALL, epochs: int = 3, **settings: object) -> list[Event]:
    run = SimulatedRun(folder, names=names, **settings)  # type: ignore[arg-type]  # fields of a test's own dataclass
    run.complete(epochs=epochs)
    return list(read_events(run.path))


def of_kind(kind: type, events: Sequence[Event]) -> list[Any]:
    return [event.record for event in events if isinstance(event.record, kind)]


def texts(figure: Figure) -> set[str]:
    return {found.get_text() for found in figure.findobj(Text)}


def overview_of(events: Sequence[Event], ticks: Sequence[Tick]) -> Figure:
    return overview(of_kind(Epoch, events), ticks, CONTROL.batch, Goal(), subtitle="digits")


def axes_titled(figure: Figure, title: str) -> Axes:
    return next(axes for axes in figure.axes if axes.get_title(loc="left") == title)


def heights(figure: Figure, title: str) -> list[float]:
    """The values of the panel's first steps, the last interval's plan included."""
    steps = (patch for patch in axes_titled(figure, title).patches if isinstance(patch, StepPatch))
    return next(steps).get_data().values.tolist()


def test_a_run_has_the_pictures_that_it_has_data_for_drawn_again_where_its_log_is_newer(tmp_path: Path) -> None:
    made = SimulatedRun(tmp_path, names=RESNET, has_pictures=False)
    made.complete(epochs=2)
    write_value(tmp_path / SPEC, RUN_SPEC)
    run = read_run(tmp_path)
    paths = run_figures(run)
    assert [path.stem for path in paths] == ["overview", "precision"]
    for path in paths:
        with Image.open(path) as picture:
            assert 900 <= picture.size[0] <= 1400
            assert num_colors(np.asarray(picture.convert("RGB"))) > 30
    times = [path.stat().st_mtime_ns for path in paths]
    assert [path.stat().st_mtime_ns for path in run_figures(run)] == times
    made.path.touch()
    assert [path.stat().st_mtime_ns for path in run_figures(run)] > times
    assert list(draw_run(replace(run, ticks=()))) == ["overview"]
    assert draw_run(replace(run, ticks=(), epochs=())) == {}


def test_the_heatmap_shows_each_precision_as_long_as_it_was_in_force(tmp_path: Path) -> None:
    ticks = of_kind(Tick, events_of(tmp_path, RESNET, epochs=18))
    figure = precision_heatmap(ticks, subtitle="digits")
    (image,) = figure.axes[0].images
    in_force = [[tick.observation.plan.precision[name].rank for tick in ticks] for name in RESNET]
    assert image.get_array().tolist() == in_force
    assert {rank for row in in_force for rank in row} == {level.rank for level in USUAL}
    for level, color in PRECISION_COLORS.items():
        assert image.to_rgba(level.rank) == pytest.approx(to_rgba(color))
    plan = replace(ticks[0].observation.plan, precision=dict.fromkeys(RESNET, Precision.FP8))
    first = replace(ticks[0], observation=replace(ticks[0].observation, plan=plan))
    share = f"FP8  {100 / len(ticks):.0f}%"
    assert share in texts(precision_heatmap([first, *ticks[1:]]))
    assert {*RESNET, "digits", "optimizer step", "Precision of each layer"} <= texts(figure)


def test_the_memory_plan_shows_what_each_region_keeps_and_what_is_freed(tmp_path: Path) -> None:
    tick = of_kind(Tick, events_of(tmp_path, epochs=1))[-1]
    regions = tuple(
        RegionSignal(
            name=name, saved_bytes=saved * MIB, input_bytes=10 * MIB, offloadable_bytes=30 * MIB, forward_ms=1.0,
            backward_ms=2.0, can_join=name == "tail", can_select=True,
        )
        for name, saved in (("stem", 40), ("body", 60), ("tail", 70), ("neck", 30), ("head", 50))
    )  # fmt: skip
    storage = {"body": Storage.RECOMPUTE, "tail": Storage.JOIN, "neck": Storage.SELECTIVE_50, "head": Storage.OFFLOAD}
    plan = replace(tick.observation.plan, storage=storage)
    profile = MemoryProfile(regions=regions, micro_batch_size=8)
    planned = replace(tick, observation=replace(tick.observation, plan=plan, profile=profile))
    figure = memory_plan([planned, tick], subtitle="digits")
    (axes,) = figure.axes
    kept, freed = (
        [bar.get_width() for bar in container] for container in axes.containers if isinstance(container, BarContainer)
    )
    assert kept == pytest.approx([40, 10, 0, 21.6, 20])
    assert freed == pytest.approx([0, 50, 70, 8.4, 30])
    assert {"stem", "body", "head", "kept  92 MiB", "recomputed  128 MiB", "offloaded  30 MiB"} <= texts(figure)


def test_names_of_many_layers_are_shortened_and_thinned(tmp_path: Path) -> None:
    deep = tuple(f"model.blocks.{index // 4}.attention.projection_{'qkvo'[index % 4]}" for index in range(80))
    figure = precision_heatmap(of_kind(Tick, events_of(tmp_path, deep, epochs=1)))
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert 20 <= len(rows) <= 32
    assert max(map(len, rows)) <= 36
    assert len(set(rows)) == len(rows)
    assert all(row[1:] in deep[3 * place] for place, row in enumerate(rows))


def test_one_picture_tells_what_was_learned_and_changed(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=6, capacity=128)
    epochs, ticks = of_kind(Epoch, events), of_kind(Tick, events)
    figure = overview_of(events, ticks)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("Loss", "Validation accuracy", "Precision", "Batch size", "Memory", "Speed")
    ]
    assert {"epoch", "digits", "training", "validation"} <= texts(figure)
    assert {"limit", "rho_high 85%", "rho_low 60%", *(level.name for level in USUAL)} <= texts(figure)
    assert "FP8" not in texts(figure)
    assert f"{epochs[-1].held_out(Goal()):.2f}" in texts(figure)
    assert "at once on the device" not in texts(figure)
    plan = replace(ticks[0].observation.plan, num_micro_batches=4)
    in_parts = replace(ticks[0], observation=replace(ticks[0].observation, plan=plan))
    assert "at once on the device" in texts(overview_of(events, [in_parts]))
    sizes = [tick.observation.plan.batch_size for tick in ticks] + [ticks[-1].applied.plan.batch_size]
    assert heights(figure, "Batch size") == sizes
    assert heights(figure, "Speed") == [epoch.images_per_second for epoch in epochs]


def test_a_baseline_that_does_not_look_has_the_same_picture(tmp_path: Path) -> None:
    blind: Any = {"held_out_metrics": {}, "held_out_loss": None, "score": None}
    epochs = of_kind(Epoch, events_of(tmp_path))
    steep = [replace(epoch, train_loss=100.0 * 0.01**place, **blind) for place, epoch in enumerate(epochs)]
    figure = overview(steep, [], CONTROL.batch, Goal())
    assert {"the same from the first step to the last", "not evaluated before the end of the run"} <= texts(figure)
    assert len(heights(figure, "Memory")) == 3
    assert axes_titled(figure, "Loss").get_yscale() == "log"


def test_the_first_interval_of_a_log_that_begins_later_is_as_long_as_the_second(tmp_path: Path) -> None:
    events = events_of(tmp_path, epochs=6)
    ticks = of_kind(Tick, events)
    steps, places = ([getattr(tick.observation, name) for tick in ticks] for name in ("step", "epoch"))
    assert step_edges(ticks)[0] == 0.0
    late = ticks[4:]
    assert step_edges(late) == [2 * steps[4] - steps[5], *steps[4:]]
    (patch, *_) = axes_titled(overview_of(events, late), "Batch size").patches
    assert patch.get_data().edges[0] == pytest.approx(2 * places[4] - places[5])
    assert step_edges(late[:1]) == [0.0, steps[4]]


few_values = st.sampled_from([0.0, 1.0, 2.0, 3.0])


@given(pairs=st.lists(st.tuples(few_values, few_values), max_size=12), maximize=st.booleans())
def test_the_front_is_what_nothing_dominates(pairs: list[tuple[float, float]], maximize: bool) -> None:
    points = [Performance(metric=metric, seconds=seconds, peak_gb=1.0, score=1.0) for metric, seconds in pairs]
    sign = 1 if maximize else -1

    def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return sign * one[0] >= sign * other[0] and one[1] <= other[1] and one != other

    best = {pair for pair in pairs if not any(dominates(other, pair) for other in pairs)}
    found = front(points, lambda point: point.seconds, Goal(maximize=maximize))
    assert [(point.metric, point.seconds) for point in found] == sorted(best, key=lambda pair: pair[1])
