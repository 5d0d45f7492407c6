"""Linear layers in FP8: what they compute, which layers may, and training with them."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.build import controlled
from tests.decide.build import BF16, FP8, FP16, FP32
from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.apply import fp8
from triaccel_ray.apply.precision import fp8_layers, refused_precisions
from triaccel_ray.decide.paper import paper_rules
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.plan import FaultKind, Precision

CPU = torch.device("cpu")
SLOW_TOO = PrecisionConfig(fp8=True, initial=FP8, allow_slow_precisions=True)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as FP8 with one scale represents it, in fp64."""
    scale = x.abs().max().double() / torch.finfo(dtype).max
    return (x.double() / scale).float().to(dtype).double() * scale


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@DEVICES
@pytest.mark.parametrize("rows", [(32,), (2, 16), (5,), (3, 7)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_rounded_tensors(rows: tuple[int, ...], has_bias: bool, device: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 48, bias=has_bias, device=device)
    x, gradient = torch.randn(*rows, 64, device=device, requires_grad=True), torch.randn(*rows, 48, device=device)
    outputs = fp8.linear(module, x)
    outputs.backward(gradient)
    low_x, low_w = rounded(x.detach().bfloat16(), fp8.E4M3), rounded(module.weight.detach().bfloat16(), fp8.E4M3)
    low_g = rounded(gradient.bfloat16(), fp8.E5M2).flatten(0, -2)
    expected = low_x @ low_w.T + (module.bias.detach().double() if has_bias else 0.0)
    assert outputs.dtype is torch.bfloat16
    assert outputs.shape == (*rows, 48)
    assert error(outputs.detach(), expected) < 4e-3  # results are rounded to BF16
    assert x.grad is not None
    assert module.weight.grad is not None
    assert error(x.grad.flatten(0, -2), low_g @ low_w) < 4e-3
    # A number of rows that FP8 products do not take leaves this one to BF16.
    exact = gradient.bfloat16().double().flatten(0, -2)
    assert error(module.weight.grad, (low_g if len(exact) % 16 == 0 else exact).T @ low_x.flatten(0, -2)) < 4e-3
    if has_bias:
        torch.testing.assert_close(module.bias.grad, gradient.flatten(0, -2).sum(0), rtol=0.05, atol=0.05)


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    module = nn.Linear(16, 16)
    for bad in (float("inf"), float("nan")):
        assert fp8.linear(module, torch.full((16, 16), bad)).isnan().all()
    assert fp8.linear(module, torch.zeros(16, 16)).isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (16,)], ids=["no rows", "no tokens", "rows"])
def test_the_sizes_are_those_of_the_weight_and_without_rows_there_is_nothing_to_multiply(shape: Any) -> None:
    module = nn.Linear(64, 64)
    module.weight, module.bias = nn.Parameter(torch.randn(32, 48)), None  # pruned
    outputs = fp8.linear(module, torch.ones(*shape, 48, requires_grad=True))
    assert (outputs.shape, outputs.dtype) == ((*shape, 32), torch.bfloat16)
    outputs.sum().backward()
    assert module.weight.grad is not None
    assert bool(module.weight.grad.any()) == (0 not in shape)


def test_ragged_texts_compute_in_bf16() -> None:
    texts = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.jagged)
    assert fp8.linear(nn.Linear(32, 16), texts).values().shape == (8, 16)


def linear(width: int = 2048, **settings) -> nn.Linear:
    return nn.Linear(width, 2048, device="meta", **settings)


def tied() -> nn.Module:
    """A layer that shares its weight with an embedding."""
    model = nn.Sequential(nn.Embedding(2048, 2048, device="meta"), linear(bias=False))
    model[1].weight = model[0].weight
    return model


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as `nn.Linear` names it
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("module", "fits"),
    [(linear(), True), (linear(bias=False), True), (linear(2032), False), (linear(2056), False), (linear(1024), False),
     (nn.utils.parametrizations.weight_norm(linear()), True),
     (Own(2048, 2048, device="meta"), False), (nn.Conv1d(2048, 2048, 1, device="meta"), False),
     (tied(), False)],
)  # fmt: skip
def test_wide_linear_layers_may_use_fp8(module: nn.Module, fits: bool) -> None:
    layers = find_layers(nn.Sequential(module))
    assert fp8_layers(layers, PrecisionConfig(fp8=True), CPU) == ({"0"} if fits else set())
    assert not fp8_layers(layers, PrecisionConfig(), CPU)


@pytest.mark.parametrize(
    ("capability", "layers", "is_compiled", "reason"),
    [((9, 0), {"0"}, True, None), ((8, 9), {"0"}, True, None), ((8, 0), set(), True, "no FP8 instructions"),
     ((9, 0), set(), True, "fp8 needs a linear layer with at least 2048 inputs and outputs"),
     ((9, 0), {"0"}, False, "only code compiled for a GPU")],
)  # fmt: skip
def test_fp8_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    layers: set[str],
    is_compiled: bool,
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    config, device = PrecisionConfig(fp8=True), torch.device("cuda")
    refused = refused_precisions(config, device, is_compiled=is_compiled, in_fp8=layers)
    assert (reason in refused[FP8]) if reason else (FP8 not in refused)
    assert FP8 not in refused_precisions(replace(config, fp8=False), device, is_compiled=is_compiled, in_fp8=set())
    assert "only code compiled for a GPU" in refused_precisions(config, CPU, is_compiled=True, in_fp8={"0"})[FP8]


def test_a_layer_in_fp8_stands_between_others_and_suspends_to_fp32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    x = torch.randn(32, 16)
    exact = model(x)
    for levels in itertools.product((FP8, BF16, FP16, FP32), repeat=3):
        precision = controlled(model, *levels)
        assert set(precision.dtypes.values()) <= {torch.bfloat16, torch.float16, torch.float32}
        with precision.in_force():
            outputs = model(x)
        assert error(outputs.detach(), exact.detach().double()) < 0.1
        outputs.float().square().sum().backward()
        with precision.suspended():
            assert torch.equal(model(x), exact)
        precision.remove()


def loop_of(precision: PrecisionConfig, *, width: int = 64, **settings) -> ControlLoop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    inputs = torch.randn(512, 32)
    config = ControlConfig(
        precision=precision, curvature=CurvatureConfig(enabled=False), every_steps=5,
        batch=BatchConfig(enabled=False, start=64, minimum=64), **settings,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    return ControlLoop(model, optimizer, F.cross_entropy, (inputs, inputs[:, :10].argmax(1)), config=config)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"execution": ExecutionConfig(compile="on")}, {}),
        ({"execution": ExecutionConfig(compile="off")}, {}),
        ({"weights": "split", "step_in_backward": True}, {"4": BF16}),
    ],
    ids=["compiled", "eager", "split weights, updated in the backward pass"],
)
def test_a_loop_trains_in_fp8_as_well_as_in_bf16(settings: Any, last: dict[str, Precision]) -> None:
    losses = {}
    for level in (FP8, BF16):
        fixed = replace(SLOW_TOO, enabled=False, initial=level, initial_layers=last)
        with closing(loop_of(fixed, **settings)) as loop:
            losses[level] = [loop.train_epoch().loss for _ in range(6)]
            # The last layer has 10 outputs, no multiple of 16.
            lowest = FP16 if level is FP8 and not last else BF16
            assert dict(loop.plan.precision) == {"0": level, "2": level, "4": lowest}
            assert loop.model[0].weight.dtype is (torch.bfloat16 if last else torch.float32)
    assert losses[FP8][-1] < 0.5 * losses[FP8][0]
    assert losses[FP8] == pytest.approx(losses[BF16], rel=0.05 if last else 0.1)


def test_below_tau_low_a_layer_goes_to_fp8_and_a_resumed_run_stays_there() -> None:
    wants_low = replace(SLOW_TOO, initial=BF16, tau_low=1e9, dwell_ticks=0, patience_ticks=1)
    with closing(loop_of(wants_low)) as loop:
        loop.train_epoch()
        assert dict(loop.plan.precision) == {"0": FP8, "2": FP8, "4": FP16}
        state = loop.state_dict()
    with closing(loop_of(wants_low)) as resumed:
        resumed.load_state_dict(state)
        assert dict(resumed.plan.precision) == {"0": FP8, "2": FP8, "4": FP16}
        resumed.train_epoch()


def test_a_model_without_wide_layers_trains_without_and_says_so() -> None:
    with closing(loop_of(PrecisionConfig(fp8=True, tau_low=1e9))) as loop:
        loop.step()
        faults = loop.tick().observation.faults
        loop.train_epoch()
        assert FP8 not in loop.plan.precision.values()
    details = [each.detail for each in faults if each.kind is FaultKind.PRECISION_REFUSED]
    text = "fp8 needs a linear layer with at least 2048 inputs and outputs, in multiples of 16: it is not offered"
    assert text in details


class Refuses(nn.Module):
    """Cannot compute with values of few digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if (
            hidden.float() - F.linear(x.float(), self.first.weight.float(), self.first.bias.float())
        ).abs().max() > 0.02:
            raise RuntimeError("too coarse")
        out: Tensor = self.last(hidden)
        return out


def test_a_layer_that_the_model_cannot_run_in_fp8_is_not_offered_it() -> None:
    torch.manual_seed(0)
    model, config = Refuses(), ControlConfig(precision=SLOW_TOO, curvature=CurvatureConfig(enabled=False))
    data = torch.randn(128, 32), torch.randn(128, 16)
    with closing(ControlLoop(model, torch.optim.SGD(model.parameters(), 0.1), F.mse_loss, data, config=config)) as loop:
        assert loop.plan.precision["first"] is not FP8
        assert loop.plan.precision["last"] is FP8
        loop.step()
        faults = loop.tick().observation.faults
    assert any("too coarse" in each.detail for each in faults if each.kind is FaultKind.PRECISION_UNCHECKED)


def test_a_run_that_resumes_where_fp8_is_not_offered_goes_on_in_the_next_precision() -> None:
    fixed = replace(SLOW_TOO, enabled=False)
    with closing(loop_of(fixed)) as loop:
        loop.train_epoch()
        state = loop.state_dict()
    with closing(
        loop_of(replace(fixed, enabled=True, fp8=False, initial=BF16, allow_slow_precisions=False))
    ) as resumed:
        resumed.load_state_dict(state)
        assert set(resumed.plan.precision.values()) <= {BF16, FP32}
        details = [fault.detail for fault in resumed.tick().observation.faults]
        assert any(each.startswith("the resumed run takes other precisions: 0 fp8 -> ") for each in details)
        resumed.train_epoch()


def test_fp8_as_the_first_precision_must_be_asked_for() -> None:
    for name, settings in (("precision", {"initial": FP8}), ("initial_layers", {"initial_layers": {"head": FP8}})):
        with pytest.raises(ValueError, match=f"{name} = 'fp8': needs --fp8 on, or fp8=True"):
            PrecisionConfig(**settings)


def test_the_printed_rules_know_no_fp8() -> None:
    precision = replace(SLOW_TOO, initial_layers={"head": FP8, "stem": BF16})
    printed = paper_rules(ControlConfig(precision=precision)).precision
    assert (printed.fp8, printed.initial, printed.initial_layers) == (False, FP16, {"head": FP16, "stem": BF16})
