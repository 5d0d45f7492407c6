"""Errors on one rank: all retreat, skip, stop or refuse together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import triaccel_ray.distributed.ranks
import triaccel_ray.loop
from tests.build import CONFIG, CountingSource, Limited, blobs, cross_entropy, loop_of, mlp, run, sgd
from tests.distributed.training import assert_close, fixed, listed, outcome, trained
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.apply import offload
from triaccel_ray.apply.agreement import Agreement, NotCapturableError
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import ExecutionConfig
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.data.sources import DataSource
from triaccel_ray.decide import decide, replay
from triaccel_ray.distributed.ranks import Ranks, RanksDifferError
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.codec import encode


class Pressed(CountingSource):
    """Runs out of memory for more than `limit` samples at some steps, on one rank."""

    limit = 10**9

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        if len(indices) > self.limit:
            raise torch.OutOfMemoryError("no room on this rank")
        return super().batch(indices, generator)


def pressed(rank: int, num_steps: int) -> dict[str, Any]:
    """Ticks and parts of a run in which rank 1 has less memory at times."""
    source = Pressed(*blobs(96))
    loop, ticks = loop_of(mlp(seed=rank), source, replace(CONFIG, revert_slowdowns=True))
    parts = []
    for step in range(num_steps):
        if rank == 1:
            source.limit = 2 if 40 <= step < 60 or step == 120 else 10**9
        loop.step()
        parts.append(loop._training.steps.step.num_micro_batches)
    logged = [(tick.observation, tick.decision) for tick in ticks]
    return {
        **outcome(loop, ticks),
        "observations": [encode(tick.observation) for tick in ticks],
        "replays": replay(loop.config, logged).diverged_at is None,
        "parts": parts,
        "batches": [tick.applied.plan.batch_size for tick in ticks],
        "eigenvalues": any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers),
    }


def test_ranks_decide_the_same_while_one_of_them_runs_short_of_memory(workers: WorkerPool) -> None:
    first, second = workers.run(2, pressed, 200)
    assert len(first["decisions"]) == 50
    for name in ("decisions", "observations", "parts", "batches", "weights"):
        assert first[name] == second[name], name
    assert first["replays"]
    assert first["eigenvalues"]
    short = [fault for fault in first["faults"] if fault.startswith("out_of_memory: ")]
    assert "rank 1 raised OutOfMemoryError: no room on this rank" in short[0]
    assert min(first["batches"]) < max(first["batches"])


def retreated(rank: int) -> dict[str, Any]:
    """A step of 12 samples of which rank 1 can pass two at once, and the weights after it."""
    model = nn.Sequential(mlp(), Limited(2 if rank == 1 else 10**9))
    loop, _ = loop_of(model, blobs(24), fixed(12))
    loop.step()
    return {**outcome(loop), "passed": model[1].sizes[-2:]}


def test_all_ranks_retreat_in_the_step_in_which_one_runs_out_of_memory(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained, 24, fixed(12), 1)
    found = workers.run(3, retreated)
    for each in found:
        assert each["parts"] == 2  # of 4 samples each
        assert each["passed"] == [2, 2]
        assert each["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert_close(each["weights"], alone["weights"])


def unpinned(rank: int) -> dict[str, Any]:
    """Three steps that offload, of which rank 1 has too little host memory for the second block."""
    offload.MIN_BYTES = 64
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    loop, ticks = loop_of(model, blobs(48), replace(fixed(12), execution=ExecutionConfig(activations="offload")))
    step = loop._training.steps.step
    take = offload.Arena.take

    def scarce(arena: Any, num_bytes: int, *, grows: bool = True) -> Tensor:
        if rank == 1 and step.activations._offloading._last.name == "1":
            raise RuntimeError("no memory to pin")
        return take(arena, num_bytes, grows=grows)

    with patch.object(offload.Arena, "take", scarce):
        run(loop, 3)
        loop.tick()
    return {**outcome(loop, ticks), "storage": dict(step.activations.storage)}


def test_what_one_host_cannot_pin_memory_for_is_kept_on_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(2, unpinned)
    assert first == second
    assert first["storage"] == {"0": "offload"}
    assert ["no memory to pin" in fault for fault in first["faults"]] == [True]


def broken(rank: int) -> DataSource:
    class Broken(CountingSource):
        def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
            if rank == 1 and generator is not None and self.drawn:
                raise OSError("a file is missing")
            return super().batch(indices, generator)

    return Broken(*blobs(24))


def scheduled(rank: int) -> ControlLoop:
    model = mlp()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1 + rank)
    return ControlLoop(model, optimizer, cross_entropy, blobs(96), config=fixed(12), schedule=schedule)


DIFFER = "RanksDifferError: the learning rate of tick 0 differs between ranks (rank 0: ..."
ENDING: dict[str, tuple[Callable[[int], ControlLoop], str, str]] = {
    "a sample that does not fit": (
        lambda rank: loop_of(nn.Sequential(mlp(), Limited(0 if rank == 1 else 10**9)), blobs(24), fixed(12))[0],
        "OutOfMemoryError: memory ran out, and smaller micro-batches could not help. The memory",
        "PeerOutOfMemoryError: rank 1 raised OutOfMemoryError: no room for more samples",
    ),
    "an error": (
        lambda rank: loop_of(mlp(), broken(rank), fixed(12))[0],
        "OSError: a file is missing", "PeerError: rank 1 raised OSError: a file is missing",
    ),
    "another schedule": (scheduled, DIFFER, DIFFER),
}  # fmt: skip


def error_of(rank: int, kind: str) -> str:
    with pytest.raises(Exception, match=r".") as raised:
        ENDING[kind][0](rank).train_epoch()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("kind", ENDING)
def test_an_error_on_one_rank_ends_all_at_once_and_is_named(workers: WorkerPool, kind: str) -> None:
    first, second, third = workers.run(3, error_of, kind)
    _, own, others = ENDING[kind]
    assert second.startswith(own)
    assert first.startswith(others)
    assert first == third


def diverged(rank: int) -> dict[str, Any]:
    """Five steps, in the third of which rank 1 finds a gradient that is not finite."""
    step = 0

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        return value * math.nan if rank == 1 and step == 2 else value

    loop, _ = loop_of(mlp(), blobs(96), fixed(8), loss=loss)
    history = []
    for step in range(5):  # noqa: B007  # `loss` reads it
        loop.step()
        history.append(listed(loop.model))
    return {**outcome(loop), "history": history}


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(workers: WorkerPool) -> None:
    first, second = workers.run(2, diverged)
    assert first == second
    assert (first["skipped"], first["loss"][1]) == (1, 32)
    assert first["history"][1] == first["history"][2] != first["history"][3]


def agreed(rank: int) -> list[str]:
    """What each rank raises when rank 1 raises an error of each kind."""
    import torch._dynamo

    errors = [
        BudgetExceededError("over budget"),
        torch.OutOfMemoryError("no room"),
        torch._dynamo.exc.TorchDynamoException("no code"),
        NotCapturableError("no graph"),
        KeyError("no key"),
    ]
    agreement = Agreement(Ranks.of_default_group())
    found = []
    for own in [(None, error) for error in errors] + [(errors[1], errors[4])]:  # of two, the worse one wins
        try:
            with agreement.agreeing(), agreement.agreeing():  # the outer one has nothing to add
                if own[rank] is not None:
                    raise own[rank]
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_an_error_of_one_rank_is_one_of_the_same_kind_on_the_others(workers: WorkerPool) -> None:
    first, second = workers.run(2, agreed)
    assert second == [
        "BudgetExceededError", "OutOfMemoryError", "TorchDynamoException", "NotCapturableError", "KeyError", "KeyError"
    ]  # fmt: skip
    assert first == [
        "BudgetExceededError", "PeerOutOfMemoryError", "PeerCompileError", "NotCapturableError", "PeerError",
        "PeerError",
    ]  # fmt: skip


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        inputs, targets = blobs(8)
        return iter(zip(inputs, targets, strict=True))


def warmed_up(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made a step."""
    optimizer = sgd(model)
    inputs, targets = blobs(8)
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    model.zero_grad()
    return optimizer


def gapped() -> nn.Module:
    """A model with a parameter that is not dense in memory."""
    model = mlp()
    model[0].bias = nn.Parameter(torch.zeros(32)[::2])
    return model


def controlled(model: nn.Module, make: Any = sgd, **changes: Any) -> ControlLoop:
    return ControlLoop(model, make(model), cross_entropy, blobs(24), config=replace(fixed(12), **changes))


REFUSED: dict[str, tuple[Callable[[int], object], str]] = {
    "share": (lambda rank: loop_of(mlp(), tuple(each[rank::3] for each in blobs(24)), fixed(4)),
              "first and last sample (give every rank all samples) = "),
    "settings": (lambda rank: loop_of(mlp(), blobs(24), replace(fixed(4), every_steps=4 + rank)),
                 "every_steps = 4 on rank 0 and 5 on rank 1: must be the same on all ranks"),
    "seed": (lambda rank: loop_of(mlp(), blobs(24), fixed(4), seed=rank),
             "seed = 0 on rank 0 and 1 on rank 1: must be the same"),
    "model": (lambda rank: loop_of(mlp(features=8 + rank), blobs(24, features=8 + rank), fixed(4)),
              'model = [[["0.weight", [16, 8], '),
    "data": (lambda rank: loop_of(mlp(), blobs(24 + rank), fixed(4)),
             "number of samples = 24 on rank 0 and 25 on rank 1"),
    "batch": (lambda rank: loop_of(mlp(), blobs(24), fixed(2)),
              "batch minimum (batch_min) = 2: must be at least the number of ranks, 3"),
    "step_in_backward": (lambda rank: controlled(mlp(), step_in_backward=True),
                         "step_in_backward = True: must be False on 3 ranks"),
    "stream": (lambda rank: loop_of(mlp(), Stream(), fixed(4)),
               "data = an iterable data set, on 3 ranks: must be one with __getitem__"),
    "baseline": (lambda rank: BaselineLoop(m := mlp(), sgd(m), cross_entropy, blobs(24), method="fp32", batch_size=4),
                 "the process group has several ranks: a baseline trains in one process; use ControlLoop"),
    "optimizer state": (lambda rank: controlled(mlp(), warmed_up if rank == 1 else sgd),
                        'optimizer state = [] on rank 0 and [["momentum_buffer", '),
    "gaps": (lambda rank: controlled(gapped(), shard_optimizer=True),
             "shard_optimizer = True: dense parameters alone"),
    "evaluation": (lambda rank: controlled(mlp()).evaluate(blobs(8 + 4 * rank)),
                   "number of samples to evaluate = 8 on rank 0 and 12 on rank 1: must be the same on all ranks"),
}  # fmt: skip


def refusal(rank: int, kind: str) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        REFUSED[kind][0](rank)
    return str(raised.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_ranks_cannot_share_is_refused_on_all_of_them(workers: WorkerPool, kind: str) -> None:
    first, *others = workers.run(3, refusal, kind)
    assert first.startswith(REFUSED[kind][1])
    assert others == [first] * 2


def unlike(rank: int) -> str:
    def other(*args: Any) -> Any:
        decision = decide(*args)
        return replace(decision, plan=replace(decision.plan, batch_size=decision.plan.batch_size + 4))

    with patch.object(triaccel_ray.loop, "decide", other if rank == 1 else decide):
        loop, _ = loop_of(mlp(), blobs(96), replace(CONFIG, revert_slowdowns=False))
        with pytest.raises(RanksDifferError) as raised:
            loop.train_epoch()
    assert loop.num_steps == 4
    return str(raised.value)


def test_a_decision_that_differs_ends_the_run_at_once(workers: WorkerPool) -> None:
    first, second = workers.run(2, unlike)
    assert first == second
    assert "the decision of tick 0 differs between ranks (rank 0: ..." in first
    assert '"batch_size": 12,' in first.partition("rank 1: ")[0]
    assert '"batch_size": 16,' in first.partition("rank 1: ")[2]
