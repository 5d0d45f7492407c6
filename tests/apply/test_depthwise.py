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


OTHERS: dict[str, Callable[[], nn.Conv2d]] = {
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
}


def _check_computes_what_pytorch_does(module: nn.Conv2d, device: str) -> None:
    module = module.to(device, memory_format=torch.channels_last)
    x = torch.randn(2, module.in_channels, 9, 9, device=device).to(memory_format=torch.channels_last)
    assert torch.allclose(forward_of(module)(module, x), module(x), atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_other_layers_compute_what_pytorch_does(name: str, device: str) -> None:
    _check_computes_what_pytorch_does(OTHERS[name](), device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_convolution_that_changes_computes_what_it_became(device: str) -> None:
    module = _depthwise(padding=1)
    convolve = forward_of(module)
    module.bias = nn.Parameter(torch.randn(8))
    _check_computes_what_pytorch_does(module, device)
    module.dilation = (2, 2)
    _check_computes_what_pytorch_does(module, device)
    x = torch.randn(2, 8, 5, 5, device=device)
    assert torch.allclose(convolve(module, input=x), module(x), atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_func_differentiates_a_convolution(device: str) -> None:
    module = _depthwise(padding=1).to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 8, 5, 5, device=device).to(memory_format=torch.channels_last)
    active: list[bool] = []

    def total(x: torch.Tensor, convolve: Callable[..., torch.Tensor]) -> torch.Tensor:
        active.append(torch._C._are_functorch_transforms_active())  # what kernels look at
        return convolve(module, x).square().sum()

    actual, expected = (torch.func.grad(total)(x, each) for each in (forward_of(module), nn.Conv2d.forward))
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert all(active)
    assert not torch._C._are_functorch_transforms_active()


def test_a_convolution_with_a_method_of_its_own_keeps_it() -> None:
    module = _depthwise()
    module._conv_forward = lambda x, weight, bias: x  # as some replace it to pad otherwise
    x = torch.randn(2, 8, 5, 5)
    assert forward_of(module)(module, x) is x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pytorch_refuses_what_it_always_did(device: str) -> None:
    module = _depthwise(padding=1).to(device)
    for x in (torch.randn(2, 4, 5, 5), torch.randn(2, 8, 5, 5, dtype=torch.float64)):
        x = x.to(device, memory_format=torch.channels_last)
        with pytest.raises(RuntimeError, match=r"expected|should be the same"):
            forward_of(module)(module, x)


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
