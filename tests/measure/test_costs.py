from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import BF16, FP16, FP32, ConvNet, Limited, gradients, images, mlp, same, values
from tests.measure.build import read, sensors_of
from tests.measure.curvature_models import AttentionNet, RecurrentNet, TokenNet, sequences, tokens
from triaccel_ray.apply.precision import LayerPrecision, supported_precisions
from triaccel_ray.layers import find_layers
from triaccel_ray.measure.costs import CostMeasurement, measure_costs
from triaccel_ray.plan import FaultKind, Precision
from triaccel_ray.random_states import random_states
from triaccel_ray.signals import LayerCost

SLOW_MS = 40.0


class Watching(nn.Module):
    """An activation that remembers what it was given, takes its time, and refuses a dtype."""

    def __init__(self, *, slow: bool = False, refuses: torch.dtype | None = None) -> None:
        super().__init__()
        self.slow, self.refuses = slow, refuses
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs)
        if inputs.dtype is self.refuses:
            raise RuntimeError(f"no {inputs.dtype} here")
        if self.slow:
            time.sleep(SLOW_MS / 1e3)
        return inputs * 2.0


class Timid(nn.Linear):
    """A layer that raises when it is called for a gradient of its input."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(8, 8)
        self.error = error

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.requires_grad:
            raise self.error("not alone")
        return super().forward(inputs)


def measured(model: nn.Module, inputs: Any, **options: Any) -> CostMeasurement:
    layers = find_layers(model)
    device = next(model.parameters()).device
    return measure_costs(
        model,
        layers,
        inputs,
        {layer.name: supported_precisions(layer, device, offer_emulated=True) for layer in layers},
        **options,
    )


def costs(model: nn.Module, inputs: Any) -> dict[str, LayerCost]:
    result = measured(model, inputs)
    assert result.costs is not None
    assert result.faults == ()
    return {cost.name: cost for cost in result.costs}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (mlp(), torch.randn(6, 8)),
        (ConvNet(), images(6)[0]),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True)), images(6)[0]),
        (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5, inplace=True)), torch.randn(6, 8)),
        (AttentionNet(), sequences().float()),
        (TokenNet(), tokens()),
        (RecurrentNet(), sequences().float()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_every_layer_has_its_cost_in_every_precision_and_nothing_else_changes(model: nn.Module, inputs: Tensor) -> None:
    model.eval()
    next(model.children()).train()
    model(inputs).sum().backward()
    before, grads, flags = values(model), gradients(model), [module.training for module in model.modules()]
    parameters, states = list(model.parameters()), random_states()
    found = costs(model, inputs)
    assert list(found) == [layer.name for layer in find_layers(model)]
    for layer in find_layers(model):
        assert tuple(found[layer.name].compute_ms) == supported_precisions(
            layer, torch.device("cpu"), offer_emulated=True
        )
        assert all(ms > 0.0 for ms in found[layer.name].compute_ms.values())
        assert found[layer.name].border_ms >= 0.0
    assert same(values(model), before)
    assert same(gradients(model), grads)
    assert all(now is old for now, old in zip(model.parameters(), parameters, strict=True))
    assert [module.training for module in model.modules()] == flags
    assert same(random_states(), states)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_order_is_that_of_the_model_and_an_idle_layer_is_left_out() -> None:
    model = nn.ModuleDict({"b": nn.Linear(8, 8), "idle": nn.Linear(8, 8), "a": nn.Linear(8, 8)})
    model.forward = lambda inputs: model["b"](model["a"](inputs))  # type: ignore[method-assign]
    assert list(costs(model, torch.randn(4, 8))) == ["b", "a"]


def test_modules_run_in_each_precision_in_the_memory_format_they_had() -> None:
    watching, norm = Watching(), nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm, watching).to(memory_format=torch.channels_last)
    costs(model, images(6)[0].expand(6, 1, 4, 4).contiguous(memory_format=torch.channels_last))
    assert {tensor.dtype for tensor in watching.seen} == {torch.float16, torch.bfloat16, torch.float32}
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in watching.seen)
    assert {tuple(tensor.shape) for tensor in watching.seen} == {(6, 4, 4, 4)}
    assert norm.weight.dtype is torch.float32


def test_what_follows_a_layer_counts_to_it_and_several_calls_add_up() -> None:
    slow, other = Watching(slow=True), nn.Linear(8, 8)
    found = costs(nn.Sequential(slow, nn.Linear(8, 8), slow, slow, other), torch.randn(4, 8))
    assert set(found) == {"1", "4"}
    assert min(found["1"].compute_ms.values()) >= 2 * SLOW_MS
    assert max(found["4"].compute_ms.values()) < SLOW_MS


def test_a_layer_called_again_counts_again() -> None:
    class Twice(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            time.sleep(SLOW_MS / 1e3)
            return super().forward(inputs)

    layer = Twice(8, 8)
    found = costs(nn.Sequential(nn.Linear(8, 8), layer, layer), torch.randn(4, 8))
    assert min(found["1"].compute_ms.values()) >= 2 * SLOW_MS


def test_what_fails_in_one_precision_tilts_no_comparison() -> None:
    found = costs(nn.Sequential(nn.Linear(8, 8), Watching(slow=True, refuses=torch.float16)), torch.randn(4, 8))
    assert set(found["0"].compute_ms) == set(Precision)
    assert max(found["0"].compute_ms.values()) < SLOW_MS


def test_a_layer_that_cannot_run_alone_has_a_border_and_no_times() -> None:
    found = costs(nn.Sequential(nn.Linear(8, 8), Timid(ValueError), nn.Linear(8, 8)), torch.randn(4, 8))
    assert [set(cost.compute_ms) for cost in found.values()] == [set(Precision), set(), set(Precision)]
    assert found["1"].border_ms > 0.0


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    model = nn.Sequential(Timid(ValueError), nn.Linear(8, 8))
    assert set(costs(model, torch.randn(4, 8))["0"].compute_ms) == set(Precision)


def test_a_border_before_an_embedding_costs_nothing() -> None:
    assert costs(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8)), tokens())["0"].border_ms == 0.0


def test_buffers_replaced_and_chance_drawn_by_a_layer_are_put_back() -> None:
    class Restless(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls = self.calls + 1.0 + random.random()
            return super().forward(inputs) * torch.rand(())

    model = nn.Sequential(Restless())
    buffer, states = model[0].calls, random_states()
    costs(model, torch.randn(4, 8))
    assert model[0].calls is buffer
    assert buffer.item() == 0.0
    assert same(random_states()["python"], states["python"])


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), Limited(3), nn.Linear(8, 8)),
        nn.Sequential(nn.Linear(8, 8), Timid(torch.OutOfMemoryError)),
        nn.Sequential(nn.Linear(8, 8), Timid(MemoryError)),
    ],
)
def test_out_of_memory_is_a_fault_and_no_figure(model: nn.Module) -> None:
    before, flags = values(model), [module.training for module in model.modules()]
    result = measured(model, torch.randn(4, 8), step=7)
    assert result.costs is None
    (fault,) = result.faults
    assert (fault.kind, fault.step, fault.phase) == (FaultKind.OUT_OF_MEMORY, 7, "costs")
    assert (fault.batch_size, fault.detail) in [(0, "no room for more samples"), (0, "not alone")]
    assert same(values(model), before)
    assert [module.training for module in model.modules()] == flags


def test_a_model_that_fails_by_itself_fails_here() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        measured(mlp(), torch.randn(4, 3))


def test_precision_is_that_of_the_layers_under_a_plan_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Watching())
    precision = LayerPrecision(model, find_layers(model))
    precision.set({"0": BF16})
    with precision.suspended():
        costs(model, torch.randn(4, 8))
    assert {tensor.dtype for tensor in model[1].seen} == {torch.float16, torch.bfloat16, torch.float32}


COSTS = (LayerCost(name="0", compute_ms={FP16: 0.5, FP32: 1.0}, border_ms=0.25),)


def test_costs_are_read_once_and_survive_a_checkpoint() -> None:
    sensors, restored = sensors_of(), sensors_of()
    sensors.record_costs(COSTS)
    restored.load_state_dict(sensors.state_dict())
    assert read(sensors).costs == read(restored).costs == COSTS
    assert read(sensors).costs is None


@pytest.mark.gpu
def test_on_a_gpu_low_precision_saves_and_a_border_costs_its_bytes() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)).cuda()
    inputs = torch.randn(256, 64, 32, 32, device="cuda")
    measured(model, inputs)  # the libraries' first use
    before = random_states()
    began = time.perf_counter()
    found = costs(model.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last))
    assert time.perf_counter() - began < 1.0
    for cost in found.values():
        assert cost.compute_ms[FP16] < cost.compute_ms[FP32]
    least_ms = 2 * inputs.numel() * (4 + 2) / 10e12 * 1e3  # there and back, at more than any GPU's bandwidth
    assert least_ms < found["1"].border_ms < 20 * least_ms
    assert found["0"].border_ms < found["1"].border_ms
    assert same(random_states()["cuda"], before["cuda"])
