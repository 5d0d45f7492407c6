"""From eager measurements to replayed ones and back: when the curvature meter captures, and what it does if it cannot.

Mostly on the CPU, with a pool that runs what a GPU would capture.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import CPU, RerunPool
from tests.measure.curvature_models import METHODS, NUM_CLASSES, make
from triaccel_ray.config import CurvatureConfig
from triaccel_ray.cuda.graphs import Graph, GraphPool
from triaccel_ray.measure.curvature import CurvatureMeter
from triaccel_ray.measure.curvature.gram import GramMethod
from triaccel_ray.model.layers import find_layers

NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def meter_of(
    model: nn.Module, pool: GraphPool, method: Any = "fisher", device: torch.device = CPU, **options: Any
) -> CurvatureMeter:
    config = CurvatureConfig(method=method, top_k=2)
    return CurvatureMeter(model, F.cross_entropy, find_layers(model), config, device=device, pool=pool, **options)


def draws(device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


class OtherGraphs:
    """Another owner of graphs in the same pool, as the captured steps are."""

    def __init__(self, pool: GraphPool) -> None:
        self.graphs = [pool.capture(lambda: None)]
        pool.on_release(self.graphs.clear)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "smooth", "tied_tokens", "attention", "foreign", "lent"])
def test_the_third_measurement_is_captured_and_the_fourth_a_replay(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    pool = RerunPool()
    meter, eager = meter_of(model, pool, method), meter_of(model, pool, method, capture=False)
    seen, generators = [], (draws(), draws())
    for _ in range(4):
        room = meter.needs_room
        estimate, expected = (m.measure(inputs, targets, g) for m, g in zip((meter, eager), generators, strict=True))
        seen.append((room, meter.is_captured))
        assert estimate.eigenvalues.shape == expected.eigenvalues.shape
    assert seen == [(True, False), (True, False), (False, True), (False, True)]
    assert meter.not_captured_because == ""
    assert not meter.stays_eager


def test_capture_that_is_off_is_off_for_curvature() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool()
    meter = meter_of(model, pool, capture=False)
    for _ in range(4):
        meter.measure(inputs, targets, draws())
    assert pool.num_tried == 0
    assert meter.not_captured_because == "capture is off"
    assert meter.needs_room
    assert not meter.stays_eager  # nobody wanted it otherwise: no fault


@pytest.mark.parametrize("method", METHODS)
def test_a_capture_without_memory_gives_way_to_an_eager_measurement_with_all_of_it(method: Any) -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool(None, NO_ROOM)
    meter, eager = meter_of(model, pool, method), meter_of(model, RerunPool(), method, capture=False)
    others = OtherGraphs(pool)
    generators = draws(), draws()
    for _ in range(3):
        estimate = meter.measure(inputs, targets, generators[0])
        expected = eager.measure(inputs, targets, generators[1])
    assert others.graphs == []  # dropped before it measured eagerly
    assert not pool.holds_graphs
    assert meter.needs_room  # the next one is tried with no other graph beside it
    assert meter.not_captured_because == str(NO_ROOM)
    assert not meter.stays_eager
    if method != "hessian":  # whose vectors the failed attempt has moved on
        torch.testing.assert_close(estimate.eigenvalues, expected.eigenvalues)
    meter.measure(inputs, targets, generators[0])
    assert meter.is_captured
    assert not meter.needs_room


def test_curvature_that_finds_no_memory_at_all_is_tried_again_each_time() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool(NO_ROOM, NO_ROOM)
    meter = meter_of(model, pool)
    captured = []
    for _ in range(6):
        assert meter.measure(inputs, targets, draws()).eigenvalues.isfinite().all()
        captured.append(meter.is_captured)
    assert captured == [False, False, False, False, True, True]


def test_a_capture_that_fails_otherwise_leaves_no_graph_and_stays_eager() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool(None, RuntimeError("operation not permitted when stream is capturing"))
    meter = meter_of(model, pool)
    others = OtherGraphs(pool)
    for _ in range(5):
        assert meter.measure(inputs, targets, draws()).eigenvalues.isfinite().all()
    assert others.graphs == []
    assert pool.num_tried == 2
    assert meter.stays_eager
    assert meter.not_captured_because == "operation not permitted when stream is capturing"


def test_a_released_meter_captures_again() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool()
    meter = meter_of(model, pool)
    for _ in range(3):
        meter.measure(inputs, targets, draws())
    assert pool.holds_graphs
    pool.release()
    gc.collect()
    assert not pool.holds_graphs
    assert (meter.is_captured, meter.needs_room, meter.not_captured_because) == (False, False, "released")
    meter.measure(inputs, targets, draws())
    assert meter.is_captured


def test_other_shapes_are_found_out_about_anew_also_after_staying_eager() -> None:
    model, inputs, targets = make("smooth")
    meter = meter_of(model, RerunPool(RuntimeError("not for this shape")))
    for _ in range(4):
        meter.measure(inputs, targets, draws())
    assert meter.stays_eager
    captured = []
    for _ in range(3):
        meter.measure(inputs[:4], targets[:4], draws())
        captured.append(meter.is_captured)
    assert captured == [False, False, True]


class Drawing(nn.Module):
    """Draws on the host, which no replay would."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if random.random() >= 0.0 else 2.0)


def test_a_model_that_draws_on_the_host_stays_eager() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool()
    meter = meter_of(nn.Sequential(model, Drawing()), pool)
    for _ in range(4):
        meter.measure(inputs, targets, draws())
    assert pool.num_tried == 0
    assert meter.stays_eager
    assert "draws random numbers on the host" in meter.not_captured_because


class Remembering(nn.Module):
    """Keeps what passed when it last failed alive for as long as the error's traceback does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, NUM_CLASSES)
        self.fails = False
        self.tensors: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        if self.fails:
            self.fails = False
            self.tensors.append(weakref.ref(hidden))
            raise LookupError("another course")
        self.alive = [ref() is not None for ref in self.tensors]
        return self.linear(hidden)


def test_nothing_of_a_failed_attempt_is_held_while_the_structure_is_found_anew() -> None:
    model = Remembering().double()
    inputs, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(NUM_CLASSES, (6,))
    meter = meter_of(model, RerunPool())
    meter.measure(inputs, targets, draws())
    model.fails = True
    meter.measure(inputs, targets, draws())
    assert model.alive == [False]
    assert meter.needs_room  # what was found out before counts no longer


def test_an_eager_measurement_without_memory_leaves_nothing_behind() -> None:
    model, inputs, targets = make("smooth")
    meter = meter_of(model, RerunPool(), "hessian")
    meter.measure(inputs, targets, draws())

    def fail() -> None:
        raise NO_ROOM

    meter._method.advance = fail  # type: ignore[method-assign]  # as an allocation inside would
    with pytest.raises(torch.OutOfMemoryError):
        meter.measure(inputs, targets, draws())
    assert not isinstance(meter._method, GramMethod)
    assert meter._method._gradients is None
    del meter._method.advance
    assert meter.measure(inputs, targets, draws()).eigenvalues.isfinite().all()


class Cramped(GraphPool):
    """Runs out of memory at the end of its second capture."""

    num_tried = 0

    def _record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> Graph:
        self.num_tried += 1
        is_too_much = self.num_tried == 2

        def cramped() -> None:
            work()
            if is_too_much:
                raise torch.OutOfMemoryError("no room for curvature")

        return super()._record(cramped, generators)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_a_capture_without_memory_is_measured_eagerly_and_made_later(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    device = torch.device("cuda")
    pool = Cramped(device)
    values = torch.zeros(1, device=device)
    others = [pool.capture(lambda: values.add_(1.0))]
    pool.on_release(others.clear)
    meter = meter_of(model, pool, method, device=device)
    eager = meter_of(model, GraphPool(device), method, device=device, capture=False)
    generators = draws(device), draws(device)
    for index in range(5):
        found = meter.measure(inputs, targets, generators[0]).eigenvalues
        expected = eager.measure(inputs, targets, generators[1]).eigenvalues
        assert meter.is_captured == (index > 2), meter.not_captured_because
        assert bool(others) == (index < 2)
        torch.testing.assert_close(found, expected)
    assert float(values) == 0.0
