"""The fused step through the kernels' reference, which runs on a CPU, against PyTorch's own optimizers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.apply import test_split_weights
from tests.build import cross_entropy, images
from triaccel_ray.apply.fused_optimizer import is_supported, without_kernel_because
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import FaultKind

FINE = torch.tensor(0.0)
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    **test_split_weights.OPTIMIZERS,
}
EVERY = pytest.mark.parametrize("kind", OPTIMIZERS)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and the rest apart, as recipes have them."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def network() -> nn.Module:
    return test_split_weights.network().to(memory_format=torch.channels_last)


class Pair:
    """A model stepped by the kernels' reference, and its twin by PyTorch."""

    def __init__(self, kind: str) -> None:
        self.model, self.twin = network(), network()
        self.optimizer = OPTIMIZERS[kind](groups_of(self.model))
        self.plain = OPTIMIZERS[kind](groups_of(self.twin))
        self.stepped = LayerwiseOptimizer(self.optimizer, find_layers(self.model))
        test_split_weights.step_by_kernels(self.stepped)
        self.gradients = Gradients(self.stepped.watched)

    def backward(self, seed: int, factor: float = 1.0) -> None:
        for model in (self.model, self.twin):
            torch.manual_seed(seed)
            model.zero_grad()
            inputs, targets = images(8, seed=seed)
            scale = factor if model is self.model else 1.0
            (nn.functional.cross_entropy(model(inputs), targets) * scale).backward()

    def step(self, *, lr: float = 1.0, scales: dict[str, float] | None = None, factor: float = 1.0) -> None:
        self.stepped.set_rates(lr, scales or {}, {})
        self.gradients.collect({}, {})
        self.gradients.publish()
        self.stepped.update(self.gradients, divisor=torch.tensor(factor), found_nonfinite=FINE)

    def assert_close(self) -> None:
        for mine, theirs in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@EVERY
def test_it_steps_as_pytorch_does_at_rates_of_schedule_group_and_layer_and_keeps_the_optimizers_state(
    kind: str,
) -> None:
    pair = Pair(kind)
    name = find_layers(pair.model)[0].name
    scaled = pair.twin.get_submodule(name).weight
    weights, others = groups_of(pair.twin)
    weights["params"] = [p for p in weights["params"] if p is not scaled]
    plain = OPTIMIZERS[kind]([{"params": [scaled]}, weights, others])
    base = plain.param_groups[0]["lr"]
    for seed, factor in enumerate([1.0, 0.5, 0.5, 0.5]):
        if seed == 2:
            pair.optimizer.param_groups[0]["lr"] = 3 * base
        pair.backward(seed, factor=2.0**10)
        pair.step(lr=factor, scales={name: 0.25}, factor=2.0**10)
        group_lr = base if seed < 2 else 3 * base
        for group, lr in zip(plain.param_groups, (group_lr * 0.25, group_lr, base), strict=True):
            group["lr"] = lr * factor
        plain.step()
        pair.assert_close()
    for mine, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        expected = {what: value for what, value in plain.state[theirs].items() if value is not None}
        torch.testing.assert_close(dict(pair.optimizer.state[mine]), expected, rtol=1e-5, atol=1e-6)


class OwnRule(torch.optim.SGD):
    """Whatever a subclass steps by, the kernels do not know it."""


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


UNKNOWN = {
    "another rule": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "a rule of its own": lambda p: OwnRule(p, lr=0.1),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "differentiable": lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "steps counted on the host": lambda p: torch.optim.AdamW(p, foreach=True),
    "a hook before": hooked,
    "no FP32": lambda p: torch.optim.SGD([each.detach().bfloat16() for each in p], lr=0.1),
}


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *UNKNOWN])
def test_what_the_kernels_would_step_otherwise_is_left_to_the_optimizer_and_all_on_a_cpu(kind: str) -> None:
    optimizer = {**OPTIMIZERS, **UNKNOWN}[kind](network().parameters())
    assert bool(without_kernel_because(optimizer)) == (kind in UNKNOWN)
    assert not is_supported(optimizer)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weights", "split"), ("step_in_backward", True), ("optimizer_state", "8bit"), ("shard_optimizer", True)],
)
def test_a_setting_that_needs_a_kernel_refuses_another_optimizer_with_the_way_out(name: str, value: Any) -> None:
    model, plain = network(), test_split_weights.FIXED
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    message = f"{name} = {value!r}: needs SGD, or Adam or AdamW .* RMSprop, or give {name}={getattr(plain, name)!r}"
    with pytest.raises(ValueError, match=message):
        ControlLoop(model, optimizer, cross_entropy, images(40), config=replace(plain, **{name: value}))


FIRED: list[Any] = []
CHANGES: dict[str, tuple[str, Any, str]] = {
    "hook": ("adamw", lambda o: o.register_step_post_hook(lambda *_: FIRED.append(o)), "step hooks"),
    "dampening": ("momentum", lambda o: o.param_groups[0].update(dampening=0.5), "dampening = 0.5"),
    "tensor": ("adamw", lambda o: o.param_groups[0].update(lr=torch.tensor(0.01)), "learning rate in a tensor"),
    "unfused": ("adam", lambda o: o.param_groups[0].update(fused=None), "neither fused nor capturable"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_left_to_the_optimizer_from_then_on(change: str) -> None:
    kind, make, reason = CHANGES[change]
    pair = Pair(kind)
    for seed in range(5):
        if seed == 2:
            make(pair.optimizer)
            make(pair.plain)
        pair.backward(seed)
        pair.step()
        found = pair.stepped.take_faults(step=seed, batch_size=8)
        assert len(found) == (seed == 2)
        assert all(fault.kind is FaultKind.CAPTURE_FAILED and reason in fault.detail for fault in found)
        assert pair.stepped.is_capturable == (seed < 2)
        pair.plain.step()
        pair.assert_close()
    assert FIRED.count(pair.optimizer) == (3 if change == "hook" else 0)
