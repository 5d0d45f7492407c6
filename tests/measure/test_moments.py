from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.build import ONE, collected, mlp, same
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.layers import find_layers

# The sum of squares of n FP32 numbers, added pairwise or in vector lanes, is good to a few roundings.
RTOL = 16 * torch.finfo(torch.float32).eps


def moments_of(model: nn.Module, beta: float = 0.9) -> GradientMoments:
    return GradientMoments(find_layers(model), list(model.parameters()), beta=beta)


def draw_gradients(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = factor * (0.1 + torch.randn(parameter.shape, generator=generator))


def variance_of(module: nn.Module) -> float:
    moments = moments_of(module)
    moments.update(collected(module), ONE)
    return moments.read().item()


@given(st.floats(0.0, 0.999), st.integers(1, 12))
def test_the_average_follows_its_formula(beta: float, num_steps: int) -> None:
    model = mlp()
    moments = moments_of(model, beta)
    average = np.zeros(3)
    for step in range(num_steps):
        draw_gradients(model, step, factor=1.0 + step)
        assert moments.update(collected(model), ONE).item() == 0.0
        variance = [layer.weights[0].grad.double().numpy().var() for layer in find_layers(model)]
        average = beta * average + (1.0 - beta) * np.array(variance)
    np.testing.assert_allclose(moments.read().numpy(), average / (1.0 - beta**num_steps), rtol=RTOL)


@pytest.mark.parametrize("scale", [2.0**-4, 1.0, 2.0**16, 2.0**24])
def test_the_loss_scale_is_divided_out(scale: float) -> None:
    model = mlp()
    plain, scaled = moments_of(model), moments_of(model)
    for step in range(3):
        draw_gradients(model, step)
        plain.update(collected(model), ONE)
        draw_gradients(model, step, factor=scale)
        scaled.update(collected(model), torch.tensor(scale))
    assert torch.equal(plain.read(), scaled.read())  # a power of two costs no rounding


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_is_found_and_left_out(bad: float) -> None:
    model, reference = mlp(), mlp()
    moments, clean = moments_of(model), moments_of(reference)
    for step in range(4):
        draw_gradients(model, step)
        draw_gradients(reference, step)
        if step == 2:
            model[2].weight.grad[3, 1] = bad
            reference[2].weight.grad = None
        assert moments.update(collected(model), ONE).item() == (1.0 if step == 2 else 0.0)
        clean.update(collected(reference), ONE)
    assert torch.equal(moments.read(), clean.read())
    assert moments.read().isfinite().all()


def test_a_non_finite_gradient_of_a_bias_is_found_too() -> None:
    model = mlp()
    moments = moments_of(model)
    draw_gradients(model, 0)
    model[4].bias.grad[0] = float("inf")
    found = moments.update(collected(model), ONE)
    assert (found.item(), found.dtype) == (1.0, torch.float32)
    assert moments.read().isfinite().all()


def test_a_layer_without_a_gradient_has_no_statistic_until_it_has_one() -> None:
    model = mlp()
    moments = moments_of(model)
    draw_gradients(model, 0)
    model[2].weight.grad = None
    moments.update(collected(model), ONE)
    assert moments.read().isnan().tolist() == [False, True, False]
    draw_gradients(model, 1)
    moments.update(collected(model), ONE)
    expected = model[2].weight.grad.double().var(correction=0).item()
    assert moments.read()[1].item() == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize("module", [nn.LSTM(3, 5), nn.MultiheadAttention(4, 2)])
def test_several_weights_have_the_variance_of_all_their_elements(module: nn.Module) -> None:
    (layer,) = find_layers(module)
    for index, weight in enumerate(layer.weights):
        weight.grad = 10.0 * index + torch.randn(weight.shape, generator=torch.Generator().manual_seed(index))
    every: Any = np.concatenate([weight.grad.double().numpy().ravel() for weight in layer.weights])
    assert variance_of(module) == pytest.approx(every.var(), rel=RTOL)
    layer.weights[0].grad = None
    rest: Any = np.concatenate([weight.grad.double().numpy().ravel() for weight in layer.weights[1:]])
    assert variance_of(module) == pytest.approx(rest.var(), rel=RTOL)


def test_restored_moments_go_on_alike() -> None:
    model = mlp()
    moments, restored = moments_of(model), moments_of(model)
    draw_gradients(model, 0)
    moments.update(collected(model), ONE)
    state = moments.state_dict()
    moments.remember_norm(ONE)
    restored.load_state_dict(moments.state_dict())
    assert torch.equal(restored.last_norm, moments.norm(ONE))
    del state["last_norm"]
    restored.load_state_dict(state)  # of a version that kept none
    assert restored.last_norm.isinf()
    draw_gradients(model, 1)
    moments.update(collected(model), ONE)
    restored.update(collected(model), ONE)
    assert torch.equal(moments.read(), restored.read())
    assert not same(state, moments.state_dict())
