"""Steps from inside the backward pass when something goes wrong: NaN, want of memory, code that does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.apply.test_split_weights import IN_BF16, network, run
from tests.apply.test_step_in_backward import (
    EACH_KIND_OF_WEIGHTS,
    IN_FP32,
    IN_WORDS,
    _small_buckets,
    after,
    assert_same_trajectory,
    loop_of,
)
from tests.build import FP16, blobs, cross_entropy, mlp, nothing, same, values
from triaccel_ray.apply.step_in_backward import StepInBackward
from triaccel_ray.apply.weights import Weights
from triaccel_ray.config import ControlConfig, LossScaleConfig
from triaccel_ray.loop import ControlLoop

__all__ = ["_small_buckets"]  # a fixture that each test here uses


class Poisoned(nn.Module):
    """Passes its input on, and the gradient times a factor on the device."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.requires_grad:
            inputs.register_hook(lambda gradient: gradient * self.factor)
        return inputs


def assert_a_nan_stops_its_bucket_and_all_after_it(
    config: ControlConfig, device: str, num_steps: int, execution: Any
) -> ControlLoop:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), Poisoned(), nn.ReLU(), nn.Linear(16, 4))
    data = tuple(tensor.to(device) for tensor in blobs(64))
    loop = loop_of(model.to(device), replace(config, every_steps=100, execution=execution), data=data)
    run(loop, num_steps)
    before, loss = values(model), loop.epoch_loss.clone()
    state = {name: loop.optimizer.optimizer.state[p]["step"].clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.get_buffer("3.factor").fill_(float("nan"))
    loop.step()
    now = values(model)
    # The gradient passes from the last layer to the first: 5 has stepped before the NaN appeared.
    changed = {name for name in now if name != "3.factor" and not torch.equal(now[name], before[name])}
    assert changed == {"5.weight", "5.bias"}
    step_of = {name: loop.optimizer.optimizer.state[p]["step"] for name, p in model.named_parameters()}
    assert {name for name, step in step_of.items() if step != state[name]} == {"5.weight", "5.bias"}
    assert loop.num_skipped == 1
    assert torch.equal(loop.epoch_loss, loss)
    with torch.no_grad():
        model.get_buffer("3.factor").fill_(1.0)
    loop.step()  # nothing of it is left
    after_it = values(model)
    assert all(not torch.equal(after_it[name], now[name]) for name in now)
    assert loop.num_skipped == 1
    return loop


@EACH_KIND_OF_WEIGHTS
def test_a_nan_stops_its_bucket_and_all_after_it_and_the_step_counts_as_skipped(config: ControlConfig) -> None:
    assert_a_nan_stops_its_bucket_and_all_after_it(config, "cpu", 1, config.execution)


def test_an_overflow_halves_the_loss_scale_and_a_later_step_is_made() -> None:
    scale = LossScaleConfig(initial=2.0**24)
    config = replace(IN_WORDS, precision=replace(IN_BF16.precision, initial=FP16), loss_scale=scale, every_steps=100)
    models = network(), network()
    for model, each in zip(models, (config, after(config)), strict=True):
        loop = loop_of(model, each)
        before = values(model)
        run(loop, 20)
        assert 0 < loop.num_skipped < 20
        assert float(loop.loss_scale.factor(True)) == 2.0 ** (24 - loop.num_skipped)
        assert not torch.equal(values(model)["head.weight"], before["head.weight"])


@pytest.mark.parametrize("front", [False, True])
def test_a_batch_that_does_not_fit_is_tried_again_and_no_bucket_steps_twice(front: bool) -> None:
    model = nn.Sequential(LimitedBackward(6), mlp()) if front else nn.Sequential(mlp(), LimitedBackward(6))
    loop = loop_of(model, replace(IN_FP32, every_steps=100), data=blobs(64))
    loop.step()
    assert loop._training.steps.step.num_micro_batches == 2
    assert all(float(state["step"]) == 1.0 for state in loop.optimizer.optimizer.state.values())


class LimitedBackward(nn.Module):
    """Has memory for the gradients of `limit` samples; its own weight keeps a gradient flowing through it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.factor = limit, nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs * self.factor
        if outputs.requires_grad:
            outputs.register_hook(self._check)
        return outputs

    def _check(self, gradient: Tensor) -> None:
        if len(gradient) > self.limit:
            raise torch.OutOfMemoryError("no room for more gradients")


class Reentrant(nn.Module):
    """Passes twice through one layer, each time checkpointed in a backward pass of its own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry, self.shared, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=self.use_reentrant)
        outputs: Tensor = self.head(hidden)
        return outputs


def test_a_gradient_that_arrives_in_pieces_is_refused_with_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"arrives in several pieces.*use_reentrant=False, or give step_in_backward"):
        loop_of(Reentrant(True), IN_FP32, data=blobs(40)).step()
    assert_same_trajectory(lambda: Reentrant(False), IN_FP32, 3, data=blobs(40))


def test_a_backward_pass_of_the_users_own_is_left_alone_and_close_ends_it() -> None:
    model = mlp()
    loop = loop_of(model, IN_FP32, data=blobs(40))
    loop.step()
    inputs, targets = blobs(8)
    before = values(model)
    cross_entropy(model(inputs), targets).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert same(values(model), before)
    loop.close()
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


def test_an_optimizer_that_the_kernels_cannot_step_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match=r"step_in_backward = True: needs SGD, .* or give step_in_backward=False"):
        ControlLoop(model, torch.optim.Adam(model.parameters()), cross_entropy, blobs(40), config=IN_FP32)
    loop = loop_of(model, IN_FP32, data=blobs(40))
    loop.step()
    loop.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ValueError, match="the optimizer has step hooks: undo that, or give step_in_backward=False"):
        loop.step()


@pytest.mark.gpu
@EACH_KIND_OF_WEIGHTS
@pytest.mark.parametrize("capture", [True, False])
def test_a_nan_stops_its_bucket_and_all_after_it(config: ControlConfig, capture: bool) -> None:
    execution = replace(config.execution, capture=capture, compile="off")
    loop = assert_a_nan_stops_its_bucket_and_all_after_it(config, "cuda", 12, execution)
    assert (loop._training.steps.num_captured > 0) == capture


def test_a_plain_tensor_of_the_optimizers_is_handed_over_too() -> None:
    weight: Any = torch.ones(3, requires_grad=True)
    taken: list[Tensor | None] = []
    stepper = StepInBackward([[weight]], Weights(), nothing, lambda index, found, steps: taken.extend(found.tensors))
    stepper.begin(stepper.gradients())
    stepper.attempt()
    with stepper.taking(is_first=True, is_last=True):
        (2 * weight).sum().backward()
    (gradient,) = taken
    assert gradient is not None
    assert gradient.tolist() == [2.0, 2.0, 2.0]
