import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.build import BF16, FP16, FP32, ConvNet, Wired, controlled, gradients, images
from tests.decide.build import USUAL
from triaccel_ray.apply.precision import DTYPES, precisions_without_benefit, supported_precisions
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import Precision

LEVELS = pytest.mark.parametrize("level", USUAL)
IMAGES, VECTORS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 24)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv": (lambda: nn.Conv2d(3, 4, 3), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3), IMAGES),
    "linear": (lambda: nn.Linear(4, 8), VECTORS.view(2, 3, 4)),
}


@LEVELS
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_computes_as_one_that_is_cast_and_gets_fp32_gradients(kind: str, level: Precision) -> None:
    make, inputs = LAYERS[kind]
    make_same = make()
    model = nn.Sequential(copy.deepcopy(make_same))
    precision = controlled(model, level)
    with precision.in_force():
        outputs = model(inputs)
    assert outputs.dtype is DTYPES[level]
    expected = copy.deepcopy(make_same).to(DTYPES[level])(inputs.to(DTYPES[level]))
    assert torch.equal(outputs, expected)
    outputs.float().square().sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_layer_in_fp32_widens_16_bits_and_leaves_fp64() -> None:
    # Takes seconds since 1970, of which FP32 resolves 128.
    age = Wired(lambda self, seconds: (seconds - 1.7e9).float() @ self.weight, weight=nn.Parameter(torch.ones(1, 1)))
    model = nn.Sequential(age)
    precision = controlled(model, FP32)
    with precision.in_force():
        assert model(torch.tensor([[1.7e9 + 3.0]], dtype=torch.float64)).item() == 3.0
    linear = nn.Sequential(nn.Linear(4, 2))
    with controlled(linear, FP32).in_force():
        assert linear(torch.ones(1, 4, dtype=torch.bfloat16)).dtype is torch.float32


@pytest.mark.parametrize("levels", [[FP16, BF16, FP32], [FP32]])
def test_suspended_is_the_untouched_model_bit_for_bit(levels: list[Precision]) -> None:
    model, inputs = ConvNet().eval(), images(4)[0]
    expected = model(inputs)
    precision = controlled(model, *levels)
    with precision.suspended(), precision.in_force():
        assert torch.equal(model(inputs), expected)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with precision.in_force():
        assert torch.equal(model(inputs), expected) == (levels == [FP32])


def test_a_forward_function_of_the_users_own_is_used_and_given_back() -> None:
    model = nn.Linear(2, 2)
    own = lambda inputs: -F.linear(inputs, model.weight)  # noqa: E731  # what users put on instances
    model.forward = own
    precision = controlled(model, BF16)
    outputs = model(torch.ones(1, 2))
    assert outputs.dtype is torch.bfloat16
    assert torch.equal(outputs, -F.linear(torch.ones(1, 2).bfloat16(), model.weight.bfloat16()))
    precision.remove()
    assert model.forward is own


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    precision = controlled(model, BF16)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
        assert twin(torch.tensor([[1.0, -3.0]])).abs().sum() > 0
    precision.remove()
    assert twin(torch.ones(1, 2)).dtype is torch.float32


@LEVELS
def test_a_tied_weight_computes_in_one_precision_and_gathers_one_gradient(level: Precision) -> None:
    embed, out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    out.weight = embed.weight
    model, tokens = nn.Sequential(embed, out), torch.tensor([0, 3])
    model(tokens).square().sum().backward()
    expected = gradients(model)["0.weight"]
    model.zero_grad()
    precision = controlled(model, level)
    with precision.in_force():
        assert embed(tokens).dtype is torch.float32
        outputs = model(tokens)
    assert outputs.dtype is DTYPES[level]
    outputs.float().square().sum().backward()
    # Both uses count: the first alone would leave the rows of absent tokens at zero.
    torch.testing.assert_close(gradients(model)["0.weight"], expected, rtol=2.0**-4, atol=2.0**-4)


def test_recurrent_layers_stay_fp32() -> None:
    model = nn.Sequential(nn.LSTM(4, 3, batch_first=True))
    (layer,) = find_layers(model)
    assert supported_precisions(layer) == (FP32,)
    linear = find_layers(nn.Linear(2, 2))[0]
    assert supported_precisions(linear) == USUAL
    assert supported_precisions(linear, without={FP16: "slow"}) == (BF16, FP32)
    assert supported_precisions(find_layers(nn.Embedding(2, 2))[0]) == (FP32,)
    precision = controlled(model, FP32)
    tokens = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with precision.in_force():
        outputs, (hidden, _) = model(tokens)
        half, _ = model(torch.ones(1, 3, 4, dtype=torch.bfloat16))
    assert (outputs.data.dtype, hidden.dtype, half.dtype) == (torch.float32,) * 3


PARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight": nn.utils.parametrizations.weight_norm,
    "spectral": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old spectral": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
@pytest.mark.parametrize("level", [BF16, FP32])
def test_parametrized_layers_train_as_under_autocast(kind: str, level: Precision) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(PARAMETRIZED[kind](nn.Linear(8, 8)), nn.ReLU(), PARAMETRIZED[kind](nn.Linear(8, 2)))
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=DTYPES[level], enabled=level is not FP32):
        expected = twin(VECTORS.view(3, 8))
    precision = controlled(model, level)
    with precision.in_force():
        outputs = model(VECTORS.view(3, 8))
    torch.testing.assert_close(outputs, expected)
    outputs.float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    first, last = find_layers(model)
    precision.set({first.name: FP32, last.name: BF16})
    with precision.in_force():
        hidden = model[0](VECTORS.view(3, 8))
        assert (hidden.dtype, model[2](hidden).dtype) == (torch.float32, torch.bfloat16)


ON_A_CPU = {FP16: "PyTorch has no fast FP16 on a CPU"}
WITHOUT_BF16 = {**ON_A_CPU, BF16: "this CPU has no BF16 instructions"}


@pytest.mark.parametrize(
    ("device", "has_onednn", "has_bf16", "refused", "compiled"),
    [
        ("cpu", True, True, ON_A_CPU, ON_A_CPU),
        ("cpu", True, False, WITHOUT_BF16, WITHOUT_BF16),
        ("cpu", False, True, WITHOUT_BF16, WITHOUT_BF16),
        ("cuda", True, False, *[{BF16: "this GPU has no BF16 instructions"}] * 2),  # FP16 stays in compiled code
        ("cuda", True, True, {}, {FP16: "compiled code is no faster in fp16 than in bf16"}),
    ],
)
def test_a_precision_that_gains_nothing_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, has_onednn: bool, has_bf16: bool, refused: Any, compiled: Any
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert precisions_without_benefit(device, is_compiled=False) == refused
    assert precisions_without_benefit(device, is_compiled=True) == compiled
