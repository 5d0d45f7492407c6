from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.build import ONE, Starved, blobs, collected, cross_entropy, mlp, same, values
from triaccel_ray.apply.optimizer import LayerwiseOptimizer
from triaccel_ray.model.layers import find_layers

FINE, OVERFLOW = torch.tensor(0.0), torch.tensor(1.0)
SCALES = {"0": 0.5, "2": 0.25, "4": 1.0}
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=False),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd plain": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.0),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
EVERY = pytest.mark.parametrize("kind", OPTIMIZERS)


def layerwise(model: nn.Module, kind: str) -> LayerwiseOptimizer:
    return LayerwiseOptimizer(OPTIMIZERS[kind](model.parameters()), find_layers(model))


def step(
    optimizer: Any, model: nn.Module, lr: float = 1.0, scales: Any = (), found: Any = FINE, by: Any = None
) -> None:
    optimizer.set_rates(lr, dict(scales), {})
    optimizer.update(collected(model), divisor=by, found_nonfinite=found)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    inputs, targets = blobs(16, seed=seed)
    model.zero_grad()
    (cross_entropy(model(inputs), targets) * factor).backward()


def moments_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of the state in parameter order, without the buffers that are there ahead of time and still zero."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    tensors = [{name: torch.as_tensor(value) for name, value in state.items()} for state in states]
    return [{name: tensor.clone() for name, tensor in each.items() if tensor.any()} for each in tensors]


@EVERY
def test_without_scales_it_is_the_users_optimizer_bit_for_bit_the_loss_scale_divided_out(kind: str) -> None:
    model, reference = mlp(), mlp()
    optimizer, plain = layerwise(model, kind), OPTIMIZERS[kind](reference.parameters())
    for seed, factor in enumerate([1.0, 1024.0, 1.0, 2048.0]):
        backward(model, seed, factor=factor)
        backward(reference, seed)
        step(optimizer, model, by=torch.tensor(factor) if factor > 1.0 else None)
        plain.step()
    assert same(values(model), values(reference))
    assert same(moments_of(optimizer.optimizer), moments_of(plain))


@EVERY
def test_each_layer_moves_by_its_scale_times_the_plain_update(kind: str) -> None:
    model, reference = mlp(), mlp()
    optimizer = layerwise(model, kind)
    backward(model, 0)
    backward(reference, 0)
    before = values(model)
    step(optimizer, model, 0.5, SCALES)
    OPTIMIZERS[kind](reference.parameters()).step()
    after, plain = values(model), values(reference)
    for name in before:
        layer, kind_of_parameter = name.split(".")
        scale = 0.5 * (SCALES[layer] if kind_of_parameter == "weight" else 1.0)
        expected = scale * (plain[name] - before[name])
        # Both updates are rounded once when they are added to weights no larger than one.
        torch.testing.assert_close(after[name] - before[name], expected, rtol=1e-5, atol=2.0**-23)


class CountingSGD(torch.optim.SGD):
    """Keeps state in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
        return super().step(closure)


def test_the_users_groups_and_scheduler_never_see_the_scales() -> None:
    model = mlp()
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    user = CountingSGD([{"params": first, "weight_decay": 0.1, "lr": 0.3}, {"params": rest}], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(user, step_size=1, gamma=0.5)
    optimizer, groups = LayerwiseOptimizer(user, find_layers(model)), user.param_groups
    assert optimizer.parameters == list(model.parameters())
    for index in range(3):
        backward(model, 0)
        step(optimizer, model, 0.3, SCALES)
        assert user.param_groups is groups
        seen = [(group["lr"], group["weight_decay"], group["num_steps"], len(group["params"])) for group in groups]
        assert seen == [(0.3 * 0.5**index, 0.1, index + 1, 2), (0.1 * 0.5**index, 0, index + 1, 4)]
        scheduler.step()


@EVERY
def test_an_overflow_changes_neither_weights_nor_moments_not_even_at_the_first_step(kind: str) -> None:
    model, fresh = mlp(), mlp()
    optimizer, other = layerwise(model, kind), layerwise(fresh, kind)
    before = values(model)
    backward(model, 0, factor=float("nan"))
    step(optimizer, model, 1.0, SCALES, OVERFLOW, ONE)
    assert same(values(model), before)
    assert all(not state for state in moments_of(optimizer.optimizer))
    for seed in (1, 2):
        for net, each in ((model, optimizer), (fresh, other)):
            backward(net, seed)
            step(each, net, 1.0, SCALES, FINE, ONE)
    kept = values(model), moments_of(optimizer.optimizer)
    assert same(kept, (values(fresh), moments_of(other.optimizer)))
    backward(model, 3, factor=float("inf"))
    step(optimizer, model, found=OVERFLOW, by=ONE)
    assert same((values(model), moments_of(optimizer.optimizer)), kept)


class Wrapping(torch.optim.Optimizer):
    """Steps its parameters by other optimizers, with which it shares the groups."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.each = [*inner.values()] if isinstance(inner, dict) else inner if isinstance(inner, list) else [inner]
        groups = [group for optimizer in self.each for group in optimizer.param_groups]
        super().__init__(groups, {})
        if not isinstance(inner, list | dict):
            self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        for optimizer in self.each:
            optimizer.step()


WRAPPERS: dict[str, Any] = {
    "one": lambda make, first, rest: Wrapping(make([*first, *rest])),
    "list": lambda make, first, rest: Wrapping([make(first), make(rest)]),
    "dict": lambda make, first, rest: Wrapping({"first": make(first), "rest": make(rest)}),
    "nested": lambda make, first, rest: Wrapping([Wrapping(make(first)), make(rest)]),
}


@EVERY
@pytest.mark.parametrize("how", WRAPPERS)
def test_an_optimizer_that_wraps_others_steps_as_they_do_alone(kind: str, how: str) -> None:
    model, reference = mlp(), mlp()
    parameters = list(model.parameters())
    user = WRAPPERS[how](OPTIMIZERS[kind], parameters[:3], parameters[3:])
    optimizer, plain = LayerwiseOptimizer(user, find_layers(model)), layerwise(reference, kind)
    groups = [each.param_groups for each in (user, *user.each)]
    for seed, found in enumerate([FINE, OVERFLOW, FINE]):
        for net, each in ((model, optimizer), (reference, plain)):
            backward(net, seed)
            step(each, net, 0.5, SCALES, found)
        assert same(values(model), values(reference))
    assert all(each.param_groups is own for each, own in zip((user, *user.each), groups, strict=True))
    assert {group["lr"] for own in groups for group in own} == {plain.optimizer.param_groups[0]["lr"]}


def test_a_wrapper_keeps_what_its_optimizers_write_to_their_groups_and_leaves_other_optimizers_alone() -> None:
    model, other = mlp(), mlp()
    counting = CountingSGD(model.parameters(), lr=0.1)
    user = Wrapping(counting)
    user.of_another_model = CountingSGD(other.parameters(), lr=0.1)
    user._step_supports_amp_scaling = True  # as a wrapper that passes on all attributes says
    optimizer = LayerwiseOptimizer(user, find_layers(model))
    assert optimizer.waits_for_host  # the wrapped one would not skip
    for _ in range(2):
        backward(model, 0)
        step(optimizer, model, scales=SCALES)
    assert counting.param_groups[0]["num_steps"] == 2
    assert optimizer._optimizers == [user, counting]


class StarvedInState(torch.optim.SGD):
    """Finds no memory once it has written to its state."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("sum", torch.zeros(())).add_(1.0)
        raise torch.OutOfMemoryError("no room for the step")


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: Starved(parameters, writes_first=True),
        lambda parameters: Wrapping(StarvedInState(parameters, lr=0.1)),
    ],
    ids=["to a parameter", "to the state of a wrapped optimizer"],
)
def test_a_step_without_memory_that_has_written_something_is_not_made_again(make: Make) -> None:
    model = mlp()
    user = make(model.parameters())
    optimizer, groups = LayerwiseOptimizer(user, find_layers(model)), user.param_groups
    backward(model, 0)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        step(optimizer, model, scales=SCALES)
    assert all(state["sum"] == 1.0 for each in getattr(user, "each", []) for state in each.state.values())
    assert user.param_groups is groups
    assert optimizer.take_faults(step=1, batch_size=8) == []


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_parameters_that_come_or_change_after_the_loop_was_built_are_refused(kind: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1)
    stepped = LayerwiseOptimizer(optimizer, find_layers(model))
    stepped.set_rates(1.0, {}, {})
    first = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["params"][0] = nn.Parameter(first.detach().clone())
    with pytest.raises(ValueError, match="other parameters than when the control loop was built: build another loop"):
        stepped.set_rates(1.0, {}, {})
    optimizer.param_groups[0]["params"][0] = first
    stepped.set_rates(1.0, {}, {})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="other parameters than when the control loop was built"):
        stepped.set_rates(1.0, {}, {})
