"""Precisions are checked on some samples: all of a new model, and lower ones before they take effect."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.build import Wired
from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig, PrecisionConfig
from triaccel_ray.control import sensitivity as control_sensitivity
from triaccel_ray.control.sensitivity import _relative_change, refuse_harmful
from triaccel_ray.cuda.random_states import host_random_state
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.trainables.audio import Sine

BF16, FP32 = Precision.BF16, Precision.FP32


def loop_in_fp32(model: nn.Module, inputs: Tensor, targets: Tensor, loss=F.mse_loss, **settings) -> ControlLoop:
    """A loop that trains in FP32 without ticks of its own, and whose ticks want BF16 for every layer."""
    torch.manual_seed(0)
    precision = PrecisionConfig(initial=FP32, dwell_ticks=0, patience_ticks=1, tau_low=0.0, overflow_bar_ticks=2)
    config = ControlConfig(
        every_steps=10**6, precision=precision, curvature=CurvatureConfig(enabled=False),
        batch=BatchConfig(enabled=False, start=64, minimum=64), **settings,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    return ControlLoop(model, optimizer, loss, (inputs, targets), config=config)


def loop_by_default(
    model: nn.Module, precision: PrecisionConfig, loss=F.mse_loss, *, width: int = 1, **settings
) -> ControlLoop:
    config = ControlConfig(precision=precision, curvature=CurvatureConfig(enabled=False), **settings)
    data = torch.randn(128, width), torch.randn(128, 1)
    return ControlLoop(model, torch.optim.Adam(model.parameters()), loss, data, config=config)


def sines() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Sine(1, 64, 3000.0, 1.0), Sine(64, 64, 30.0, 0.01), nn.Linear(64, 1))


def trained_network(device: str = "cpu", **settings) -> ControlLoop:
    """A loop whose model has learned oscillations; in BF16, its first layer's angles are off by radians.

    As the loop sees the new model, that layer's weights are zero: only training shows what precision it needs.
    """
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 4096, device=device).unsqueeze(1)
    model = nn.Sequential(Sine(1, 64, 1000.0, 1.0), Sine(64, 64, 30.0, 0.01), nn.Linear(64, 1)).to(device)
    weight = model[0].linear.weight
    drawn = weight.detach().clone()
    nn.init.zeros_(weight)
    nn.init.zeros_(model[0].linear.bias)
    loop = loop_in_fp32(model, inputs, torch.sin(100 * inputs), **settings)
    with torch.no_grad():
        weight.copy_(drawn)
    for _ in range(5):
        loop.train_epoch()
    return loop


def test_the_layer_that_needs_fp32_keeps_it_and_the_others_are_lowered() -> None:
    with trained_network() as loop:
        loss = loop.train_epoch().loss
        assert loss < 0.01
        tick = loop.tick()
        assert set(tick.decision.plan.precision.values()) == {BF16}
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
        (fault,) = tick.applied.faults
        assert fault.kind is FaultKind.LOWERING_REFUSED
        assert fault.layers == ("0.linear",)
        assert fault.detail.startswith("on 32 samples, lower precisions change the loss from 0.00")
        assert fault.detail.endswith("; refused: 0.linear fp32 -> bf16")
        assert loop.train_epoch().loss < 2 * loss
        # No step is captured here: time for the check would make the rules hold step times for those of captured steps.
        assert loop.tick().observation.adapting_ms == 0.0


@pytest.mark.gpu
def test_a_check_between_captured_steps_changes_no_weight_and_keeps_no_memory() -> None:
    with trained_network(device="cuda") as loop:
        loss = loop.train_epoch().loss
        assert loop._training.steps.num_captured
        before = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        wanted = replace(loop.plan, precision=dict.fromkeys(loop.plan.precision, BF16))
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        # A tick would wait with it: compiling for another plan would take too large a share of so short a run.
        plan, (fault,) = refuse_harmful(loop._training, loop.config, loop.plan, wanted, step=loop.num_steps)
        assert torch.cuda.memory_reserved() <= reserved
        assert plan.precision["0.linear"] is FP32
        assert "0.linear" in fault.layers
        torch.testing.assert_close((loop.model.state_dict(), loop.optimizer.state_dict()), before, rtol=0, atol=0)
        assert loop.train_epoch().loss < 2 * loss


def test_without_the_check_all_that_was_learned_is_lost() -> None:
    with trained_network(revert_slowdowns=False) as loop:
        loss = loop.train_epoch().loss
        assert not loop.tick().applied.faults
        assert set(loop.plan.precision.values()) == {BF16}
        assert loop.train_epoch().loss > 10 * loss


def test_a_refused_layer_is_tried_again_later() -> None:
    with trained_network(max_overhead=1.0) as loop:
        refused = []
        for _ in range(14):
            loop.step()
            refused.append(bool(loop.tick().applied.faults))
        assert refused[0]
        assert not any(refused[1:3])
        assert any(refused[3:])
        assert loop.state.layers["0.linear"].times_refused >= 1
        assert loop.plan.precision["0.linear"] is FP32


class Noisy(nn.Module):
    """Has buffers that a pass in training mode writes to, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 4))
        self.register_buffer("num_passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("accepts", [True, False])
def test_a_check_leaves_model_optimizer_and_random_numbers_as_they_were(accepts: bool) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        is_low = loops and loops[0]._training.precision.dtypes["layers.0"] is torch.bfloat16
        return F.cross_entropy(outputs, targets) + (9.0 if is_low and not accepts else 0.0)

    loops: list[ControlLoop] = []
    torch.manual_seed(0)
    model = Noisy()
    with loop_in_fp32(model, torch.randn(256, 8), torch.randint(0, 4, (256,)), loss) as loop:
        loops.append(loop)
        loop.train_epoch()
        before = copy.deepcopy((model.state_dict(), loop.optimizer.state_dict(), loop.sampler.state_dict()))
        drawn = host_random_state()
        tick = loop.tick()
        assert bool(tick.applied.faults) is not accepts
        assert loop.plan.precision["layers.0"] is (BF16 if accepts else FP32)
        assert host_random_state() == drawn
        after = (model.state_dict(), loop.optimizer.state_dict(), loop.sampler.state_dict())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert model.training
        assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())


def test_a_loss_that_cannot_be_computed_refuses_nothing() -> None:
    can_compute = True

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if not can_compute:
            raise torch.OutOfMemoryError("not enough memory")
        return F.mse_loss(outputs, targets)

    with loop_in_fp32(nn.Linear(4, 2), torch.randn(128, 4), torch.randn(128, 2), loss) as loop:
        loop.step()
        can_compute = False
        (fault,) = loop.tick().applied.faults
        assert fault.kind is FaultKind.PRECISION_UNCHECKED
        assert fault.detail == "the check on samples failed: not enough memory"
        assert set(loop.plan.precision.values()) == {BF16}


def test_no_pass_is_made_while_no_precision_is_lowered() -> None:
    passes = []
    model = nn.Linear(4, 2)
    with loop_in_fp32(model, torch.randn(128, 4), torch.randn(128, 2)) as loop:
        loop.step()
        loop.tick()
        model.register_forward_hook(lambda *_: passes.append(1))
        loop.tick()
        assert not passes


@pytest.mark.parametrize(
    ("num_layers", "is_harmful"),
    [(2, all), (3, lambda low: low[0] or all(low[1:]))],
    ids=["alone", "beside one that is harmful alone"],
)
def test_layers_harmful_only_together_all_keep_their_precision(num_layers: int, is_harmful) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        dtypes = loops[0]._training.precision.dtypes.values() if loops else [torch.float32] * num_layers
        return F.mse_loss(outputs, targets) + 9.0 * is_harmful([dtype is torch.bfloat16 for dtype in dtypes])

    loops: list[ControlLoop] = []
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    with loop_in_fp32(model, torch.randn(128, 4), torch.randn(128, 4), loss) as loop:
        loops.append(loop)
        loop.step()
        (fault,) = loop.tick().applied.faults
        assert set(loop.plan.precision.values()) == {FP32}
        assert fault.layers == tuple(loop.plan.precision)


def test_a_constant_in_the_loss_does_not_hide_that_the_outputs_change() -> None:
    with trained_network(loss=lambda outputs, targets: F.mse_loss(outputs, targets) + 100.0) as loop:
        (fault,) = loop.tick().applied.faults
        assert fault.layers == ("0.linear",)


def masked(value: float) -> nn.Module:
    """Adds a column of this value to the outputs."""

    def wiring(self: Wired, x: Tensor) -> Tensor:
        out = self.network(x)
        return torch.cat((out, torch.full_like(out, value)), 1)

    return Wired(wiring, network=sines())


def spikes(self: Wired, x: Tensor) -> Tensor:
    """Outputs that few samples change."""
    out = self.network(x).repeat(1, 999)
    return (out > 0).float() + 0.0 * out


def slope(self: Wired, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(self.network(x).sum(), x, create_graph=True)[0]


def zero() -> nn.Module:
    model = nn.Linear(8, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


MASKS = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4, 1.0, math.nan)
JUDGED: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    **{f"masked by {value:.0e}": (partial(masked, value), 1, True) for value in MASKS},
    "large outputs": (lambda: Wired(lambda self, x: 1e6 * self.network(x), network=sines()), 1, True),
    "gradients computed by the model": (lambda: Wired(slope, network=sines()), 1, True),
    "spikes": (lambda: Wired(spikes, network=nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))), 1, False),
    "outputs of zero": (zero, 8, False),
    "an ordinary model": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 1)), 8, False
    ),
}  # fmt: skip
"""What makes the model, its number of inputs, and whether its first layer needs FP32."""


@pytest.mark.parametrize("name", JUDGED)
def test_a_layer_keeps_fp32_only_if_outputs_other_than_masks_change(name: str) -> None:
    make, width, needs_fp32 = JUDGED[name]
    torch.manual_seed(0)
    loss = lambda outputs, targets: F.mse_loss(outputs[:, :1], targets)  # noqa: E731
    with loop_by_default(make(), PrecisionConfig(), loss, width=width) as loop:
        first, *others = loop.plan.precision.values()
        assert first is (FP32 if needs_fp32 else BF16)
        assert others[:1] in ([], [BF16])  # the last layer's outputs are the model's


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ([3.0, -1e9], [3.3, -9.98e8], 0.1), ([3.0, -3.4e38], [3.3, -math.inf], 0.1),
        ([4.0, math.inf], [5.0, math.inf], 0.25), ([1e5, 2e5], [1.1e5, 2.2e5], 0.1), ([7e4], [math.inf], math.inf),
        ([-7e4, 1.0], [-math.inf, 1.0], math.inf),
        ([1.0] * 99 + [1e-8], [1.0] * 99 + [1.2e-8], 2e-10), ([math.nan, 2.0], [math.nan, 2.0], 0.0), ([], [], 0.0),
    ],
)  # fmt: skip
def test_the_change_of_outputs_is_relative_to_what_is_no_mask(
    before: list[float], after: list[float], change: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_sensitivity, "_CHUNK_ELEMENTS", 2)
    assert _relative_change([torch.tensor(before)], [torch.tensor(after)]) == pytest.approx(change, rel=1e-2)


def test_a_model_in_fp32_is_judged_as_well_so_that_the_first_tick_does_no_harm() -> None:
    with loop_by_default(sines(), PrecisionConfig(initial=FP32, tau_low=0.0)) as loop:
        for _ in range(4):
            loop.step()
            loop.tick()
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}


def test_a_resumed_run_offers_what_the_first_one_did_whatever_weights_it_began_with() -> None:
    with loop_by_default(sines(), PrecisionConfig()) as loop:
        loop.step()
        state = copy.deepcopy(loop.state_dict())
    other = sines()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1e-3)  # so that rounding changes nothing
    with loop_by_default(other, PrecisionConfig()) as loop:
        assert set(loop.plan.precision.values()) == {BF16}
        loop.load_state_dict(state)
        assert loop.plan.precision["0.linear"] is FP32
        supported = {each.name: each.supported for each in loop.tick().observation.layers}
        assert supported == {"0.linear": (FP32,), "1.linear": (BF16, FP32), "2": (BF16, FP32)}


def test_a_layer_whose_rounding_changes_the_new_models_outputs_is_never_offered_that_precision() -> None:
    ticks: list[Tick] = []
    with loop_by_default(sines(), PrecisionConfig()) as loop:
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
        for _ in range(3):
            loop.train_epoch()
            ticks.append(loop.tick())
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
    details = [each.detail for each in ticks[0].observation.faults if each.kind is FaultKind.PRECISION_REFUSED]
    start = "bf16 is not offered to layers where it changes the outputs of the new model: 0.linear ("
    assert next(detail for detail in details if detail.startswith("bf16")).startswith(start)
    assert not any("1.linear" in detail for detail in details)
    assert {each.name: each.supported for each in ticks[0].observation.layers}["0.linear"] == (FP32,)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [(PrecisionConfig(enabled=False), {}), (PrecisionConfig(), {"revert_slowdowns": False})],
    ids=["one precision", "the printed rules"],
)
def test_nothing_is_withdrawn_where_nothing_is_judged(precision: PrecisionConfig, settings: dict) -> None:
    with loop_by_default(sines(), precision, **settings) as loop:
        assert set(loop.plan.precision.values()) == {BF16}
