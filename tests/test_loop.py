from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tests.build import BF16, FP16, FP32, ConvNet, CountingSource, Limited, blobs, cross_entropy, images, mlp, same
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import replay
from triaccel_ray.events import EventLog, Start, Tick, read_events
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB
from triaccel_ray.plan import FaultKind, ReasonCode
from triaccel_ray.sources import TensorSource

PRECISION = PrecisionConfig(tau_low=6e-4, tau_high=2.5e-3, dwell_ticks=0, patience_ticks=1)
CURVATURE = CurvatureConfig(every_steps=8, num_samples=8, tau_curv=0.45, alpha=0.1)
BATCH = BatchConfig(
    start=8, minimum=4, maximum=16, granularity=4, step_up=4, step_down=4, dwell_ticks=0, cap_ticks=3, rho_low=0.95,
    rho_high=1.0, lr_rule="sqrt",
)  # fmt: skip
CONFIG = ControlConfig(every_steps=4, precision=PRECISION, curvature=CURVATURE, batch=BATCH)
QUIET = replace(CONFIG, precision=PrecisionConfig(enabled=False, initial=FP32), curvature=CurvatureConfig(enabled=False))


def loop_of(model: nn.Module, data: Any, config: ControlConfig = CONFIG, **options: Any) -> tuple[ControlLoop, list[Tick]]:
    """A loop, and the ticks that it will have made."""
    ticks: list[Tick] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    options = {"loss": cross_entropy, **options}
    return ControlLoop(model, optimizer, data=data, config=config, on_tick=ticks.append, **options), ticks


def test_a_net_learns_with_every_strategy_on() -> None:
    loop, ticks = loop_of(mlp(), blobs(240))
    stats = [loop.train_epoch() for _ in range(3)]
    result = loop.evaluate(blobs(100, seed=1))
    assert result.accuracy >= 99.0
    assert result.loss < 0.1
    assert [each.epoch for each in stats] == [1, 2, 3]
    assert [each.num_samples for each in stats] == [240] * 3
    assert stats[2].loss < 0.1 < stats[0].loss
    assert loop.num_steps == sum(each.num_steps for each in stats)
    seen = {level for tick in ticks for level in tick.applied.plan.precision.values()}
    assert seen == {FP16, BF16, FP32}
    assert {tick.applied.plan.batch_size for tick in ticks} == {8, 12, 16} - ({8} if ticks[0].applied.plan.batch_size > 8 else set())
    assert any(scale < 1.0 for tick in ticks for scale in tick.applied.plan.lr_scale.values())
    codes = {reason.code for tick in ticks for reason in tick.decision.reasons}
    assert {ReasonCode.VARIANCE, ReasonCode.CURVATURE, ReasonCode.LR_SCALE, ReasonCode.MEMORY_LOW} <= codes


def test_ticks_and_measurements_come_at_their_intervals() -> None:
    loop, ticks = loop_of(mlp(), blobs(240))
    for _ in range(26):
        loop.step()
    assert [tick.observation.step for tick in ticks] == [4, 8, 12, 16, 20, 24]
    assert [tick.observation.tick for tick in ticks] == [0, 1, 2, 3, 4, 5]
    measured = [all(layer.eigenvalues for layer in tick.observation.layers) for tick in ticks]
    assert measured == [False, True] * 3
    assert [tick.observation.noise is not None for tick in ticks] == measured
    assert all(layer.variance is not None for tick in ticks for layer in tick.observation.layers)
    assert all(tick.observation.plan == before.applied.plan for before, tick in zip(ticks, ticks[1:], strict=False))


def test_the_log_reproduces_every_decision(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(Start(control=CONFIG))
    loop, ticks = loop_of(mlp(), blobs(100), log=log)
    for _ in range(4):
        loop.train_epoch()
    log.close()
    start, *logged = (event.record for event in read_events(log.path))
    assert logged == ticks
    assert isinstance(start, Start)
    recorded = [(tick.observation, tick.decision) for tick in logged if isinstance(tick, Tick)]
    assert len(recorded) >= 8
    again = replay(start.control, recorded)
    assert again.diverged_at is None
    assert list(again.decisions) == [decision for _, decision in recorded]
    other = replay(replace(CONFIG, precision=replace(PRECISION, tau_low=0.0, tau_high=1e-9)), recorded)
    assert other.diverged_at == 0


@pytest.mark.parametrize("augment", [None, lambda inputs, generator: inputs])
def test_every_sample_counts_exactly_once_an_epoch(augment: Any) -> None:
    source = CountingSource(*blobs(101), augment=augment)
    loop, _ = loop_of(nn.Sequential(mlp(), Limited(9)), source, replace(CONFIG, curvature=CurvatureConfig(enabled=False)))
    passed: list[Tensor] = []
    for _ in range(3):
        source.drawn.clear()
        loop.train_epoch()
        parts = [indices for indices in source.drawn if len(indices) <= 9]  # larger ones failed and came again
        passed.append(torch.cat(parts))
    assert all(torch.equal(samples.sort().values, torch.arange(101)) for samples in passed)


def test_the_epochs_loss_is_that_of_its_own_steps() -> None:
    loop, _ = loop_of(mlp(), blobs(32), QUIET)
    while loop.feed.epoch == 0:
        loop.step()
    for group in loop.optimizer.optimizer.param_groups:
        group["lr"] = 0.0
    stats = loop.train_epoch()
    expected = cross_entropy(loop.model(loop.feed.source.batch(torch.arange(32), None)[0]), blobs(32)[1])
    assert stats.loss == pytest.approx(expected.item(), rel=1e-5)
    assert stats.num_steps <= 4
    assert 0.0 < loop.epoch_seconds_so_far + stats.seconds < 60.0


def test_an_out_of_memory_error_shrinks_the_batch_until_memory_is_back() -> None:
    model = nn.Sequential(mlp(), Limited(12))
    loop, ticks = loop_of(model, blobs(240), QUIET)
    while not any(tick.observation.faults for tick in ticks):
        loop.step()
    fault = ticks[-1].observation.faults[0]
    assert (fault.kind, fault.batch_size, fault.micro_batch_size) == (FaultKind.OUT_OF_MEMORY, 16, 8)
    assert loop.plan.batch_size == 8
    model[1].limit = 100
    first = len(ticks)
    while loop.plan.batch_size < 16:
        loop.step()
    sizes = [tick.applied.plan.batch_size for tick in ticks[first:]]
    assert sizes == sorted(sizes)
    assert sizes[:2] == [8, 8]  # capped for a while
    assert not any(tick.observation.faults for tick in ticks[first:])


class Wide(nn.Module):
    """Two MiB of activations a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 2**18)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(inputs))


@pytest.mark.parametrize(
    ("room", "rho_low", "rho_high", "grows"), [(600, 0.05, 0.1, False), (600, 0.9, 1.0, True), (60, 0.9, 1.0, False)]
)
def test_the_batch_follows_the_share_of_the_budget(room: int, rho_low: float, rho_high: float, grows: bool) -> None:
    batch = BatchConfig(
        start=64, minimum=16, maximum=96, granularity=16, step_up=16, step_down=16, dwell_ticks=0, rho_low=rho_low,
        rho_high=rho_high,
    )  # fmt: skip
    data = (torch.ones(512, 1), torch.zeros(512))
    budget = psutil.Process().memory_info().rss + room * MIB
    loop, ticks = loop_of(
        Wide(),
        data,
        replace(QUIET, batch=batch, every_steps=1),
        loss=lambda outputs, targets: outputs.mean(),
        memory_budget=budget,
    )
    loop.step()
    loop.step()
    assert (loop.plan.batch_size > 64) == grows
    assert all(tick.observation.memory.limit_bytes == budget for tick in ticks)
    exceeded = [fault for tick in ticks for fault in tick.observation.faults]
    assert bool(exceeded) == (room == 60)
    assert all("of a budget of" in fault.detail for fault in exceeded)
    loop.close()


class Moody(Limited):
    """Fails when it is not training, as a measurement does it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(1000)
        self.error = error

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            raise self.error
        return inputs


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room for curvature"), MemoryError()])
def test_a_measurement_that_does_not_fit_is_survived(error: Exception) -> None:
    loop, ticks = loop_of(nn.Sequential(mlp(), Moody(error)), blobs(240))
    loop.train_epoch()
    (fault,) = ticks[1].observation.faults
    assert (fault.kind, fault.phase, fault.step) == (FaultKind.OUT_OF_MEMORY, "curvature", 8)
    assert fault.micro_batch_size == 8
    assert fault.detail == (str(error) or "MemoryError")
    assert all(layer.eigenvalues is None for tick in ticks for layer in tick.observation.layers)
    assert ticks[-1].observation.loss < ticks[0].observation.loss  # type: ignore[operator]


def test_other_errors_of_a_measurement_propagate() -> None:
    loop, _ = loop_of(nn.Sequential(mlp(), Moody(RuntimeError("shapes do not match"))), blobs(240))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        loop.train_epoch()


def test_an_evaluation_that_does_not_fit_is_a_fault_of_the_next_tick() -> None:
    model = nn.Sequential(mlp(), Limited(8))
    loop, ticks = loop_of(model, blobs(240), QUIET)
    model[1].limit = 3
    assert loop.evaluate(blobs(40)).num_samples == 40
    model[1].limit = 100
    tick = loop.tick()
    assert [(fault.phase, fault.micro_batch_size) for fault in tick.observation.faults] == [("evaluation", 4), ("evaluation", 2)]
    assert ticks == [tick]


def test_overflows_are_skipped_and_counted() -> None:
    config = replace(CONFIG, precision=PrecisionConfig(enabled=False, initial=FP16), curvature=CurvatureConfig(enabled=False))
    model = nn.Sequential(nn.Linear(8, 4))
    loop, ticks = loop_of(model, blobs(240), config, loss=lambda outputs, targets: 1e3 * cross_entropy(outputs, targets))
    before = model[0].weight.detach().clone()
    loop.step()
    assert torch.equal(model[0].weight, before)
    for _ in range(19):
        loop.step()
    assert 0 < loop.num_skipped < 20
    assert ticks[-1].observation.num_skipped == loop.num_skipped
    assert ticks[-1].observation.loss_scale == 2.0 ** (16 - loop.num_skipped)
    assert not torch.equal(model[0].weight, before)
    assert model[0].weight.isfinite().all()


def test_the_schedule_is_a_factor_on_the_learning_rate() -> None:
    model, reference = mlp(), mlp()
    loop, _ = loop_of(model, blobs(32), QUIET, schedule=lambda epoch: 0.5 if epoch == 0.25 else 0.0)
    loop.step()
    assert same(dict(model.state_dict()), dict(reference.state_dict()))
    loop.step()
    indices = loop.feed._order[8:16]
    inputs, targets = (tensor[indices] for tensor in blobs(32))
    cross_entropy(reference(inputs), targets).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(reference.parameters(), lr=0.025).step()
    torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))


def test_closing_leaves_an_ordinary_model() -> None:
    model, other = ConvNet(), ConvNet(seed=1)
    loop, _ = loop_of(model, TensorSource(*images(64)), replace(CONFIG, precision=replace(PRECISION, tau_high=1e9)))
    loop.train_epoch()
    loop.close()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert all(p.dtype is torch.float32 for p in model.parameters())
    other.load_state_dict(model.state_dict())
    inputs, _ = images(8, seed=3)
    assert torch.equal(model.eval()(inputs), other.eval()(inputs))


@pytest.mark.parametrize("model", [nn.BatchNorm1d(4), nn.ReLU()])
def test_a_model_without_a_layer_is_refused(model: nn.Module) -> None:
    parameter = nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match="has no trainable weight of two or more dimensions"):
        ControlLoop(model, torch.optim.SGD([parameter]), cross_entropy, blobs(8))


def test_a_budget_without_room_is_refused_and_leaves_the_model_alone() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="the process already holds"):
        loop_of(model, blobs(8), memory_budget=MIB)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.gpu
def test_a_net_learns_on_a_gpu_under_a_budget() -> None:
    model = ConvNet().cuda()
    loop, ticks = loop_of(model, images(240), memory_budget=4 * 2**30)
    for _ in range(6):
        loop.train_epoch()
    assert loop.evaluate(images(100, seed=1)).accuracy >= 99.0
    assert {tick.observation.memory.limit_bytes for tick in ticks} == {4 * 2**30}
    assert all(tick.observation.memory.allocated_peak_bytes > 0 for tick in ticks)
    loop.close()


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_the_device() -> None:
    model = ConvNet().cuda()
    loop, _ = loop_of(model, images(240), replace(CONFIG, every_steps=1000, curvature=CurvatureConfig(enabled=False)))
    for level in (FP16, BF16):
        loop._precision.set({"first": level})
        loop.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    loop.close()
