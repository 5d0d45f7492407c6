import copy
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.build import (
    BF16,
    FP16,
    FP32,
    QUIET,
    ConvNet,
    Limited,
    blobs,
    cross_entropy,
    images,
    loop_of,
    mlp,
    run,
    same,
    shift_and_noise,
    values,
)  # fmt: skip
from triaccel_ray.apply import fused_optimizer
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import (
    BatchConfig,
    ControlConfig,
    CurvatureConfig,
    ExecutionConfig,
    LossScaleConfig,
    PrecisionConfig,
)
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint
from triaccel_ray.records.plan import Plan

CONFIG = ControlConfig(
    every_steps=5,
    revert_slowdowns=False,  # time differs from run to run
    precision=PrecisionConfig(
        tau_low=9e-3, tau_high=3.2e-2, dwell_ticks=0, patience_ticks=1, allow_slow_precisions=True
    ),
    curvature=CurvatureConfig(every_steps=7, num_samples=8, tau_curv=15.0, alpha=0.1),
    batch=BatchConfig(
        start=8, minimum=4, maximum=20, granularity=4, step_up=4, step_down=4, dwell_ticks=1, oom_cooldown_ticks=2,
        rho_low=0.95, rho_high=1.0, lr_rule="adascale",
    ),
    loss_scale=LossScaleConfig(initial=2.0**24, growth_interval=4),
)  # fmt: skip
NUM_STEPS = 32
NOT_COMPARED = ("epoch_seconds", "epoch_joules", "memory_peaks", "timer")


class Recorded:
    """A loss that remembers its values, and draws from every global generator on the way."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        chance = 1.0 + 0.01 * (random.random() + np.random.rand() + torch.rand(()).item())
        loss = chance * cross_entropy(outputs, targets)
        self.values.append(loss.item())
        return loss


def control_loop(seed: int, optimizer: str, **changes: Any) -> tuple[ControlLoop, Recorded]:
    # A limit that the growing batch meets; what it costs to meet it is in the state too.
    model = nn.Sequential(ConvNet(seed=seed), Limited(18))
    return built(ControlLoop, model, OPTIMIZERS[optimizer], seed, config=replace(CONFIG, **changes))


def baseline_loop(seed: int, method: str = "fp32") -> tuple[BaselineLoop, Recorded]:
    return built(BaselineLoop, ConvNet(seed=seed), OPTIMIZERS["sgd"], seed, method=method, batch_size=8)


def built(kind: Any, model: nn.Module, optimizer: Any, seed: int, **options: Any) -> tuple[Any, Recorded]:
    loss, source = Recorded(), TensorSource(*images(90), augment=shift_and_noise)
    options = {"schedule": lambda epoch: 1.0 / (1.0 + epoch), "seed": seed, **options}
    loop = kind(model, optimizer(model.parameters()), loss, source, **options)
    loss.values.clear()  # of the check that the loop was built with
    return loop, loss


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def started(make: Any, seed: int) -> tuple[Any, Recorded]:
    """What `make` makes by that seed; all generators begin with it both before and after."""
    seeded(seed)
    loop, losses = make(seed)
    seeded(seed)
    return loop, losses


def state_of(loop: ControlLoop | BaselineLoop) -> dict[str, Any]:
    return {name: value for name, value in loop.state_dict().items() if name not in NOT_COMPARED}


def assert_resumes(make: Any, stop: int, path: Path) -> ControlLoop | BaselineLoop:
    """Runs without and with an interruption after `stop` steps; returns the uninterrupted run."""
    whole, losses = started(make, 1)
    run(whole, NUM_STEPS)
    expected = state_of(whole)

    first, losses_before = started(make, 1)
    run(first, stop)
    save_checkpoint(path, first.state_dict())
    first.step()  # what comes after the checkpoint is lost
    num_lost = len(losses_before.values)

    second, losses_after = started(make, 2)
    second.load_state_dict(load_checkpoint(path))
    run(second, NUM_STEPS - stop)
    found = state_of(second)
    for name in expected:
        assert same(found[name], expected[name]), name
    kept = len(losses.values) - len(losses_after.values)
    assert losses_before.values[:kept] + losses_after.values == losses.values
    assert kept < num_lost
    return whole


@pytest.mark.parametrize(
    ("optimizer", "stop"),
    [*(("sgd fused", stop) for stop in (1, 7, 16, 23)), ("sgd", 8), ("adamw fused", 13)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(optimizer: str, stop: int, tmp_path: Path) -> None:
    plans: list[Plan] = []

    def make(seed: int) -> tuple[ControlLoop, Recorded]:
        loop, loss = control_loop(seed, optimizer)
        loop._pending._on_tick = lambda tick: plans.append(tick.applied.plan)
        return loop, loss

    whole = assert_resumes(make, stop, tmp_path / "checkpoint.pt")
    # The run was eventful enough to show something.
    assert {level for plan in plans for level in plan.precision.values()} == {FP16, BF16, FP32}
    assert len({plan.batch_size for plan in plans}) >= 3
    assert whole.num_skipped > 0
    assert whole.sampler.epoch >= 3


@pytest.mark.parametrize("stop", [5, 10])
def test_a_run_resumes_between_a_reading_and_the_decision_on_it(stop: int, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[ControlLoop, Recorded]:
        loop, loss = control_loop(seed, "sgd fused")
        loop._pending.decides_late = True
        return loop, loss

    loop, _ = started(make, 1)
    run(loop, stop)
    assert loop.num_ticks == stop // CONFIG.every_steps - 1
    assert loop.state_dict()["undecided"] is not None
    assert_resumes(make, stop, tmp_path / "checkpoint.pt")


def test_a_run_resumes_between_a_failure_and_the_tick_that_hears_of_it(tmp_path: Path) -> None:
    make = partial(control_loop, optimizer="sgd")
    loop, _ = started(make, 1)
    while not loop.sensors.state_dict()["faults"]:
        loop.step()
    stop = loop.num_steps
    assert stop % CONFIG.every_steps not in (0, CONFIG.every_steps - 1)
    assert loop._training.steps.step.num_micro_batches > loop.plan.num_micro_batches
    assert_resumes(make, stop, tmp_path / "checkpoint.pt")


LINEAR, FEW = replace(CONFIG.batch, lr_rule="linear"), replace(CONFIG.curvature, top_k=2)


@pytest.mark.parametrize(
    ("make", "stop"),
    [
        *((partial(baseline_loop, method=method), stop) for method in ("fp32", "amp") for stop in (1, 12)),
        *((partial(control_loop, optimizer="sgd", batch=LINEAR, curvature=replace(FEW, method=each)), 8)
          for each in ("ggn", "hessian")),
        *((partial(control_loop, optimizer="adamw fused", **changes), 13) for changes in (
            {"execution": ExecutionConfig(activations="recompute")},
            {"batch": replace(CONFIG.batch, accumulate=2)},
            {"weights": "split"},
            {"weights": "split", "step_in_backward": True, "optimizer_state": "8bit"},
        )),
    ],
)  # fmt: skip
def test_every_method_resumes(make: Any, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_optimizer, "MIN_ELEMENTS_IN_CODES", 30)
    assert_resumes(make, stop, tmp_path / "checkpoint.pt")


class Balanced(nn.Module):
    """A loss that weights classes by how often it has seen them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.ones(4))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.counts += targets.bincount(minlength=4)
        return nn.functional.cross_entropy(outputs, targets, self.counts.sum() / self.counts)


@pytest.mark.parametrize("kind", ["loop", "baseline"])
def test_a_loss_with_buffers_is_not_changed_by_the_check_and_resumes(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, Balanced]:
        model, loss = mlp(), Balanced()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if kind == "loop":
            return ControlLoop(model, optimizer, loss, blobs(60), config=QUIET), loss
        return BaselineLoop(model, optimizer, loss, blobs(60), method="fp32", batch_size=8), loss

    (whole, loss), (second, resumed) = make(), make()
    assert loss.counts.tolist() == [1.0] * 4
    run(whole, 3)
    save_checkpoint(tmp_path / "checkpoint.pt", whole.state_dict())
    second.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    for loop in (whole, second):
        loop.train_epoch()
    assert torch.equal(resumed.counts, loss.counts)
    assert same(values(second.model), values(whole.model))


@pytest.mark.parametrize("stop", [3, 11])
def test_an_epochs_figures_include_what_was_before_the_checkpoint(stop: int, tmp_path: Path) -> None:
    whole, _ = started(baseline_loop, 1)
    expected = whole.train_epoch()
    first, _ = started(baseline_loop, 1)
    run(first, stop)
    save_checkpoint(tmp_path / "checkpoint.pt", {**first.state_dict(), "epoch_seconds": 100.0})
    second, _ = baseline_loop(2)
    second.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    assert second.state_dict()["epoch_seconds"] == 100.0
    stats = second.train_epoch()
    assert replace(stats, seconds=expected.seconds) == expected
    assert 100.0 < stats.seconds < 200.0


def test_the_peak_before_the_checkpoint_counts() -> None:
    loop, _ = control_loop(1, "sgd")
    state = loop.state_dict()
    loop.load_state_dict({**state, "memory_peaks": [2**50, 2**40]})
    assert loop.memory.peak_bytes == 2**50
    loop.load_state_dict({**state, "memory_peaks": [0, 0]})
    assert loop.memory.peak_bytes == 2**50


def test_a_state_of_another_model_or_data_set_is_refused() -> None:
    loop, _ = control_loop(1, "sgd")
    state = loop.state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        loop.load_state_dict({**state, "model": {**state["model"], "0.head.weight": torch.zeros(3, 64)}})
    with pytest.raises(ValueError, match="num_samples = 91: the checkpoint's data set; this one has 90"):
        loop.load_state_dict({**state, "sampler": {**state["sampler"], "num_samples": 91}})
    with pytest.raises(ValueError, match=r"Plan = .*no batch_size"):
        loop.load_state_dict({**state, "plan": {"precision": {}}})


def test_of_a_loss_the_buffers_are_saved_and_the_parameters_are_not() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    loss.teacher = nn.Linear(2, 2)
    loop, _ = loop_of(mlp(), blobs(24), QUIET, loss=loss)
    assert list(loop.state_dict()["loss"]) == ["weight"]


def test_a_batch_that_is_fixed_from_now_on_returns_to_its_initial_size() -> None:
    with loop_of(mlp(), blobs(240), replace(CONFIG, batch=replace(CONFIG.batch, lr_rule="linear")))[0] as loop:
        while loop.plan.batch_size <= CONFIG.batch.start:
            loop.step()
        state = loop.state_dict()
    for enabled in (True, False):
        batch = replace(CONFIG.batch, lr_rule="linear", enabled=enabled)
        with loop_of(mlp(), blobs(240), replace(CONFIG, batch=batch))[0] as resumed:
            resumed.load_state_dict(copy.deepcopy(state))
            has_grown = (resumed.plan.batch_size > CONFIG.batch.start, resumed.plan.batch_lr_scale > 1.0)
            assert has_grown == (enabled, enabled)
            resumed.train_epoch()
            assert enabled or resumed.plan.batch_size == CONFIG.batch.start


def test_a_decision_pending_for_a_larger_batch_does_not_bring_it_back() -> None:
    with loop_of(mlp(), blobs(240), CONFIG)[0] as loop:
        loop._pending.decides_late = True
        while loop.plan.batch_size <= CONFIG.batch.start or loop.num_steps % CONFIG.every_steps:
            loop.step()
        state = loop.state_dict()
    assert state["undecided"] is not None
    with loop_of(mlp(), blobs(240), replace(CONFIG, batch=replace(CONFIG.batch, enabled=False)))[0] as resumed:
        resumed.load_state_dict(state)
        resumed.train_epoch()
        assert resumed.plan.batch_size == CONFIG.batch.start


def test_the_cost_of_plans_elsewhere_does_not_count_where_no_step_is_captured() -> None:
    with loop_of(mlp(), blobs(24), CONFIG)[0] as loop:
        loop.load_state_dict({**loop.state_dict(), "adapting_ms": 20_000.0})
        assert loop.tick().observation.adapting_ms == 0.0


def test_a_run_that_adapts_no_precision_resumes_in_the_one_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    fixed = replace(CONFIG.precision, enabled=False, initial=BF16)
    with loop_of(mlp(), blobs(24), replace(CONFIG, precision=fixed))[0] as loop:
        run(loop, 3)
        save_checkpoint(str(path), loop.state_dict())
    with loop_of(mlp(), blobs(24), replace(CONFIG, precision=replace(fixed, initial=FP32)))[0] as loop:
        loop.load_state_dict(load_checkpoint(str(path)))
        assert set(loop.plan.precision.values()) == {FP32}
        run(loop, 12)
        assert set(loop.plan.precision.values()) == {FP32}
    with loop_of(mlp(), blobs(24), replace(CONFIG, precision=replace(fixed, initial=FP16)))[0] as loop:
        loop.load_state_dict(load_checkpoint(path))  # as if layers had overflowed in FP16
        assert set(loop.plan.precision.values()) == {BF16}
    assert "forward" not in loop.model[0].__dict__  # closed
