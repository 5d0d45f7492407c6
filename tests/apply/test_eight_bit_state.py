"""Optimizer state in 8 bits under the loop: how large, how near, and what becomes of it in checkpoints."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.apply.test_split_weights import EVERY, FIXED, IN_BF16, loop_of, network, run
from tests.build import blobs, images, mlp, same, values
from triaccel_ray.apply import fused_optimizer
from triaccel_ray.config import ControlConfig
from triaccel_ray.kernels.eight_bits import num_bytes
from triaccel_ray.loop import ControlLoop

IN_CODES = replace(FIXED, optimizer_state="8bit")
ALL = replace(IN_BF16, optimizer_state="8bit", step_in_backward=True)
EACH = pytest.mark.parametrize("config", [IN_CODES, ALL], ids=["alone", "with split weights, in backward"])


@pytest.fixture(autouse=True)
def _small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_optimizer, "MIN_ELEMENTS_IN_CODES", 30)


def state_of(loop: ControlLoop) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in loop.model.named_parameters()}
    return {names[id(p)]: dict(state) for p, state in loop.optimizer.optimizer.state.items()}


@EVERY
@EACH
def test_it_trains_nearly_as_with_fp32_state(kind: str, config: ControlConfig) -> None:
    loop = loop_of(network(), config, kind, images(80))
    exact = loop_of(network(), replace(config, optimizer_state="fp32", weights="split"), kind, images(80))
    run(loop, 60)
    run(exact, 60)
    assert loop.evaluate(images(80)).loss == pytest.approx(exact.evaluate(images(80)).loss, abs=0.05)
    assert loop.evaluate(images(80)).metrics["accuracy"] > 95.0
    for name, state in state_of(loop).items():
        number = loop.model.get_parameter(name).numel()
        for what, tensor in state.items():
            is_small = number < 30 or what == "step"
            assert tensor.dtype is (torch.float32 if is_small else torch.uint8)
            assert is_small or tensor.shape == (num_bytes(number),)


@EVERY
@EACH
def test_a_resumed_run_equals_an_uninterrupted_one(kind: str, config: ControlConfig) -> None:
    first, second = loop_of(network(), config, kind), loop_of(network(seed=3), config, kind)
    run(first, 4)
    state = copy.deepcopy(first.state_dict())
    run(first, 4)
    run(second, 3)
    second.load_state_dict(state)
    run(second, 4)
    assert same(values(first.model), values(second.model))
    assert same(state_of(first), state_of(second))


def test_checkpoints_pass_between_fp32_and_8_bits() -> None:
    in_fp32 = replace(IN_BF16, optimizer_state="fp32")
    exact = loop_of(network(), in_fp32)
    run(exact, 10)
    before = copy.deepcopy(state_of(exact))
    in_codes, back = loop_of(network(seed=1), ALL), loop_of(network(seed=2), in_fp32)
    in_codes.load_state_dict(copy.deepcopy(exact.state_dict()))
    in_codes.optimizer.set_rates(1.0, {}, {})
    assert state_of(in_codes)["head.weight"]["exp_avg"].dtype is torch.uint8
    back.load_state_dict(copy.deepcopy(in_codes.state_dict()))
    back.optimizer.set_rates(1.0, {}, {})
    after = state_of(back)
    for name, state in before.items():
        for what, tensor in state.items():  # dtype and shape, too
            torch.testing.assert_close(after[name][what], tensor, rtol=0.05, atol=0.01 * float(tensor.abs().max()))


def test_state_becomes_fp32_when_the_optimizer_steps_by_itself() -> None:
    loop = loop_of(mlp(), IN_CODES, data=blobs(40))
    run(loop, 3)
    loop.optimizer.optimizer.register_step_post_hook(lambda *_: None)
    loop.step()
    for name, state in state_of(loop).items():
        assert state["exp_avg"].dtype is torch.float32
        assert state["exp_avg"].shape == loop.model.get_parameter(name).shape
