"""An optimizer whose state the ranks share computes what a whole one computes, on each rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import triaccel_ray.apply.shards
from tests.build import BF16, blobs, cross_entropy, run
from tests.distributed.training import fixed, listed
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.config import ControlConfig, PrecisionConfig
from triaccel_ray.loop import ControlLoop


def wide(seed: int) -> nn.Sequential:
    """A network with parameters of many sizes, some with state in 8 bits."""
    torch.manual_seed(seed)
    blocks = [part for _ in range(4) for part in (nn.Linear(72, 72), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 72), *blocks, nn.Linear(72, 4))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def stepped(
    rank: int,
    name: str,
    config: ControlConfig,
    num_steps: int,
    state: Any = None,
    message_units: int = 2**24,
    memory_budget: int | None = None,
) -> dict[str, Any]:
    """Weights, state and elements of state after some steps; the third step has a gradient that is not finite."""
    triaccel_ray.apply.shards.MESSAGE_UNITS = message_units
    inputs, targets = blobs(98)
    if state is None:
        inputs[5] = torch.inf  # its gradient is NaN, once an epoch
    model = wide(rank)
    optimizer = OPTIMIZERS[name](model.parameters())
    data = (inputs, targets)
    loop = ControlLoop(model, optimizer, cross_entropy, data, config=config, memory_budget=memory_budget)
    if state is not None:
        loop.load_state_dict(copy.deepcopy(state))
    run(loop, num_steps)
    held = sum(value.nbytes for values in optimizer.state.values() for value in values.values() if value.dim())
    found = {"state": loop.state_dict(), "held": held, "skipped": loop.num_skipped}
    loop.close()  # joins split weights
    return {**found, "weights": listed(model)}


PLAIN = fixed(12)
WORDS = replace(
    fixed(12),
    weights="split",
    optimizer_state="8bit",
    precision=PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True),
)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("config", [PLAIN, WORDS, replace(WORDS, weights="fp32")], ids=["fp32", "words", "codes"])
def test_a_shared_optimizer_steps_as_a_whole_one(workers: WorkerPool, name: str, config: ControlConfig) -> None:
    shared = replace(config, shard_optimizer=True)
    (whole, _, _) = workers.run(3, stepped, name, config, 20)
    found = workers.run(3, stepped, name, shared, 20, None, 1000)  # in many messages
    assert whole["skipped"] > 0
    for each in found:
        assert each["weights"] == whole["weights"]
        assert each["held"] <= 0.55 * whole["held"]  # four equal blocks on three ranks
    assert sum(each["held"] for each in found) == whole["held"]


@pytest.mark.parametrize(("size", "shares"), [(10**5, False), (10**9, True)])
def test_ranks_share_an_optimizer_by_themselves_if_memory_may_not_suffice(
    workers: WorkerPool, size: int, shares: bool
) -> None:
    config = fixed(size)  # predicted to take so many samples; passes as the 98 there are
    explicit = workers.run(2, stepped, "adamw", replace(config, shard_optimizer=shares), 3)
    chosen = workers.run(2, stepped, "adamw", replace(config, shard_optimizer="auto"), 3, None, 2**24, 4 * 2**30)
    assert [each["weights"] for each in chosen] == [each["weights"] for each in explicit]
    assert [each["held"] for each in chosen] == [each["held"] for each in explicit]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("config", [PLAIN, WORDS], ids=["fp32", "words"])
def test_a_checkpoint_holds_all_state_and_resumes_on_any_number_of_ranks(
    workers: WorkerPool, name: str, config: ControlConfig
) -> None:
    shared = replace(config, shard_optimizer=True)
    first, second = workers.run(2, stepped, name, shared, 11)
    whole, _ = workers.run(2, stepped, name, config, 11)
    kept = first["state"]["optimizer"]["state"]
    expected = whole["state"]["optimizer"]["state"]
    assert kept.keys() == expected.keys()
    assert len(second["state"]["optimizer"]["state"]) < len(expected)
    for index, values in expected.items():
        for key, value in values.items():
            assert torch.equal(kept[index][key], value)
    for world_size in (1, 2, 3):
        resumed = workers.run(world_size, stepped, name, config, 8, whole["state"])
        shares = workers.run(world_size, stepped, name, shared, 8, first["state"])
        assert [each["weights"] for each in shares] == [each["weights"] for each in resumed]
