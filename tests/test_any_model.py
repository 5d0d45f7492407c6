"""Models, targets and gradients of other kinds than a tensor that is finite."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.build import BF16, FP16, FP32, QUIET, Wired, loop_of, run
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop, NonFiniteGradientsError
from triaccel_ray.records.events import EventLog
from triaccel_ray.records.plan import Precision


def config_of(level: Precision = FP32, **changes: Any) -> ControlConfig:
    precision = PrecisionConfig(enabled=False, initial=level, allow_slow_precisions=True)
    batch = replace(QUIET.batch, enabled=False)
    return replace(QUIET, precision=precision, batch=batch, **{"every_steps": 5, **changes})


def vectors(num_samples: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, 4, generator=generator), torch.randint(0, 3, (num_samples,), generator=generator)


class Pairs(torch.utils.data.Dataset[Any]):
    """Samples whose targets are a mapping of three entries."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), 1.0 + index)
        return x, {"a": x[:1], "b": x[:1] * 0, "c": x[:1] * 0}


def test_targets_that_are_a_mapping_weigh_as_many_samples_as_there_are() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    twin = copy.deepcopy(model)

    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return (outputs - targets["a"]).square().mean()

    loop = ControlLoop(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss, Pairs(), config=config_of())
    stats = loop.train_epoch()
    loop.close()
    inputs, targets = torch.utils.data.default_collate([Pairs()[index] for index in range(8)])
    expected = loss(twin(inputs), targets)
    expected.backward()
    torch.testing.assert_close(model.weight, twin.weight - 1e-3 * twin.weight.grad)
    assert stats.loss == pytest.approx(expected.item())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    plain = BaselineLoop(twin, optimizer, loss, Pairs(), method="fp32", batch_size=5)  # and one of 3
    assert plain.train_epoch().loss == pytest.approx(expected.item())


def test_a_gradient_is_unscaled_before_a_users_hook_clips_it() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(4, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    norms: list[float] = []
    for model, level in zip(models, (FP16, FP32), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

        def clip(optimizer: torch.optim.Optimizer, *_: Any, model: nn.Module = model) -> None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))

        optimizer.register_step_pre_hook(clip)
        loop = ControlLoop(model, optimizer, F.cross_entropy, vectors(8), config=config_of(level))
        loop.step()
        loop.close()
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("level", [FP32, BF16, FP16])
@pytest.mark.parametrize("fused", [True, False])
def test_the_global_norm_is_clipped_as_pytorch_does(level: Precision, fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    inputs, targets = vectors(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    config = config_of(level, clip_norm=0.05)
    loop = ControlLoop(model, optimizer, F.cross_entropy, (inputs, targets), config=config)
    loop.step()
    loop.close()
    F.cross_entropy(twin(inputs), targets).backward()
    assert float(nn.utils.clip_grad_norm_(twin.parameters(), 0.05)) > 0.05
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    tolerance = 1e-6 if level is FP32 else 2e-3
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=tolerance)


class Diverging:
    """A loss that is NaN in some calls."""

    def __init__(self, nan_in: range) -> None:
        self.nan_in, self.calls = nan_in, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy(outputs, targets)
        return loss * float("nan") if self.calls in self.nan_in else loss


@pytest.mark.parametrize("level", [FP32, BF16])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_with_a_nan_is_not_made_and_counted(level: Precision, fused: bool) -> None:
    model = nn.Linear(4, 3)
    loss, ticks = Diverging(range(0)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    loop = ControlLoop(model, optimizer, loss, vectors(), config=config_of(level), on_tick=ticks.append)
    loop.step()
    before = copy.deepcopy(model.state_dict())
    loss.nan_in = range(loss.calls + 1, loss.calls + 4)
    run(loop, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loop.step()
    loop.close()
    assert not torch.equal(model.weight, before["weight"])
    assert bool(model.weight.isfinite().all())
    assert (ticks[0].observation.num_skipped, ticks[0].observation.num_skipped_in_row) == (3, 0)
    assert ticks[0].observation.loss is not None


def test_a_training_that_has_diverged_ends_with_its_cause() -> None:
    loss = Diverging(range(0))
    loop, _ = loop_of(nn.Linear(4, 3), vectors(), config_of(max_skipped_steps=7), loss=loss)
    loss.nan_in = range(loss.calls + 1, 1000)
    run(loop, 9)
    with pytest.raises(NonFiniteGradientsError, match=r"of the last 10 steps were NaN or infinite, up to step 10"):
        loop.step()


def test_weights_beside_child_layers_are_told_of_once() -> None:
    token = nn.Parameter(torch.zeros(1, 4))
    model = Wired(lambda self, x: self.layer(x + self.token), token=token, layer=nn.Linear(4, 3))
    loop, ticks = loop_of(model, vectors(), config_of(every_steps=2))
    loop.train_epoch()
    loop.close()
    told = [fault.detail for tick in ticks for fault in tick.observation.faults if fault.kind.value == "not_a_layer"]
    assert told == ["weights beside child layers are no layers, and not adapted: token"]


def test_a_loop_that_cannot_begin_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    class Full(EventLog):
        def append(self, record: Any) -> None:
            raise OSError("no space left")

    model, log = nn.Linear(4, 3), Full(tmp_path / "events.jsonl")
    with contextlib.closing(log), pytest.raises(OSError, match="no space left"):
        loop_of(model, vectors(), config_of(), on_tick=log.append)
    assert "forward" not in model.__dict__
    loop_of(model, vectors(), config_of())[0].close()
