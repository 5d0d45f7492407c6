"""Several ranks train one model: the same weights, samples, states and figures as one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.build import BF16, blobs, cross_entropy, loop_of, mlp, plain, run
from tests.distributed.training import Unsteady, assert_close, fixed, listed, outcome, trained, trained_on_images
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop


@pytest.mark.parametrize(
    ("num_samples", "config", "clip"),
    [(98, fixed(12), False), (62, fixed(10, accumulate=3), True), (41, fixed(7), False)],
    ids=["short last batch", "last batch smaller than the group, in parts, clipped", "shares that differ"],
)
def test_weights_and_losses_do_not_depend_on_the_number_of_ranks(
    workers: WorkerPool, num_samples: int, config: ControlConfig, clip: bool
) -> None:
    (alone,) = workers.run(1, trained, num_samples, config, 30, None, clip)
    for world_size in (2, 3):
        found = workers.run(world_size, trained, num_samples, config, 30, None, clip)
        for each in found:
            assert each["weights"] == found[0]["weights"]  # to the bit
            assert each["evaluation"] == found[0]["evaluation"]
            assert_close(each["weights"], alone["weights"])
            assert each["loss"] == pytest.approx(alone["loss"], rel=1e-5)
            assert each["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)


def test_images_train_on_several_ranks_as_on_one(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained_on_images, fixed(12), 20)
    for each in workers.run(3, trained_on_images, fixed(12), 20):
        assert_close(each, alone)


def evaluated(rank: int, num_samples: int) -> list[float]:
    loop, _ = loop_of(mlp(), blobs(24), fixed(12))
    found = loop.evaluate(blobs(num_samples, seed=1))
    loop.close()
    return [found.loss, found.metrics["accuracy"], found.num_samples]


@pytest.mark.parametrize("num_samples", [1, 2, 4])
def test_an_evaluation_may_have_fewer_samples_than_there_are_ranks(workers: WorkerPool, num_samples: int) -> None:
    (alone,) = workers.run(1, evaluated, num_samples)
    assert workers.run(3, evaluated, num_samples) == [pytest.approx(alone)] * 3


def profiled(rank: int, size: int) -> list[Any]:
    """Micro-batch size and saved bytes of the memory profile that a run observes."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()) for _ in range(3)]
    loop, ticks = loop_of(nn.Sequential(nn.Linear(8, 24), *blocks, nn.Linear(24, 4)), blobs(96), fixed(size))
    loop._training.steps.step.activations.request_costs()
    run(loop, 8)
    loop.close()
    profile = ticks[-1].observation.profile
    return [profile.micro_batch_size, [(each.name, each.saved_bytes) for each in profile.regions]]


def test_the_memory_profile_of_a_batch_is_that_of_a_rank_with_its_share(workers: WorkerPool) -> None:
    ((_, share),) = workers.run(1, profiled, 4)
    assert workers.run(3, profiled, 12) == [[12, share]] * 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(workers: WorkerPool, world_size: int) -> None:
    (whole,) = workers.run(1, trained, 98, fixed(12), 24)
    first, second = workers.run(2, trained, 98, fixed(12), 11)
    assert first["weights"] == second["weights"]
    for each in workers.run(world_size, trained, 98, fixed(12), 13, first["state"]):
        assert_close(each["weights"], whole["weights"])
        assert each["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def saved(rank: int) -> dict[str, Any]:
    loop, _ = loop_of(mlp(), blobs(96))
    run(loop, 30)
    state = loop.state_dict()
    loop.close()
    return plain(state)


def test_ranks_hold_equal_states_apart_from_their_random_numbers_and_clocks(workers: WorkerPool) -> None:
    first, second = workers.run(2, saved)
    own = {"sampler", "random", "memory_peaks", "epoch_seconds", "adapting_ms", "sensors", "timer", "undecided"}
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= own
    differing = {name for name in first["sampler"] if first["sampler"][name] != second["sampler"][name]}
    assert differing == {"generator", "rank"}  # the order of samples is the same, what augmentation draws is not


def branched(rank: int) -> dict[str, Any]:
    """One step of SGD with weight decay on a model of which rank 0 does not reach all."""
    model = Unsteady(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    loop = ControlLoop(model, optimizer, cross_entropy, blobs(24), config=fixed(12))
    before = listed(model.branch)
    loop.step()
    return {**outcome(loop), "moved": listed(model.branch) != before}


def test_a_weight_that_one_rank_reaches_has_a_gradient_on_all(workers: WorkerPool) -> None:
    first, second = workers.run(2, branched)
    assert first == second
    assert first["moved"]


def opened(rank: int, roomy: int | None) -> dict[str, Any]:
    """A run that may choose the form of its weights; rank 0 has little memory, the others `roomy` bytes."""
    precision = PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True)
    config = replace(fixed(10**6), weights="auto", step_in_backward="auto", precision=precision, every_steps=2)
    model = mlp(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    headroom = roomy if rank else 64 * 2**20  # half of the batch is predicted to take 94 MB
    loop = ControlLoop(model, optimizer, cross_entropy, blobs(48), config=config, memory_headroom=headroom)
    is_split = loop._training._split_weights is not None
    tick = [loop.step(), loop.tick()][1]
    return {**outcome(loop), "is_split": is_split, "reasons": [each.text for each in tick.decision.reasons]}


@pytest.mark.parametrize("roomy", [8 * 2**30, None])
def test_ranks_choose_one_form_of_the_weights_and_no_step_in_the_backward_pass(
    workers: WorkerPool, roomy: int | None
) -> None:
    first, second = workers.run(2, opened, roomy)
    assert first == second
    assert first["is_split"]
    assert first["reasons"][0].startswith("weights are split: a step would need up to")
    text = "parameters are updated after the backward pass: the gradients of 2 ranks are summed first"
    assert first["reasons"][1] == text
