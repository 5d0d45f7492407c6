import contextlib
import copy
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import (
    BF16,
    CONFIG,
    CURVATURE,
    FP16,
    FP32,
    PRECISION,
    QUIET,
    ConvNet,
    CountingSource,
    Limited,
    blobs,
    cross_entropy,
    images,
    loop_of,
    mlp,
    run,
    same,
    values,
)
from tests.host_sync import no_host_sync
from triaccel_ray.apply import precision as apply_precision
from triaccel_ray.config import CurvatureConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.decide import replay
from triaccel_ray.records.events import End, EventLog, Start, read_events
from triaccel_ray.records.plan import ReasonCode


def test_a_net_learns_with_every_strategy_on() -> None:
    loop, ticks = loop_of(mlp(), blobs(240), replace(CONFIG, curvature=replace(CURVATURE, smoothing=0.0)))
    stats = [loop.train_epoch() for _ in range(3)]
    result = loop.evaluate(blobs(100, seed=1))
    assert result.metrics["accuracy"] >= 99.0
    assert result.loss < 0.1
    assert [each.epoch for each in stats] == [1, 2, 3]
    assert [each.num_samples for each in stats] == [240] * 3
    assert stats[2].loss < 0.1 < stats[0].loss
    assert loop.num_steps == sum(each.num_steps for each in stats)
    seen = {level for tick in ticks for level in tick.applied.plan.precision.values()}
    assert seen == {FP16, BF16, FP32}
    assert [tick.applied.plan.batch_size for tick in ticks][-1] == 16
    assert any(scale < 1.0 for tick in ticks for scale in tick.applied.plan.lr_scale.values())
    codes = {reason.code for tick in ticks for reason in tick.decision.reasons}
    assert {ReasonCode.VARIANCE, ReasonCode.CURVATURE, ReasonCode.LR_SCALE, ReasonCode.MEMORY_LOW} <= codes


def test_a_suspended_loop_leaves_the_model_to_compute_in_fp32() -> None:
    model, (inputs, _) = mlp(), blobs(8)
    expected = model(inputs)
    fixed = replace(QUIET.precision, enabled=False, initial=BF16, allow_slow_precisions=True)
    loop, _ = loop_of(model, blobs(24), replace(QUIET, precision=fixed))
    assert model(inputs).dtype is torch.bfloat16
    with loop.suspended():
        assert torch.equal(model(inputs), expected)
    assert model(inputs).dtype is torch.bfloat16
    model.eval()
    loop.step()
    assert model.training
    assert loop.epoch_loss[1] == 8
    loop.close()
    with pytest.raises(RuntimeError, match=r"the loop is closed .*; to train on, build another loop"):
        loop.train_epoch()
    assert loop.evaluate(blobs(8)).num_samples == 8


class OwnModes(nn.Module):
    """A network whose own `train` keeps its norm in eval mode, and in eval mode adds an adapter to its weights."""

    is_merged = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def train(self, mode: bool = True) -> "OwnModes":
        super().train(mode)
        self.norm.eval()
        self.is_merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.norm(inputs))


@pytest.mark.parametrize("is_part", [True, False])
def test_a_models_own_train_and_eval_are_called_and_a_module_keeps_its_mode(is_part: bool) -> None:
    model, norm = OwnModes(), nn.BatchNorm1d(8).eval()
    loop, _ = loop_of(nn.Sequential(norm, model) if is_part else model, blobs(24), QUIET)
    for _ in range(2):
        assert not model.is_merged
        loop.train_epoch()
        loop.evaluate(blobs(8))
    assert not model.is_merged
    assert model.norm.num_batches_tracked == norm.num_batches_tracked == 0
    assert not model.norm.running_mean.any()


def test_a_late_decision_holds_three_steps_later_and_is_recorded_five_after_that() -> None:
    loop, ticks = loop_of(mlp(), blobs(240), replace(QUIET, every_steps=9))
    loop._pending.decides_late = True
    seen = []
    for _ in range(18):
        loop.step()
        seen.append((loop.plan.batch_size, len(ticks)))
    assert seen == [(8, 0)] * 11 + [(12, 0)] * 5 + [(12, 1)] * 2


def test_a_decision_does_not_wait_for_the_next_epoch() -> None:
    loop, ticks = loop_of(mlp(), blobs(32), replace(QUIET, revert_slowdowns=False))
    loop._pending.decides_late = True
    loop.train_epoch()
    assert loop.num_steps == 4
    assert [tick.observation.step for tick in ticks] == [4]
    assert loop.plan.batch_size == 12


def test_ticks_and_measurements_come_at_their_intervals() -> None:
    loop, ticks = loop_of(mlp(), blobs(240))
    run(loop, 26)
    assert [tick.observation.step for tick in ticks] == [4, 8, 12, 16, 20, 24]
    assert [tick.observation.tick for tick in ticks] == [0, 1, 2, 3, 4, 5]
    measured = [all(layer.eigenvalues for layer in tick.observation.layers) for tick in ticks]
    assert measured == [False, True] * 3
    assert [tick.observation.noise is not None for tick in ticks] == measured
    assert all(layer.variance is not None for tick in ticks for layer in tick.observation.layers)
    assert all(tick.observation.plan == before.applied.plan for before, tick in pairwise(ticks))


def test_the_log_reproduces_every_decision(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.append(Start(control=CONFIG))
    loop, ticks = loop_of(mlp(), blobs(100), log=log)
    for _ in range(5):
        loop.train_epoch()
    log.close()
    start, *logged = (event.record for event in read_events(log.path))
    assert logged == ticks
    recorded = [(tick.observation, tick.decision) for tick in logged]
    assert len(recorded) >= 8
    again = replay(start.control, recorded)
    assert again.diverged_at is None
    assert list(again.decisions) == [decision for _, decision in recorded]


@pytest.mark.parametrize("ending", ["in good order", "by an error", "after its log"])
def test_a_log_ends_with_its_loop_unless_by_an_error(tmp_path: Path, ending: str) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    loop, _ = loop_of(mlp(), blobs(24), QUIET, on_tick=log.append)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(loop):
        if ending == "by an error":
            raise KeyboardInterrupt
        if ending == "after its log":
            log.close()
    if not log.closed:
        log.close()
    ended = [Start(control=QUIET), End(status="finished")]
    assert [event.record for event in read_events(log.path)] == ended[: 2 if ending == "in good order" else 1]


def test_every_sample_counts_exactly_once_an_epoch() -> None:
    source = CountingSource(*blobs(101))
    # Neither curvature nor a lower precision is tried on samples of its own.
    config = replace(CONFIG, curvature=CurvatureConfig(enabled=False), revert_slowdowns=False)
    loop, _ = loop_of(nn.Sequential(mlp(), Limited(9)), source, config)
    passed: list[Tensor] = []
    for _ in range(3):
        source.drawn.clear()
        loop.train_epoch()
        parts = [indices for indices in source.drawn if len(indices) <= 9]  # larger ones failed and came again
        passed.append(torch.cat(parts))
    assert all(torch.equal(samples.sort().values, torch.arange(101)) for samples in passed)


def test_a_device_without_bf16_trains_in_fp16_with_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = {BF16: "this GPU has no BF16 instructions"}
    monkeypatch.setattr(apply_precision, "precisions_without_benefit", lambda *_, **__: refuse)
    config = replace(CONFIG, precision=PrecisionConfig(tau_low=0.0, tau_high=math.inf))
    with loop_of(mlp(), blobs(96), config)[0] as loop:
        losses = [loop.train_epoch().loss for _ in range(6)]
        assert set(loop.plan.precision.values()) == {FP16}
        assert float(loop.loss_scale.factor(True)) > 1.0
        assert losses[-1] < 0.5 * losses[0]


def test_no_batch_grows_beyond_the_samples() -> None:
    with loop_of(mlp(), blobs(15), QUIET)[0] as loop:
        for _ in range(40):
            loop.train_epoch()
        assert QUIET.batch.start < loop.plan.batch_size <= 15 < QUIET.batch.maximum
    with loop_of(mlp(), blobs(3), QUIET)[0] as loop:
        loop.train_epoch()
        assert loop.plan.batch_size == QUIET.batch.start


def test_the_learning_rate_follows_the_batch() -> None:
    model = mlp()
    loop, _ = loop_of(model, blobs(240), replace(QUIET, batch=replace(QUIET.batch, lr_rule="linear")))
    while loop.plan.batch_size < 16:
        loop.step()
    before = model[0].weight.detach().clone()
    loop.step()
    momentum = loop.optimizer.optimizer.state[model[0].weight]["momentum_buffer"]
    torch.testing.assert_close(model[0].weight, before - 0.05 * 2.0 * momentum)


def test_the_schedule_is_a_factor_on_the_learning_rate() -> None:
    model, reference = mlp(), mlp()
    loop, _ = loop_of(model, blobs(32), QUIET, schedule=lambda epoch: 0.5 if epoch == 0.25 else 0.0)
    loop.step()
    assert same(dict(model.state_dict()), dict(reference.state_dict()))
    loop.step()
    optimizer = torch.optim.SGD(reference.parameters(), momentum=0.9)
    for lr, indices in zip((0.0, 0.025), loop.sampler._order.split(8), strict=False):
        inputs, targets = (tensor[indices] for tensor in blobs(32))
        optimizer.zero_grad()
        cross_entropy(reference(inputs), targets).backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
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
    torch.testing.assert_close(model.eval()(inputs), other.eval()(inputs))  # in another memory layout


def test_the_last_judgement_has_the_captured_steps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = loop_of(mlp(), blobs(40))
    loop.train_epoch()
    released: list[bool] = []
    monkeypatch.setattr(loop._training.pool, "release", lambda: released.append(True))
    before = loop.evaluate(blobs(100, seed=1))
    assert released == []
    assert loop.evaluate(blobs(100, seed=1), is_last=True) == before
    assert released == [True]


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_wait_for_the_device() -> None:
    model = ConvNet().cuda()
    loop, _ = loop_of(model, images(240), replace(CONFIG, every_steps=1000, curvature=CurvatureConfig(enabled=False)))
    for level in (FP16, BF16):
        loop._training.precision.set({"first": level})
        run(loop, 2)
        with no_host_sync():
            loop.step()
    loop.close()


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -0.1, None, torch.ones(2)])
def test_a_schedule_that_gives_no_rate_is_refused_before_the_step(factor: Any) -> None:
    loop, _ = loop_of(mlp(), blobs(64), schedule=lambda epoch: 1.0 if epoch == 0.0 else factor)
    loop.step()
    before = values(loop.model)
    with pytest.raises(ValueError, match=r"schedule\(0\.125\) = .*: must be a finite number >= 0"):
        loop.step()
    assert same(values(loop.model), before)


def test_a_model_has_one_loop_at_a_time() -> None:
    model = mlp()
    loop, _ = loop_of(model, blobs(64))
    for other in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"another loop: close\(\) that one first"):
            loop_of(other, blobs(64))
    loop.close()
    loop_of(model, blobs(64))
