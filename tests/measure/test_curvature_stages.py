"""From eager measurements to replayed ones and back: when the curvature meter captures, and what it does if it cannot.

Mostly on the CPU, with a pool that runs what a GPU would capture.
"""

import gc
import random
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import RerunPool, Wired
from tests.measure.curvature_models import METHODS, NUM_CLASSES, draws, make, meter_of
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.measure.curvature.meter import CurvatureMeter

NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class OtherGraphs:
    """Another owner of graphs in the same pool, as the captured steps are."""

    def __init__(self, pool: GraphPool) -> None:
        self.graphs = [pool.capture(lambda: None)]
        pool.on_release(self.graphs.clear)


def course_of(meter: CurvatureMeter, samples: Any, count: int) -> list[bool]:
    """Whether each of `count` measurements leaves the meter captured."""
    captured, generator = [], draws()
    for _ in range(count):
        assert meter.measure(*samples, generator).eigenvalues.isfinite().any(dim=1).all()
        captured.append(meter.is_captured)
    return captured


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "tied_tokens", "attention"])
def test_the_third_measurement_is_captured_and_other_shapes_begin_anew(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    meter = meter_of(model, method, pool=RerunPool())
    assert course_of(meter, (inputs, targets), 4) == [False, False, True, True]
    assert (meter.not_captured_because, meter.stays_eager) == ("", False)
    assert course_of(meter, (inputs[:4], targets[:4]), 3) == [False, False, True]


def test_capture_that_is_off_is_off_for_curvature() -> None:
    model, *samples = make("smooth")
    pool = RerunPool()
    meter = meter_of(model, pool=pool, capture=False)
    assert not any(course_of(meter, samples, 4))
    assert pool.num_tried == 0
    assert meter.not_captured_because == "capture is off"
    assert not meter.stays_eager  # nobody wanted it otherwise: no fault


@pytest.mark.parametrize("method", METHODS)
def test_a_capture_without_memory_gives_way_to_an_eager_measurement_with_all_of_it(method: Any) -> None:
    model, *samples = make("smooth")
    pool = RerunPool(None, NO_ROOM, NO_ROOM)
    meter, others = meter_of(model, method, pool=pool), OtherGraphs(pool)
    assert course_of(meter, samples, 3) == [False] * 3
    assert others.graphs == []  # dropped before it measured eagerly
    assert not pool.holds_graphs
    assert meter.needs_room  # the next one is tried with no other graph beside it
    assert (meter.not_captured_because, meter.stays_eager) == (str(NO_ROOM), False)
    assert course_of(meter, samples, 2) == [False, True]
    assert not meter.needs_room


def test_a_capture_that_fails_otherwise_leaves_no_graph_and_stays_eager() -> None:
    model, inputs, targets = make("smooth")
    pool = RerunPool(None, RuntimeError("operation not permitted when stream is capturing"))
    meter, others = meter_of(model, pool=pool), OtherGraphs(pool)
    assert not any(course_of(meter, (inputs, targets), 5))
    assert others.graphs == []
    assert pool.num_tried == 2
    assert meter.stays_eager
    assert meter.not_captured_because == "operation not permitted when stream is capturing"
    assert course_of(meter, (inputs[:4], targets[:4]), 3)[-1]  # other shapes may work


def test_a_released_meter_captures_again() -> None:
    model, *samples = make("smooth")
    pool = RerunPool()
    meter = meter_of(model, pool=pool)
    course_of(meter, samples, 3)
    assert pool.holds_graphs
    pool.release()
    gc.collect()
    assert not pool.holds_graphs
    assert (meter.is_captured, meter.needs_room, meter.not_captured_because) == (False, False, "released")
    assert course_of(meter, samples, 1) == [True]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # where no graph would read it
    assert course_of(meter, samples, 3) == [False, False, True]


def test_what_a_replay_would_not_do_again_stays_eager() -> None:
    model, *samples = make("smooth")
    pool = RerunPool()
    drawing = Wired(lambda self, x: x * (1.0 if random.random() >= 0.0 else 2.0))
    meter = meter_of(nn.Sequential(model, drawing), pool=pool)
    assert not any(course_of(meter, samples, 4))
    assert (pool.num_tried, meter.stays_eager) == (0, True)
    assert "draws random numbers on the host" in meter.not_captured_because


@pytest.mark.parametrize(("method", "is_captured"), [("fisher", True), ("ggn", False)])
def test_a_pass_per_sample_is_captured_where_it_has_one_column(method: str, is_captured: bool) -> None:
    model, *samples = make("deciding")
    meter = meter_of(model, method, pool=RerunPool())
    assert course_of(meter, samples, 3)[-1] == is_captured
    assert is_captured or "layers 0 take one pass" in meter.not_captured_because


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
    meter = meter_of(model, pool=RerunPool())
    meter.measure(inputs, targets, draws())
    model.fails = True
    meter.measure(inputs, targets, draws())
    assert model.alive == [False]
    assert meter.needs_room  # what was found out before counts no longer


class Gpt(nn.Module):
    """Blocks of attention over sequences: activations that are far larger than weights."""

    def __init__(self) -> None:
        super().__init__()
        width = 256
        self.tokens, self.positions = nn.Embedding(512, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(width, 512, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fisher", "hessian"])
def test_a_measurement_takes_no_more_memory_than_it_may(method: Any) -> None:
    """Eagerly and as a graph, of 32 sequences whose measurement at once would take more than the budget."""
    device = torch.device("cuda")
    model = Gpt().to(device)
    inputs, targets = torch.randint(512, (2, 32, 256), device=device)
    peaks, found = {}, {}
    for budget in (None, 2**29):
        meter = meter_of(model, method, 1, loss=next_token, device="cuda")
        generator = draws("cuda")
        for index in range(3):
            meter.measure(inputs, targets, generator, budget_bytes=budget) if index == 0 else None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found[budget] = meter.measure(inputs, targets, generator, budget_bytes=budget).eigenvalues
            peaks[budget, index] = torch.cuda.max_memory_allocated() - before
        assert meter.is_captured, meter.not_captured_because
        meter.release()
    torch.testing.assert_close(found[2**29], found[None], rtol=1e-2, atol=1e-5)
    assert peaks[None, 0] > 2**29
    assert max(peaks[2**29, index] for index in range(3)) <= 2**29, peaks


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "smooth", "tied_tokens", "attention", "foreign", "lent"])
def test_a_replay_is_the_measurement_it_was_captured_from(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    meter, eager = (meter_of(model, method, device="cuda", capture=c) for c in (True, False))
    generators = draws("cuda"), draws("cuda")
    for index in range(5):
        found = meter.measure(inputs, targets, generators[0])
        expected = eager.measure(inputs, targets, generators[1])
        torch.testing.assert_close((found.eigenvalues, found.noise), (expected.eigenvalues, expected.noise))
        assert meter.is_captured == (index > 1), meter.not_captured_because
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        inputs = inputs.flip(0)
    torch.cuda.manual_seed(0)
    torch.rand(1, device="cuda")  # the default generator is none the worse
