"""Schedules are functions of the samples seen: PyTorch's schedulers, whatever the batches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.build import BATCH, CPU, QUIET, blobs, cross_entropy, mlp, run, same, sgd, values
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import ControlConfig
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import load_checkpoint, save_checkpoint

NUM, START = 90, 8
PER_EPOCH = 12
"""Steps of START samples in an epoch of NUM."""
FIXED = replace(QUIET, batch=replace(BATCH, minimum=START, maximum=START))


def loop_with(
    make: Any, config: ControlConfig = QUIET, *, model: nn.Module | None = None, **options: Any
) -> tuple[ControlLoop, LRScheduler]:
    model = model or mlp()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    options = {"config": config, "schedule": scheduler, **options}
    return ControlLoop(model, optimizer, cross_entropy, blobs(NUM), **options), scheduler


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3 * PER_EPOCH)


@given(st.integers(2, 300), st.integers(3, 40), st.integers(1, 60))
@example(11, 10, 2)  # the last two batches share 11 samples
def test_batches_of_the_starting_size_count_one_each(num_samples: int, size: int, num_taken: int) -> None:
    sampler = Sampler(TensorSource(torch.zeros(num_samples), torch.zeros(num_samples)), seed=0, device=CPU)
    for taken in range(num_taken):
        assert sampler.num_batches(size) == taken
        sampler.take(size)


@given(st.integers(2, 300), st.integers(2, 40), st.lists(st.integers(2, 40), max_size=60))
def test_others_count_by_their_samples(num_samples: int, size: int, taken: list[int]) -> None:
    sampler = Sampler(TensorSource(torch.zeros(num_samples), torch.zeros(num_samples)), seed=0, device=CPU)
    for other in taken:
        before = sampler.num_batches(size)
        sampler.take(other)
        assert sampler.num_batches(size) >= before
        assert sampler.num_batches(size) == int(-(-num_samples // size) * sampler.position + 1e-9)


def test_a_scheduler_goes_all_its_way_while_the_batch_grows() -> None:
    loop, scheduler = loop_with(one_cycle)
    for epoch in range(1, 4):
        loop.train_epoch()
        assert scheduler.last_epoch == epoch * PER_EPOCH
    assert loop.plan.batch_size > START
    assert loop.num_steps < 3 * PER_EPOCH
    assert loop.optimizer.optimizer.param_groups[0]["lr"] < 0.05 / 100


@pytest.mark.parametrize("is_baseline", [True, False])
def test_at_one_batch_size_it_is_pytorchs_own_loop(is_baseline: bool) -> None:
    loop: BaselineLoop | ControlLoop
    if is_baseline:
        optimizer = sgd(mine := mlp())
        options: Any = {"method": "fp32", "batch_size": START, "schedule": one_cycle(optimizer)}
        loop = BaselineLoop(mine, optimizer, cross_entropy, blobs(NUM), **options)
    else:
        loop, _ = loop_with(one_cycle, FIXED)
    model = mlp()
    optimizer = sgd(model)
    scheduler = one_cycle(optimizer)
    inputs, targets = blobs(NUM)
    for _ in range(2):
        for indices in loop.sampler._order.split(START):
            optimizer.zero_grad()
            cross_entropy(model(inputs[indices]), targets[indices]).backward()
            optimizer.step()
            scheduler.step()
            loop.step()
    torch.testing.assert_close(values(loop.model), values(model))


def in_sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return lr_scheduler.SequentialLR(optimizer, parts, [5])


@pytest.mark.parametrize("make", [one_cycle, in_sequence])
def test_a_resumed_run_goes_on_alike(make: Any, tmp_path: Path) -> None:
    whole, _ = loop_with(make, FIXED)
    run(whole, 20)
    first, _ = loop_with(make, FIXED)
    run(first, 7)
    save_checkpoint(tmp_path / "checkpoint.pt", first.state_dict())
    first.close()
    resumed, scheduler = loop_with(make, FIXED, model=mlp(seed=1))
    resumed.load_state_dict(load_checkpoint(tmp_path / "checkpoint.pt"))
    run(resumed, 13)
    assert same(values(resumed.model), values(whole.model))
    assert scheduler.get_last_lr() == [resumed.optimizer.optimizer.param_groups[0]["lr"]]


def test_a_checkpoint_without_a_scheduler_is_not_for_a_run_with_one() -> None:
    loop, _ = loop_with(one_cycle)
    plain, _ = loop_with(lambda optimizer: None)
    with pytest.raises(
        ValueError, match="schedule: the checkpoint's run has none, this one a scheduler: give the loop"
    ):
        loop.load_state_dict(plain.state_dict())


def test_a_scheduler_that_is_stepped_by_hand_goes_on_working() -> None:
    model = mlp()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.0, patience=0)
    loop = ControlLoop(model, optimizer, cross_entropy, blobs(NUM), config=QUIET)
    scheduler.step(loop.train_epoch().loss)
    scheduler.step(1e9)
    before = values(model)
    loop.train_epoch()
    assert same(values(model), before)


@pytest.mark.parametrize(
    ("schedule", "kind", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, ValueError, r"needs? no metric; leave it out, and call scheduler.step\(stats"),
        (lambda _: one_cycle(sgd(mlp())), ValueError, "schedule = OneCycleLR of another optimizer: build it for"),
        (lambda _: 0.5, TypeError, "schedule = 0.5: must be a function of the epochs trained, or a scheduler"),
    ],
)
def test_what_cannot_follow_the_samples_is_refused(schedule: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        loop_with(schedule)


def test_a_scheduler_that_ends_before_the_run_is_refused() -> None:
    for epochs in (3, 2.5, None):
        loop_with(one_cycle, epochs=epochs)
    rule = f"total_steps of OneCycleLR = {3 * PER_EPOCH}: must be at least {4 * PER_EPOCH}: 4 epochs of ceil"
    with pytest.raises(ValueError, match=re.escape(rule)):
        loop_with(one_cycle, epochs=4)


def test_a_scheduler_with_too_few_steps_says_how_many_an_epoch_has() -> None:
    loop, _ = loop_with(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=PER_EPOCH - 1))
    with pytest.raises(ValueError, match="Tried to step 12 times") as raised:
        loop.train_epoch()
    assert raised.value.__notes__ == [f"an epoch has ceil(number of samples / {START}) steps of the schedule"]
