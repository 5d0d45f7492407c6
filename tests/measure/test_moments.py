import numpy as np
import pytest
import torch
from torch import nn

from tests.build import collected, mlp
from triaccel_ray.measure.moments import GradientMoments
from triaccel_ray.model.layers import find_layers

# The sum of squares of n FP32 numbers, added pairwise or in vector lanes, is good to a few roundings.
RTOL = 16 * torch.finfo(torch.float32).eps
SCALE = torch.tensor(4.0)


def moments_of(model: nn.Module) -> GradientMoments:
    return GradientMoments(find_layers(model), list(model.parameters()), beta=0.9)


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = (1.0 + seed) * (0.1 + torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("model", [mlp(), nn.LSTM(3, 5), nn.MultiheadAttention(4, 2)])
def test_the_average_of_all_a_layers_weights_follows_its_formula(model: nn.Module) -> None:
    moments, layers = moments_of(model), find_layers(model)
    assert moments.read().isnan().all()
    average = np.zeros(len(layers))
    for step in range(3):
        draw_gradients(model, step)
        assert moments.stats.update(collected(model).table, SCALE).item() == 0.0
        gradients = [np.concatenate([w.grad.double().numpy().ravel() for w in layer.weights]) for layer in layers]
        average = 0.9 * average + 0.1 * np.array([gradient.var() for gradient in gradients]) / 16.0
    np.testing.assert_allclose(moments.read().numpy(), average / (1.0 - 0.9**3), rtol=RTOL)


def test_a_non_finite_gradient_of_a_bias_is_found_too() -> None:
    model = mlp()
    moments = moments_of(model)
    draw_gradients(model, 0)
    model[4].bias.grad[0] = float("inf")
    found = moments.stats.update(collected(model).table, SCALE)
    assert (found.item(), found.dtype) == (1.0, torch.float32)
    assert moments.read().isfinite().all()
