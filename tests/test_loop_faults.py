"""What a loop survives: too little memory, overflows, evaluations that do not fit."""

import copy
from dataclasses import replace
from typing import Any, Self

import psutil
import pytest
import torch
from torch import nn

from tests.build import (
    CPU,
    QUIET,
    Limited,
    Starved,
    Wired,
    blobs,
    cross_entropy,
    loop_of,
    mlp,
    run,
    same,
    values,
)
from triaccel_ray.config import BatchConfig, PrecisionConfig
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.decide import replay
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import MIB, memory_meter
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import FaultKind, Precision


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


def test_without_on_tick_each_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(QUIET, precision=PrecisionConfig())
    loop, _ = loop_of(nn.Sequential(mlp(), Limited(12)), blobs(240), config, on_tick=None)
    with caplog.at_level("INFO", logger="triaccel_ray"):
        for _ in range(4):
            loop.train_epoch()
    logged = [(each.levelname, each.getMessage().split(": ")[1]) for each in caplog.records]
    assert logged.count(("WARNING", FaultKind.OUT_OF_MEMORY)) == 1
    assert ("INFO", FaultKind.PRECISION_REFUSED) in logged
    assert len({each.getMessage() for each in caplog.records}) == len(caplog.records)


def test_closing_frees_the_graphs_before_weights_are_joined_which_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = loop_of(mlp(), blobs(24), QUIET)
    training, order = loop._training, []
    for name, owner in {"graphs": training.pool, "weights": training.precision.weights}.items():
        release = owner.release
        monkeypatch.setattr(owner, "release", lambda name=name, release=release: (order.append(name), release()))
    loop.close()
    assert order[0] == "graphs"
    assert order[-1] == "weights"


_LEAN = {"weights": "split", "step_in_backward": True}


@pytest.mark.parametrize(
    ("named", "fused", "form", "advice"),
    [
        ("memory", True, {}, ", or set weights = 'split' or optimizer_state = '8bit' or step_in_backward = True"),
        ("memory budget", True, _LEAN, ", or set optimizer_state = '8bit'"),
        ("memory", True, {**_LEAN, "optimizer_state": "8bit"}, ""),
        ("memory", False, {}, ""),  # they need the fused optimizer
    ],
)
def test_an_error_of_memory_says_what_fills_it_and_names_the_settings_that_are_left(
    named: str, fused: bool, form: Any, advice: str
) -> None:
    budget = memory_meter(CPU).limit_bytes if named == "memory budget" else None
    model, config = nn.Sequential(mlp(), Limited(0)), replace(QUIET, **form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    loop = ControlLoop(model, optimizer, cross_entropy, blobs(24), config=config, memory_budget=budget)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loop.step()
    limit, idle = round(loop.memory.limit_bytes / MIB), round(loop.memory.idle_bytes / MIB)
    assert str(raised.value) == (
        f"memory ran out, and smaller micro-batches could not help. The {named} of this machine is {limit} MiB, of "
        f"which the process held {idle} MiB before the first batch. Give more memory{advice}. It was: no room for more "
        "samples"
    )


def gathering() -> nn.Module:
    """Adds up a layer's outputs in a tensor of its own, which is FP32."""
    total = lambda self, x: torch.zeros(len(x), 4).index_add_(0, torch.arange(len(x)), self.linear(x))  # noqa: E731
    return Wired(total, linear=nn.Linear(8, 4))


def test_an_error_of_code_that_takes_no_16_bits_says_how_to_train_in_fp32() -> None:
    low = replace(QUIET.precision, initial=Precision.BF16, allow_slow_precisions=True)
    loop, _ = loop_of(gathering(), blobs(24), replace(QUIET, precision=low))
    with pytest.raises(RuntimeError, match=r"scalar type \(layers return BF16 or FP16, .*initial=Precision.FP32\)"):
        loop.step()
    loop, _ = loop_of(gathering(), blobs(24), QUIET)
    loop.step()


@pytest.mark.parametrize(
    ("room", "rho_low", "rho_high", "grows"), [(600, 0.05, 0.1, False), (600, 0.9, 1.0, True), (60, 0.9, 1.0, False)]
)
def test_the_batch_follows_the_share_of_the_budget(room: int, rho_low: float, rho_high: float, grows: bool) -> None:
    batch = BatchConfig(
        start=64, minimum=16, maximum=96, granularity=16, step_up=16, step_down=16, dwell_ticks=0, rho_low=rho_low,
        rho_high=rho_high,
    )  # fmt: skip
    wide = nn.Sequential(nn.Linear(1, 2**18), nn.Sigmoid())  # two MiB of activations a sample
    data = (torch.ones(512, 1), torch.zeros(512))
    memory_meter(CPU).release()  # what earlier tests have left on the heap would be room, too
    budget = psutil.Process().memory_info().rss + room * MIB
    config = replace(QUIET, batch=batch, every_steps=1)
    loop, ticks = loop_of(wide, data, config, loss=lambda outputs, _: outputs.mean(), memory_budget=budget)
    for _ in range(6):  # the step time of four, after two that do not count
        loop.step()
    assert (loop.plan.batch_size > 64) == grows
    assert all(tick.observation.memory.limit_bytes == budget for tick in ticks)
    exceeded = [fault for tick in ticks for fault in tick.observation.faults]
    assert bool(exceeded) == (room == 60)
    assert all("of a budget of" in fault.detail for fault in exceeded)
    loop.close()


def test_an_evaluation_that_does_not_fit_is_a_fault_of_the_next_tick() -> None:
    model = nn.Sequential(mlp(), Limited(8))
    loop, ticks = loop_of(model, blobs(240), QUIET)
    model[1].limit = 3
    assert loop.evaluate(blobs(40)).num_samples == 40
    model[1].limit = 100
    tick = loop.tick()
    found = [(fault.phase, fault.micro_batch_size) for fault in tick.observation.faults]
    assert found == [("evaluation", 4), ("evaluation", 2)]
    assert ticks == [tick]


def test_a_plan_that_could_not_be_applied_is_a_fault_of_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, ticks = loop_of(nn.Sequential(mlp(), Limited(1)), blobs(240), QUIET)
    step = loop._training.steps.step
    prepare = step.set_num_micro_batches

    def narrow(num_micro_batches: int, min_micro_batch_size: int = 1) -> None:
        if num_micro_batches > 2:
            raise RuntimeError("no memory for more parts")
        prepare(num_micro_batches, min_micro_batch_size)

    monkeypatch.setattr(step, "set_num_micro_batches", narrow)
    while len(ticks) < 2:
        loop.step()
    assert ticks[0].decision.plan.num_micro_batches == 4
    assert ticks[0].applied.plan.num_micro_batches == 1
    failed = [fault for fault in ticks[1].observation.faults if fault.kind is FaultKind.APPLY_FAILED]
    assert failed == list(ticks[0].applied.faults)
    assert [fault.detail for fault in failed] == ["RuntimeError: no memory for more parts"]


def test_an_optimizer_without_memory_is_a_fault_and_no_step_is_lost() -> None:
    models = mlp(), mlp()
    ticks: list[Tick] = []
    for model, fails_at in zip(models, (3, 0), strict=True):
        optimizer = Starved(model.parameters(), fails_at=fails_at)
        loop = ControlLoop(model, optimizer, cross_entropy, blobs(64), config=QUIET, on_tick=ticks.append)
        run(loop, 3)
        loop.tick()
    assert same(values(models[0]), values(models[1]))
    faults = [fault for tick in ticks for fault in tick.observation.faults]
    assert [(fault.phase, fault.detail) for fault in faults] == [("optimizer", "no room for the step")]
    assert ticks[0].applied.plan.batch_size < 16  # the batch is what memory can be had from


def test_a_late_decision_hears_of_what_failed_since_the_measurement() -> None:
    model = nn.Sequential(mlp(), Limited(1000))
    loop, ticks = loop_of(model, blobs(240), QUIET)
    loop._pending.decides_late = True
    run(loop, 4)
    model[1].limit = 4
    run(loop, 3)
    loop._pending.record()
    (tick,) = ticks
    assert (tick.observation.step, [fault.step for fault in tick.observation.faults]) == (4, [4])
    assert loop.plan.batch_size == 4  # where what was measured alone would have made it grow
    run(loop, 5)
    loop._pending.record()
    assert ticks[1].observation.faults == ()  # told once
    again = replay(QUIET, [(each.observation, each.decision) for each in ticks])
    assert again.diverged_at is None


class Closing(TensorSource):
    """Knows whether it has been closed."""

    is_closed = False

    def to(self, device: torch.device) -> Self:
        return self

    def close(self) -> None:
        self.is_closed = True


def test_a_loop_that_fails_while_it_closes_lets_go_of_everything() -> None:
    def full(tick: Tick) -> None:
        raise OSError("no space left on device")

    model, source = mlp(), Closing(*blobs(240))
    loop, _ = loop_of(model, source, on_tick=full)
    loop._pending.decides_late = True
    run(loop, 4)
    with pytest.raises(OSError, match="no space left"):
        loop.close()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert source.is_closed
    loop_of(model, blobs(8))[0].close()  # free for another loop


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_skipped_step_does_not_spoil_running_statistics(value: float) -> None:
    inputs, targets = blobs(240)
    inputs[100, 3] = value
    loop, _ = loop_of(nn.Sequential(nn.BatchNorm1d(8), mlp()), (inputs, targets), QUIET)
    norm = loop.model[0]
    loop.train_epoch()
    assert loop.num_skipped == 1
    assert loop.evaluate(blobs(60)).loss < 10.0
    state = copy.deepcopy(loop.state_dict())
    saved = state["model"]["0.running_var"].clone()
    loop.train_epoch()
    state["model"]["0.running_mean"][3] = 7.0
    loop.load_state_dict(state)
    norm.running_mean[3] = value
    assert loop.state_dict()["model"]["0.running_mean"][3] == 7.0
    loop.train_epoch()
    loop.close()
    assert loop.num_skipped == 2
    for statistics in (saved, norm.running_mean, norm.running_var):
        assert statistics.isfinite().all()
    clean = inputs[torch.arange(240) != 100]
    torch.testing.assert_close(norm.running_var, clean.var(0), rtol=0.3, atol=0.0)


def test_a_model_may_be_moved_before_its_loop_is_closed() -> None:
    loop, _ = loop_of(nn.Sequential(nn.BatchNorm1d(8), mlp()), blobs(240), QUIET)
    loop.step()
    loop.model.to("meta")
    loop.close()
    assert "forward" not in vars(loop.model[0])


def test_regions_are_measured_again_after_a_memory_plan_that_was_mispredicted() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 4))
    config = replace(QUIET, every_steps=8, batch=BatchConfig(enabled=False, start=16, minimum=16, maximum=16))
    loop, ticks = loop_of(model, blobs(240), config, memory_budget=memory_meter(CPU).limit_bytes)
    run(loop, 16)
    before = ticks[-1].observation.profile
    assert before is not None
    loop.state = replace(loop.state, memory=replace(loop.state.memory, predicted_bytes=1, is_compared=False))
    run(loop, 8)
    assert ticks[-1].decision.remeasures_regions
    run(loop, 8)
    again = ticks[-1].observation.profile
    assert again is not None
    assert again.regions != before.regions  # the times have changed
    assert [each.saved_bytes for each in again.regions] == [each.saved_bytes for each in before.regions]
    assert not ticks[-1].decision.remeasures_regions
    loop.close()
