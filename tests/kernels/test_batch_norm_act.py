import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.build import BF16, DEVICE, FP16, FP32, FP64, ROUNDING, assert_close, assert_replays, interpreted
from tests.kernels.build import poison as poison
from triaccel_ray.kernels.batch_norm_act import RunningStatistics, batch_norm_act, recomputer
from triaccel_ray.kernels.batch_norm_act.reference import ACTIVATIONS
from triaccel_ray.kernels.batch_norm_act.reference import batch_norm_act as reference

pytestmark = pytest.mark.usefixtures("poison")


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int] = (2, 8, 3, 5)
    activation: Any = "none"
    x: torch.dtype = FP32
    residual: torch.dtype | None = None
    output: torch.dtype | None = None
    forked: bool = False
    mean: float = 0.5
    std: float = 1.0


def _inputs(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    channels = case.shape[1]

    def draw(dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        values = torch.randn(case.shape, generator=generator) * scale + shift
        return values.to(dtype).to(DEVICE, memory_format=torch.channels_last)

    inputs = {
        "x": draw(case.x, case.std, case.mean),
        "weight": (torch.rand(channels, generator=generator) + 0.5).to(DEVICE),
        "bias": torch.randn(channels, generator=generator).to(DEVICE),
        "dy": draw(case.output or case.x),
        "dy_fork": draw(case.output or case.x),
    }
    if case.residual is not None:
        inputs["residual"] = draw(case.residual)
    return inputs


def _running(channels: int, momentum: float = 0.1, dtype: torch.dtype = FP32) -> RunningStatistics:
    mean, var = (torch.full((channels,), value, dtype=dtype, device=DEVICE) for value in (0.0, 1.0))
    counted = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return RunningStatistics(mean=mean, var=var, num_batches=counted, momentum=momentum)


def _run(case: Case, *, exact: bool) -> dict[str, Tensor]:
    """Forward and backward: the reference in FP64, or the kernels, through the interpreter where there is no GPU."""
    inputs = _inputs(case)
    if exact:
        inputs = {name: tensor.double() for name, tensor in inputs.items()}
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items() if not name.startswith("dy")}
    residual, dtype = leaves.get("residual"), FP64 if exact else case.output or case.x
    arguments = [leaves["x"], leaves["weight"], leaves["bias"]]
    running = _running(case.shape[1], 0.3, FP64 if exact else FP32)
    how: dict[str, Any] = {"activation": case.activation, "output_dtype": dtype}
    if exact:
        y = reference(*arguments, running, eps=1e-5, residual=residual, **how)
        outputs = (y, y) if case.forked else (y,)
    else:
        made = batch_norm_act(*arguments, running, eps=1e-5, residual=residual, forked=case.forked, **how)
        outputs = made if case.forked else (made,)
        assert {output.dtype for output in outputs} == {dtype}
        assert outputs[0].is_contiguous(memory_format=torch.channels_last)
    torch.autograd.backward(outputs, [inputs["dy"], inputs["dy_fork"]][: len(outputs)])
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert {name: gradient.dtype for name, gradient in gradients.items()} == {n: t.dtype for n, t in leaves.items()}
    assert running.num_batches == 1
    return {"y": outputs[0].detach(), "mean": running.mean, "var": running.var, **gradients}


SMALL = [
    Case(),
    Case(shape=(3, 13, 5, 7), activation="silu", residual=FP32, forked=True),
    Case(shape=(300, 65, 1, 1), activation="relu", residual=FP32, forked=True),
    Case(shape=(2, 24, 7, 7), x=FP16, output=FP32, residual=BF16),
    Case(shape=(5, 16, 11, 3), x=FP32, output=BF16, activation="relu", residual=FP16),
    Case(shape=(5, 16, 11, 3), x=BF16, activation="silu", forked=True),
    Case(shape=(7, 48, 13, 13), activation="hardswish", residual=FP16, forked=True),
    Case(shape=(3, 20, 9, 7), activation="relu6", residual=FP32),
    Case(shape=(3, 20, 9, 7), activation="hardswish"),
    Case(shape=(4, 32, 17, 3), mean=-100.0, std=1e-2, activation="silu"),
    Case(shape=(5, 1, 1, 1)),
]
LARGE = [
    Case(shape=(96, 64, 32, 32), x=FP16, activation="relu", residual=FP16, forked=True),
    Case(shape=(512, 512, 4, 4), x=FP16, activation="relu"),
    Case(shape=(37, 24, 29, 31), x=FP16, output=BF16, activation="silu", residual=BF16, forked=True),
    Case(shape=(3001, 13, 1, 1), output=FP16, activation="hardswish"),
    Case(shape=(64, 1152, 7, 7), x=BF16, activation="silu"),
    Case(shape=(64, 2048, 7, 7), x=FP16, output=FP32, activation="relu", residual=BF16, forked=True),
    Case(shape=(17, 144, 56, 56), x=FP16, activation="silu"),
    Case(shape=(64, 96, 31, 13), mean=1000.0),
]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(case, marks=pytest.mark.gpu) for case in LARGE)], ids=str)
def test_the_kernels_compute_what_fp64_does(case: Case) -> None:
    actual, exact = _run(case, exact=False), _run(case, exact=True)
    output = case.output or case.x
    # FP32 keeps mean and deviations to 2^-23 of the mean: this much of a standard deviation.
    arithmetic = 2.0**-19 + 2.0**-22 * abs(case.mean) / case.std
    # The gradients of two readers are summed in the output's dtype before anything else, as autograd does.
    summed = arithmetic + (2 * ROUNDING[output] if case.forked and case.residual else 0.0)
    allowed = {
        "y": (ROUNDING[output], arithmetic),
        "x": (ROUNDING[case.x], 4 * summed),
        "weight": (ROUNDING[FP32], 4 * summed),
        "bias": (ROUNDING[FP32], 4 * summed),
        "residual": (ROUNDING[case.residual or FP32], summed),
        "mean": (ROUNDING[FP32], 2.0**-21),
        "var": (ROUNDING[FP32], 2.0**-21 + 2.0**-21 * abs(case.mean) / case.std),
    }
    assert actual.keys() == exact.keys()
    for name, values in exact.items():
        assert_close(actual[name], values, *allowed[name])


def test_a_part_of_the_rows_far_from_the_rest_costs_no_accuracy() -> None:
    x = torch.randn(512, 16, 4, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:8] += 1e4  # the first tile is nothing like the others
    x = x.to(memory_format=torch.channels_last)
    weight, bias, running = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE), _running(16, momentum=1.0)
    batch_norm_act(x, weight, bias, running, eps=1e-5)
    exact = x.double().transpose(0, 1).flatten(1)
    assert_close(running.mean, exact.mean(1), 2.0**-20, 0.0)
    assert_close(running.var, exact.var(1), 2.0**-18, 0.0)


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_output_can_be_computed_again_and_not_a_number_is_passed_on(activation: Any) -> None:
    inputs, running = _inputs(Case(shape=(3, 12, 5, 4), x=FP16, output=FP32)), _running(12)
    x, parameters = inputs["x"].requires_grad_(), (inputs["weight"], inputs["bias"])
    how: dict[str, Any] = {"eps": 1e-5, "activation": activation, "output_dtype": FP32}
    y = batch_norm_act(x, *parameters, running, **how)
    again = recomputer(y)
    expected, after = y.detach().clone(), running.mean.clone()
    y.detach().zero_()
    assert torch.equal(again(), expected)
    assert torch.equal(running.mean, after)
    broken = x.detach().clone()
    broken[0, 3, 1, 1] = float("nan")
    y = batch_norm_act(broken, *parameters, running, **how)
    assert y[:, 3].isnan().all()
    assert y[:, :3].isfinite().all()


def test_outputs_that_hold_more_than_the_norm_cannot_be_computed_again() -> None:
    inputs, running = _inputs(Case(shape=(3, 12, 5, 4), x=FP32, residual=FP32)), _running(12)
    arguments = inputs["x"].requires_grad_(), inputs["weight"], inputs["bias"]
    with_residual = batch_norm_act(*arguments, running, eps=1e-5, residual=inputs["residual"])
    forked = batch_norm_act(*arguments, running, eps=1e-5, forked=True)
    for y in (with_residual, *forked, arguments[0], torch.relu(arguments[0])):
        assert recomputer(y) is None


def test_gradients_that_are_not_wanted_and_readers_without_a_gradient() -> None:
    inputs, running = _inputs(Case(residual=FP32)), _running(8)
    arguments = inputs["x"].requires_grad_(), inputs["weight"], inputs["bias"]
    how: dict[str, Any] = {"eps": 1e-5, "activation": "relu", "residual": inputs["residual"]}
    first, second = batch_norm_act(*arguments, running, forked=True, **how)
    assert first.data_ptr() == second.data_ptr()
    # what comes from a mean over pixels is expanded, not channels_last
    (gradient,) = torch.autograd.grad(second.mean((2, 3)).sum(), inputs["x"])
    uncounted = RunningStatistics(mean=running.mean, var=running.var)
    y = reference(*arguments, uncounted, **how)
    torch.testing.assert_close(gradient, torch.autograd.grad(y.mean((2, 3)).sum(), inputs["x"])[0])


@pytest.mark.gpu
def test_a_graph_replays_what_eager_computes_bit_for_bit() -> None:
    inputs, running = _inputs(Case(shape=(96, 64, 16, 16), x=FP16, residual=FP16)), _running(64)
    dy = inputs.pop("dy")
    x, weight, bias, _, residual = (tensor.requires_grad_() for tensor in inputs.values())

    def reset() -> None:
        running.mean.zero_()
        running.var.fill_(1.0)

    def step() -> tuple[Tensor, ...]:
        outputs = batch_norm_act(x, weight, bias, running, eps=1e-5, activation="relu", residual=residual, forked=True)
        y = batch_norm_act(outputs[0], weight, bias, running, eps=1e-5, activation="silu", residual=outputs[1])
        return (y.detach(), *torch.autograd.grad(y, [x, residual, weight, bias], dy), running.mean.clone())

    assert_replays(step, reset)


def test_the_reference_is_batch_norm_sum_and_activation() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, momentum=0.2)
    x, residual = torch.randn(2, 4, 6, 5, 5)
    running = RunningStatistics(mean=torch.zeros(6), var=torch.ones(6), num_batches=torch.tensor(0), momentum=0.2)
    arguments: dict[str, Any] = {"eps": norm.eps, "activation": "relu", "residual": residual}
    y = reference(x, norm.weight, norm.bias, running, **arguments)
    torch.testing.assert_close(y, torch.relu(norm(x) + residual))
    torch.testing.assert_close(running.mean, norm.running_mean)
    torch.testing.assert_close(running.var, norm.running_var)
    assert running.num_batches == norm.num_batches_tracked == 1
