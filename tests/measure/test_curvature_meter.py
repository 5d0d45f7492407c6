import contextlib
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import Limited, Wired
from tests.measure.curvature_models import (
    CASES,
    FALLBACK,
    METHODS,
    NUM_CLASSES,
    Bilinear,
    assert_blocks,
    directly,
    draws,
    make,
    meter_of,
)
from tests.waiting import no_waiting
from triaccel_ray.measure import budget
from triaccel_ray.measure.budget import Limits, Probe
from triaccel_ray.measure.curvature import meter as meter_module
from triaccel_ray.measure.curvature.meter import CurvatureMeter, Stage
from triaccel_ray.measure.curvature.objective import tensor_cores


@pytest.mark.parametrize("method", ["fisher", "ggn"])
@pytest.mark.parametrize("name", CASES)
def test_later_measurements_are_as_good_as_the_first(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    meter = meter_of(model, method)
    for _ in range(3):
        found, expected = meter.measure(inputs, targets, draws()), directly(model, inputs, targets, method)
        torch.testing.assert_close((found.eigenvalues, found.noise), (expected.eigenvalues, expected.noise))
        assert tuple(found.fallbacks) == FALLBACK.get(name, ())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        inputs = inputs.flip(0)
    assert not meter.is_captured
    assert meter.not_captured_because == "there is no CUDA device"


class Moody(nn.Module):
    """Takes another course when told to, with the same shapes, and then does not work under `torch.func`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.is_swapped = False

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first, self.second]
        for part in reversed(parts) if self.is_swapped else parts:
            x = torch.tanh(part(x))
        return -x if self.is_swapped and bool((x > 1e9).any()) else x


@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_a_model_that_takes_another_course_is_looked_at_anew(method: Any) -> None:
    body = Moody()
    model = nn.Sequential(body, Bilinear()).double()
    inputs, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(NUM_CLASSES, (6,))
    meter = meter_of(model, method)
    for is_swapped in (False, True, True, False):
        body.is_swapped = is_swapped
        found = meter.measure(inputs, targets, draws())
        torch.testing.assert_close(found.eigenvalues, directly(model, inputs, targets, method).eigenvalues)
        assert tuple(found.fallbacks) == (("1",) if is_swapped else ())


class Routing(nn.Module):
    """Sends each sample to one of two experts, and calls only those that have any."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)), nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros_like(x)
        for expert, is_theirs in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if is_theirs.any():
                hidden = hidden.index_put((is_theirs.nonzero()[:, 0],), torch.tanh(expert(x[is_theirs])))
        return self.head(hidden)


@pytest.mark.parametrize("signs", [(1, 1, 1, -1, -1, 1), (1, -1, 1, -1, -1, 1), (-1, -1, -1, -1, 1, -1)])
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_a_course_that_depends_on_the_samples_is_measured_sample_by_sample(method: Any, signs: Any) -> None:
    model = Routing().double()
    inputs, targets = torch.randn(6, 5, dtype=torch.float64), torch.randint(NUM_CLASSES, (6,))
    inputs[:, 0] = inputs[:, 0].abs() * torch.tensor(signs)
    meter = meter_of(model, method, top_k=3)
    for _ in range(2):
        found = meter.measure(inputs, targets, draws())
        assert_blocks(found, model, inputs, targets, method)
    assert set(found.fallbacks) >= {"experts.0", "experts.1"}


class _Doubling(torch.autograd.Function):
    """Has no batching rule for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if bool((gradient > 1e9).any()):
            raise ArithmeticError
        return 2 * gradient


def test_columns_pass_one_by_one_where_they_cannot_pass_side_by_side() -> None:
    model, inputs, targets = make("convolutions")
    plain = directly(model, inputs, targets, "ggn").eigenvalues
    model.register_forward_hook(lambda module, args, output: _Doubling.apply(output / 2))
    meter = meter_of(model, "ggn")
    for _ in range(2):
        found = meter.measure(inputs, targets, draws())
        torch.testing.assert_close(found.eigenvalues, plain)
        assert not found.fallbacks


def test_a_layer_that_had_no_curvature_is_found_when_it_has() -> None:
    model, inputs, targets = make("convolutions")
    meter = meter_of(model, "hessian", top_k=1)
    with torch.no_grad():
        saved = model[10].weight.clone()
        model[10].weight.zero_()
    first = meter.measure(inputs, targets, draws()).eigenvalues
    assert first[0] == 0.0
    with torch.no_grad():
        model[10].weight.fill_(math.nan)
    assert meter.measure(inputs, targets, draws()).eigenvalues[0].isnan().all()
    with torch.no_grad():
        model[10].weight.copy_(saved)
    for _ in range(8):
        found = meter.measure(inputs, targets, draws()).eigenvalues
    expected = directly(model, inputs, targets, "hessian", 1, num_iterations=40).eigenvalues
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def fp32_flags() -> list[Any]:
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return [torch.backends.cuda.matmul.fp32_precision, conv.fp32_precision, torch.backends.cuda.matmul.allow_tf32]


def test_flags_are_as_before_after_an_error_with_tensor_cores() -> None:
    before = fp32_flags()
    with contextlib.suppress(LookupError), tensor_cores():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        raise LookupError
    assert fp32_flags() == before


def largest_batch(model: nn.Module) -> list[int]:
    """The largest batch that has passed through the model, as it grows."""
    seen = [0]
    model.register_forward_hook(lambda module, args, output: seen.append(max(seen[-1], len(output))))
    return seen


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["tied_tokens", "foreign"])
def test_a_budget_has_samples_pass_in_chunks(name: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(self: Any, objective: Any) -> Probe:
        self._measure_apart(objective)
        return Probe(num_samples=objective.num_samples, num_bytes=1000 * objective.num_samples)

    monkeypatch.setattr(budget, "_MIN_BUDGET", 0)
    monkeypatch.setattr(CurvatureMeter, "_probe", probe)  # which measures on a GPU alone
    model, inputs, targets = make(name)
    meter, free, seen = meter_of(model, method), meter_of(model, method), largest_batch(model)
    whole = free.measure(inputs, targets, draws(), budget_bytes=2**33)  # with room for all
    assert seen[-1] == len(inputs)
    seen[:] = [0]
    found = meter.measure(inputs, targets, draws(), budget_bytes=4500)
    assert seen[-1] <= 4  # the probe's
    torch.testing.assert_close(found.eigenvalues, whole.eigenvalues, rtol=1e-6, atol=1e-9)
    seen[:] = [0]
    again = meter.measure(inputs, targets, draws(), budget_bytes=2**40)
    assert 1 <= seen[-1] < 4  # what was decided stays
    if method != "hessian":  # which goes on from its vectors
        torch.testing.assert_close(again.eigenvalues, whole.eigenvalues, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("chunk_samples", "kept_bytes"), [(None, 2**30), (4, 2**30), (2, 2000)])
def test_passes_are_counted_before_they_are_made(method: Any, chunk_samples: int | None, kept_bytes: int) -> None:
    model, inputs, targets = make("convolutions")
    meter, passed = meter_of(model, method), [0]
    meter.dry_run(inputs[:2], targets[:2])
    meter._limits = Limits(chunk_samples=chunk_samples, kept_bytes=kept_bytes)
    objective = meter._objective(inputs, targets)
    expected = meter._method.num_passes(objective)
    model.register_forward_hook(lambda module, args, output: passed.append(passed[-1] + 1))
    meter._method.measure(objective, draws())
    if method == "hessian" and chunk_samples is None:
        assert (passed[-1], expected) == (1, 20)  # one graph serves all iterations, each of which passes backwards
    else:
        assert passed[-1] == expected
    if (chunk_samples, method) == (2, "fisher"):
        assert expected > 2 * len(objective.parts()) > 2


def test_a_single_sample_is_probed_after_memory_ran_out_for_two() -> None:
    model, inputs, targets = make("smooth")
    limited = nn.Sequential(model, Limited(1))
    meter, seen = meter_of(limited, "fisher"), largest_batch(model)
    meter.dry_run(inputs[:2], targets[:2])
    assert not meter.off_because
    seen[:] = [0]
    meter.prepare(inputs, targets, budget_bytes=2**30)
    assert seen[-1] == 1


class Saved:
    """A tensor that a graph holds for its backward pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def most_saved(run: Callable[[], Any]) -> int:
    """Returns the most bytes that graphs hold at once."""
    sizes = [0]

    def pack(tensor: Tensor) -> Saved:
        saved, size = Saved(tensor.detach()), tensor.nbytes
        sizes.append(sizes[-1] + size)
        weakref.finalize(saved, lambda: sizes.append(sizes[-1] - size))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        run()
    return max(sizes)


@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_the_dry_run_holds_the_graph_of_two_samples_at_most(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    meter = meter_of(model, method)
    of_two = most_saved(lambda: F.cross_entropy(model(inputs[:2]), targets[:2]))
    assert most_saved(lambda: meter.dry_run(inputs[:2], targets[:2])) < 1.2 * of_two
    assert not meter.off_because


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_needs_a_batch_passes_the_dry_run(method: Any) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets.clamp(0, 1))  # refuses other shapes

    squeeze = Wired(lambda self, x: x.squeeze())
    meter = meter_of(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1), squeeze), method, loss=loss)
    meter.dry_run(torch.randn(2, 5), torch.randn(2))
    assert not meter.off_because


@pytest.mark.parametrize("method", METHODS)
def test_too_many_passes_are_not_captured(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "_MAX_CAPTURED_PASSES", 2)
    model, inputs, targets = make("convolutions")
    meter = meter_of(model, method)
    meter._stage, meter._limits = Stage.WATCH, Limits(chunk_samples=2)
    meter._measure_eagerly(meter._objective(inputs, targets), draws())
    assert "passes of the model would take too much memory" in meter.not_captured_because


def test_memory_that_runs_out_halves_what_passes_at_once() -> None:
    model, inputs, targets = make("smooth")
    expected = directly(model, inputs, targets).eigenvalues
    limited = nn.Sequential(model, Limited(2))
    meter, seen = meter_of(limited, "fisher"), largest_batch(model)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            meter.measure(inputs, targets, draws())
    assert seen[-1] == len(inputs)
    seen[:] = [0]
    torch.testing.assert_close(meter.measure(inputs, targets, draws()).eigenvalues, expected)
    assert seen[-1] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_the_host_does_not_wait(method: Any) -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    meter = meter_of(model, method, top_k=20, device="cuda")
    generator = draws("cuda")
    for _ in range(3):
        meter.measure(inputs, targets, generator)
    assert meter.is_captured, meter.not_captured_because
    with no_waiting():
        estimate = meter.measure(inputs, targets, generator)
    assert estimate.eigenvalues.isfinite().any(dim=1).all()


@pytest.mark.gpu
def test_what_waits_for_the_device_stays_eager_and_says_so() -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    model.register_forward_hook(lambda module, args, output: output * float(output.sum().item() > -math.inf))
    meter, before = meter_of(model, "fisher", device="cuda"), fp32_flags()
    for _ in range(3):
        found = meter.measure(inputs, targets, draws("cuda")).eigenvalues
    assert not meter.is_captured
    assert "the host waits for the device" in meter.not_captured_because
    torch.testing.assert_close(found, directly(model, inputs, targets).eigenvalues, rtol=1e-2, atol=1e-6)
    assert fp32_flags() == before


@pytest.mark.gpu
def test_a_large_model_is_measured_within_the_budget_and_in_the_time_that_was_told() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
    model = nn.Sequential(*blocks).cuda()
    inputs, targets = torch.randn(32, 512, 1024, device="cuda"), torch.randn(32, 512, 1024, device="cuda")
    meter = meter_of(model, "fisher", loss=F.mse_loss, device="cuda")
    meter.dry_run(inputs[:2], targets[:2])
    budget = meter._bytes_of_two - 1
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    seconds = meter.prepare(inputs, targets, budget_bytes=budget)
    assert seconds is not None
    began = time.perf_counter()
    meter.measure(inputs, targets, draws("cuda"))
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert torch.cuda.max_memory_allocated() - before < 1.1 * budget
    assert took / 4 < seconds < 4 * took
    assert "passes of the model" in meter.not_captured_because
