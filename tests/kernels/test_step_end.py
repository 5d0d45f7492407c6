import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.build import DEVICE
from triaccel_ray.kernels.step_end import LossScaleState, end_step


def state_of(scale: float = 8.0, growth_interval: int = 3, maximum: float = 2.0**24) -> LossScaleState:
    return LossScaleState(
        scale=torch.tensor(scale, device=DEVICE),
        num_finite=torch.zeros((), device=DEVICE),
        num_skipped=torch.zeros((), dtype=torch.float64, device=DEVICE),
        num_skipped_in_row=torch.zeros((), dtype=torch.float64, device=DEVICE),
        growth_interval=growth_interval,
        minimum=1.0,
        maximum=maximum,
    )


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def outcomes_of(state: LossScaleState, outcomes: str, *, rows: int, kernel: bool) -> tuple[list[float], Tensor]:
    """The scale after each step (x: an overflow), and the totals after all."""
    totals = torch.zeros(rows, 2, dtype=torch.float64, device=DEVICE)
    scales = []
    for index, outcome in enumerate(outcomes):
        loss = math.inf if outcome == "x" else 1.0 / 3.0 + index
        found = scalar(float(outcome == "x"), torch.float32)
        end_step(scalar(loss), 96 + index, totals, found, state, kernel=kernel)
        scales.append(state.scale.item())
    return scales, totals


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize(
    ("settings", "outcomes", "scales", "num_finite", "rows"),
    [
        ({}, ".......", [8, 8, 16, 16, 16, 32, 32], 1, 1),
        ({}, "..x...", [8, 8, 4, 4, 4, 8], 0, 5),
        ({}, "xx...x", [4, 2, 2, 2, 4, 2], 0, 1),
        ({"scale": 2.0, "maximum": 4.0, "growth_interval": 1}, "xxx...", [1, 1, 1, 2, 4, 4], 0, 2),
    ],
)
def test_the_scale_doubles_after_finite_steps_halves_at_an_overflow_which_leaves_no_loss_and_keeps_its_bounds(
    settings: Any, outcomes: str, scales: list[float], num_finite: int, rows: int, kernel: bool
) -> None:
    state = state_of(**settings)
    found, totals = outcomes_of(state, outcomes, rows=rows, kernel=kernel)
    finite = [index for index, outcome in enumerate(outcomes) if outcome == "."]
    assert found == scales
    assert totals.tolist() == [[sum(1.0 / 3.0 + index for index in finite), sum(96 + index for index in finite)]] * rows
    in_row = len(outcomes) - len(outcomes.rstrip("x"))
    counts = state.num_finite, state.num_skipped, state.num_skipped_in_row
    assert [count.item() for count in counts] == [num_finite, outcomes.count("x"), in_row]


@pytest.mark.parametrize("kernel", [True, False])
def test_a_step_without_a_loss_scale_is_skipped_and_counted_too(kernel: bool) -> None:
    totals, state = torch.zeros(2, 2, dtype=torch.float64, device=DEVICE), state_of()
    for found in (0.0, 1.0, 1.0):
        end_step(scalar(3.0), 7, totals, scalar(found, torch.float32), state, moves_scale=False, kernel=kernel)
    assert totals.tolist() == [[3.0, 7.0]] * 2
    assert (state.num_skipped.item(), state.num_skipped_in_row.item(), state.scale.item()) == (2.0, 2.0, 8.0)


@pytest.mark.gpu
def test_a_captured_end_reads_the_state_anew() -> None:
    state, totals = state_of(growth_interval=1), torch.zeros(2, 2, dtype=torch.float64, device=DEVICE)
    loss, found = scalar(2.0), scalar(0.0, torch.float32)
    end_step(loss, 96, totals, found, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        end_step(loss, 96, totals, found, state)
    for overflow in (0.0, 1.0, 0.0):
        found.fill_(overflow)
        graph.replay()
    assert state.scale.item() == 8.0 * 2 * 2 / 2 * 2
    assert state.num_skipped.item() == 1.0
    assert totals.tolist() == [[6.0, 288.0]] * 2
