from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.build import BF16, FP16, FP32, controlled
from triaccel_ray.apply.depthwise import forward_of
from triaccel_ray.apply.precision import DTYPES
from triaccel_ray.records.plan import Precision


def _depthwise(**changed: object) -> nn.Conv2d:
    return nn.Conv2d(**{"in_channels": 8, "out_channels": 8, "kernel_size": 3, "groups": 8, "bias": False, **changed})


class Own(nn.Conv2d):
    pass


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "grouped": lambda: _depthwise(groups=4),
    "more outputs than inputs": lambda: _depthwise(out_channels=16),
    "bias": lambda: _depthwise(bias=True),
    "dilated": lambda: _depthwise(dilation=2),
    "padded otherwise": lambda: _depthwise(padding=1, padding_mode="reflect"),
    "padded by name": lambda: _depthwise(padding="same"),
    "strided in one direction": lambda: _depthwise(stride=(1, 2)),
    "oblong": lambda: _depthwise(kernel_size=(1, 7)),
    "large": lambda: _depthwise(kernel_size=9),
    "of a class of its own": lambda: Own(8, 8, 3, groups=8, bias=False),
    "of one channel": lambda: nn.Conv2d(1, 1, 3, bias=False),
    "linear": lambda: nn.Linear(3, 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_keep_their_forward_function(name: str) -> None:
    module = OTHERS[name]()
    assert forward_of(module) is type(module).forward
    assert forward_of(_depthwise(stride=2, padding=1)) is not nn.Conv2d.forward


def test_without_a_gpu_a_depthwise_convolution_is_pytorchs() -> None:
    module, x = _depthwise(padding=1), torch.randn(2, 8, 5, 5)
    assert torch.equal(forward_of(module)(module, x), module(x))
    with pytest.raises(RuntimeError, match="expected input"):
        forward_of(module)(module, x[:, :4])


@pytest.mark.gpu
@pytest.mark.parametrize("level", [FP16, BF16, FP32])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_a_layer_under_control_computes_what_it_does_cast(level: Precision, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(_depthwise(kernel_size=5, padding=2, stride=2)).cuda().to(memory_format=memory_format)
    x = torch.randn(4, 8, 17, 15, device="cuda").to(memory_format=memory_format)
    expected = copy.deepcopy(model).double()
    exact_x, x = x.double().requires_grad_(), x.requires_grad_()
    precision = controlled(model, level)
    with precision.in_force():
        y = model(x)
    exact = expected(exact_x)
    y.float().square().sum().backward()
    exact.square().sum().backward()
    assert (y.dtype, x.grad.dtype, model[0].weight.grad.dtype) == (DTYPES[level], torch.float32, torch.float32)
    rounding = {FP16: 2e-3, BF16: 2e-2, FP32: 1e-5}[level]
    pairs = ((y, exact), (x.grad, exact_x.grad), (model[0].weight.grad, expected[0].weight.grad))
    for actual, wanted in pairs:
        assert (actual.double() - wanted).abs().max() <= rounding * wanted.abs().max()
    with precision.suspended():
        assert torch.allclose(model(x).double(), exact, atol=1e-4)
