"""Precisions are tried on some samples: those of a new model, and lower ones before they take effect."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triaccel_ray import BatchConfig, ControlConfig, ControlLoop, CurvatureConfig, PrecisionConfig
from triaccel_ray.cuda.random_states import host_random_state
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import FaultKind, Precision
from triaccel_ray.trainables.audio import Sine

BF16, FP32 = Precision.BF16, Precision.FP32


@contextmanager
def loop_of(model: nn.Module, inputs: Tensor, targets: Tensor, loss=F.mse_loss, **settings) -> Iterator[ControlLoop]:
    """A loop that trains in FP32 without ticks of its own, and whose ticks want BF16 for every layer."""
    torch.manual_seed(0)
    precision = PrecisionConfig(initial=FP32, dwell_ticks=0, patience_ticks=1, tau_low=0.0, overflow_bar_ticks=2)
    config = ControlConfig(
        every_steps=10**6, precision=precision, curvature=CurvatureConfig(enabled=False),
        batch=BatchConfig(enabled=False, start=64, minimum=64), **settings,
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    loop = ControlLoop(model, optimizer, loss, (inputs, targets), config=config)
    yield loop
    loop.close()


@contextmanager
def trained_siren(num_epochs: int = 5, **settings) -> Iterator[ControlLoop]:
    """A loop whose model has learned three oscillations; in BF16, its first layer's angles are off by radians."""
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 4096).unsqueeze(1)
    model = nn.Sequential(Sine(1, 64, 300.0, 1.0), Sine(64, 64, 30.0, 0.01), nn.Linear(64, 1))
    with loop_of(model, inputs, torch.sin(100 * inputs), **settings) as loop:
        for _ in range(num_epochs):
            loop.train_epoch()
        yield loop


def test_the_layer_that_needs_fp32_keeps_it_and_the_others_are_lowered() -> None:
    with trained_siren() as loop:
        loss = loop.train_epoch().loss
        assert loss < 0.01
        tick = loop.tick()
        assert set(tick.decision.plan.precision.values()) == {BF16}
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
        (fault,) = tick.applied.faults
        assert fault.kind is FaultKind.LOWERING_REFUSED
        assert fault.detail.startswith("a lower precision would raise the loss of 32 samples from 0.00")
        assert "0.linear fp32 -> bf16: " in fault.detail
        assert "1.linear" not in fault.detail
        assert loop.train_epoch().loss < 2 * loss


def test_without_the_trial_all_that_was_learned_is_lost() -> None:
    with trained_siren(revert_slowdowns=False) as loop:
        loss = loop.train_epoch().loss
        assert not loop.tick().applied.faults
        assert set(loop.plan.precision.values()) == {BF16}
        assert loop.train_epoch().loss > 10 * loss


def test_a_refused_layer_is_tried_again_after_a_time_that_doubles() -> None:
    with trained_siren() as loop:
        ticks: list[Tick] = []
        for _ in range(14):
            loop.step()
            ticks.append(loop.tick())
        refused = [index for index, each in enumerate(ticks) if each.applied.faults]
        assert refused == [0, 3, 8]  # 2 ticks, 4, 8
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
def test_trying_leaves_model_optimizer_and_random_numbers_as_they_were(accepts: bool) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        is_low = loops and loops[0]._training.precision.dtypes["layers.0"] is torch.bfloat16
        return F.cross_entropy(outputs, targets) + (9.0 if is_low and not accepts else 0.0)

    loops: list[ControlLoop] = []
    torch.manual_seed(0)
    model = Noisy()
    with loop_of(model, torch.randn(256, 8), torch.randint(0, 4, (256,)), loss) as loop:
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

    with loop_of(nn.Linear(4, 2), torch.randn(128, 4), torch.randn(128, 2), loss) as loop:
        loop.step()
        can_compute = False
        assert not loop.tick().applied.faults
        assert set(loop.plan.precision.values()) == {BF16}


def test_no_pass_is_made_while_no_precision_is_lowered() -> None:
    passes = []
    model = nn.Linear(4, 2)
    with loop_of(model, torch.randn(128, 4), torch.randn(128, 2)) as loop:
        loop.step()
        loop.tick()
        model.register_forward_hook(lambda *_: passes.append(1))
        loop.tick()
        assert not passes


def test_layers_that_do_harm_together_alone_are_all_kept() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        is_low = loops and set(loops[0]._training.precision.dtypes.values()) == {torch.bfloat16}
        return F.mse_loss(outputs, targets) + (9.0 if is_low else 0.0)

    loops: list[ControlLoop] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with loop_of(model, torch.randn(128, 4), torch.randn(128, 2), loss) as loop:
        loops.append(loop)
        loop.step()
        (fault,) = loop.tick().applied.faults
        assert set(loop.plan.precision.values()) == {FP32}
        assert "0 fp32 -> bf16: " in fault.detail
        assert "1 fp32 -> bf16: " in fault.detail


def loop_with(model: nn.Module, precision: PrecisionConfig, *, width: int = 1, **settings) -> ControlLoop:
    config = ControlConfig(precision=precision, curvature=CurvatureConfig(enabled=False), **settings)
    data = torch.randn(128, width), torch.randn(128, 1)
    return ControlLoop(model, torch.optim.Adam(model.parameters()), F.mse_loss, data, config=config)


def sines() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Sine(1, 64, 3000.0, 1.0), Sine(64, 64, 30.0, 0.01), nn.Linear(64, 1))


def test_a_layer_whose_rounding_changes_the_new_models_outputs_is_never_offered_that_precision() -> None:
    ticks: list[Tick] = []
    with contextlib.closing(loop_with(sines(), PrecisionConfig())) as loop:
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
        for _ in range(3):
            loop.train_epoch()
            ticks.append(loop.tick())
        assert dict(loop.plan.precision) == {"0.linear": FP32, "1.linear": BF16, "2": BF16}
    details = [each.detail for each in ticks[0].observation.faults if each.kind is FaultKind.PRECISION_REFUSED]
    assert any(detail.startswith("0.linear in bf16 changes the outputs of the new model by ") for detail in details)
    assert not any("1.linear" in detail for detail in details)
    assert {each.name: each.supported for each in ticks[0].observation.layers}["0.linear"] == (FP32,)


@pytest.mark.parametrize(
    ("precision", "settings"),
    [(PrecisionConfig(enabled=False), {}), (PrecisionConfig(), {"revert_slowdowns": False})],
    ids=["one precision", "the printed rules"],
)
def test_nothing_is_withdrawn_where_nothing_is_judged(precision: PrecisionConfig, settings: dict) -> None:
    with contextlib.closing(loop_with(sines(), precision, **settings)) as loop:
        assert set(loop.plan.precision.values()) == {BF16}


def test_an_ordinary_model_keeps_its_precisions() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 1))
    with contextlib.closing(loop_with(model, PrecisionConfig(), width=8)) as loop:
        assert set(loop.plan.precision.values()) == {BF16}


def test_outputs_of_zero_withdraw_nothing() -> None:
    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    with contextlib.closing(loop_with(model, PrecisionConfig(), width=8)) as loop:
        assert set(loop.plan.precision.values()) == {BF16}
