"""Captured steps of several ranks, with a stand-in for CUDA graphs: gradients are summed during the backward pass."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.apply.compiled import Block
from tests.build import BF16, FP32, Rerun, RerunPool, blobs, cross_entropy, loop_of, mlp, run
from tests.distributed.training import Unsteady, assert_close, fixed, outcome, trained
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.apply import reduce
from triaccel_ray.apply.agreement import Agreement
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.reduce import Reduction, SharedGradients
from triaccel_ray.apply.weights import ComputeCopies, Weights
from triaccel_ray.config import ControlConfig
from triaccel_ray.control import training
from triaccel_ray.cuda.graphs import Graph
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.gradients import gradient_of
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.events import Tick


class Recorder(RerunPool):
    """Runs the work at its capture, too, but undoes what it did to `loop`; before a replay it drops gradients."""

    loop: ControlLoop

    def _record(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> Graph:
        state = self.loop.optimizer.optimizer.state
        kept = [*self.loop.model.parameters(), *(value["momentum_buffer"] for value in state.values())]
        before = [tensor.detach().clone() for tensor in kept]
        super()._record(work, generators)
        with torch.no_grad():
            torch._foreach_copy_(kept, before)

        def again() -> None:
            self.loop._training.steps.step.zero_grad()
            work()

        return Rerun(again)


def capturing(
    model: nn.Module, num_samples: int, config: ControlConfig, *errors: Exception | None
) -> tuple[ControlLoop, list[Tick], Recorder]:
    """A loop that captures its steps in the pool beside it, after these errors."""
    pool = Recorder(*errors)
    with patch.object(training, "GraphPool", lambda device: pool):
        pool.loop, ticks = loop_of(model, blobs(num_samples), config)
    return pool.loop, ticks, pool


def captured(rank: int, fails_on: int | None) -> dict[str, Any]:
    """A run whose steps are captured, for a stand-in of a graph; the capture fails on one rank, if any."""
    error = RuntimeError("no graph here") if rank == fails_on else None
    loop, ticks, pool = capturing(mlp(seed=rank), 62, fixed(10), error)
    run(loop, 21)
    if fails_on is None and rank == 1:
        pool.release()  # as an evaluation that ran out of memory does, on one rank
    loop.evaluate(blobs(31))
    run(loop, 9)
    return {**outcome(loop, ticks), "tried": pool.num_tried}


@pytest.mark.parametrize("fails_on", [None, 1])
def test_all_ranks_replay_a_step_or_none_does(workers: WorkerPool, fails_on: int | None) -> None:
    (alone,) = workers.run(1, trained, 62, fixed(10), 30)
    found = workers.run(3, captured, fails_on)
    for each in found:
        assert_close(each["weights"], alone["weights"])
        assert each["enabled"] == (fails_on is None)
        assert each["tried"] == found[0]["tried"]
        assert (each["tried"] > 1) == (fails_on is None)
        assert each["faults"] == ([] if fails_on is None else found[0]["faults"])


def measured_on_one_rank(rank: int) -> dict[str, Any]:
    """A run whose first capture lacks memory; then rank 0 alone captures something else, as curvature may."""
    error = torch.OutOfMemoryError("CUDA out of memory (simulated)")
    loop, _, pool = capturing(mlp(seed=rank), 240, replace(fixed(12), every_steps=100), error)
    run(loop, 4)
    before = loop._training.steps.num_captured
    other = pool.capture(lambda: None) if rank == 0 else None
    run(loop, 4)
    found = {**outcome(loop), "before": before}
    del other
    return found


def test_a_graph_of_one_rank_alone_does_not_part_the_ranks(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained, 240, fixed(12), 8)
    for each in workers.run(2, measured_on_one_rank):
        assert (each["before"], each["captured"]) == (0, 1)
        assert_close(each["weights"], alone["weights"])


def overlapped(rank: int) -> dict[str, Any]:
    """How many messages leave during a captured backward pass, and before its end."""
    sent: list[str] = []
    loop, _, _ = capturing(mlp(seed=rank), 240, fixed(12))
    reduction = loop._training.steps.step._reduction
    assert reduction is not None
    reduction.buckets = [[index] for index in reversed(range(len(reduction.parameters)))]
    start = reduction.peers.ranks.start_all_reduce

    def start_all_reduce(tensors: Sequence[Tensor]) -> Callable[[], None]:
        sent.append("during" if reduction._pass is not None else "after")
        return start(tensors)

    reduction.peers.ranks.start_all_reduce = start_all_reduce  # type: ignore[method-assign]
    for _ in range(3):
        sent.clear()
        loop.step()
    return {**outcome(loop), "sent": sent.copy()}


def test_a_captured_step_sends_gradients_during_the_backward_pass(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained, 240, fixed(12), 3)
    for each in workers.run(2, overlapped):
        assert each["sent"] == ["during"] * 6 + ["after"]  # a message for each parameter, then the loss
        assert_close(each["weights"], alone["weights"])


def summed(rank: int, has_copies: bool, is_whole: bool, most_ranks: int) -> list[list[float]]:
    """Gradients of a model in BF16 and FP32: of this rank, and their sums sent after and during the pass."""
    with patch.object(reduce, "MAX_RANKS_IN_16_BITS", most_ranks):
        return _summed(rank, has_copies, is_whole, of_few=most_ranks >= 2)


def _summed(rank: int, has_copies: bool, is_whole: bool, *, of_few: bool) -> list[list[float]]:
    model = mlp()
    layers = find_layers(model)
    parameters = list(model.parameters())
    weights = ComputeCopies(layers, parameters) if has_copies else Weights()
    precision = LayerPrecision(model, layers, weights=weights)
    dtypes = [torch.float32, torch.bfloat16, torch.float32]
    precision.set(
        {layer.name: BF16 if dtype is torch.bfloat16 else FP32 for layer, dtype in zip(layers, dtypes, strict=True)}
    )
    of_parameters = [dtype for dtype in dtypes for _ in ("weight", "bias")]
    gradients = SharedGradients(
        Reduction(parameters, parameters, Agreement(Ranks.of_default_group()), lambda: of_parameters)
    )
    inputs, targets = blobs(8, seed=rank)
    found = []
    for publishes in (True, False):
        gradients.begin(publishes=publishes)
        for tensor in (*parameters, *weights.companions.values()):
            tensor.grad = None
        with precision.in_force():
            loss = cross_entropy(model(inputs).float(), targets)
        with gradients._reduction.taking(weights.companions, is_whole=is_whole):
            loss.backward()
        assert (gradients._reduction._pass is None) == (publishes or not is_whole)
        if publishes:
            own = [gradient_of(p, weights.companions.get(id(p)), None).float().flatten() for p in parameters]
            found.append(torch.cat(own).tolist())
        gradients.collect(weights.companions, {})
        gradients.pack(weights.companions)
        gradients.send()
        in_16_bits = of_few and (is_whole or has_copies)
        sent = [tensor.dtype for tensor in gradients.tensors]
        assert sent == (of_parameters if in_16_bits else [torch.float32] * 6)
        leaves = of_parameters if has_copies else [torch.float32] * 6
        held = [leaf.grad for leaf in (*parameters, *weights.companions.values()) if leaf.grad is not None]
        assert len(held) == sum(map(operator.eq, leaves, sent))  # what was sent in another dtype is dropped
        found.append(torch.cat([tensor.float().flatten() for tensor in gradients.tensors]).tolist())
    precision.remove()
    return found


@pytest.mark.parametrize("has_copies", [True, False])
@pytest.mark.parametrize(("is_whole", "most_ranks"), [(True, 8), (False, 8), (True, 1)], ids=["one", "parts", "many"])
def test_gradients_of_one_pass_on_few_ranks_are_summed_in_the_dtype_of_their_layer(
    workers: WorkerPool, has_copies: bool, is_whole: bool, most_ranks: int
) -> None:
    (own, after, during), (others, *same) = workers.run(2, summed, has_copies, is_whole, most_ranks)
    assert after == during
    assert [after, during] == same
    torch.testing.assert_close(torch.tensor(after), torch.tensor(own) + torch.tensor(others), rtol=1e-2, atol=1e-4)


def summed_tensors(rank: int) -> list[tuple[torch.dtype, tuple[int, ...], list[float]]]:
    """Dtypes, strides and values of sums of tensors that are sent as they are or shorter, in one message or alone."""
    layout = torch.channels_last
    tensors = [
        torch.full((40,), rank + 1.0),
        torch.full((40,), rank + 1.0, dtype=torch.bfloat16 if rank else torch.float32),
        torch.full((3,), rank + 1.0),
        torch.arange(rank, rank + 120.0).view(2, 3, 4, 5).contiguous(memory_format=layout),
    ]
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16]
    with patch.object(reduce, "LARGE_BYTES", 64):
        sums = reduce.pack(tensors, dtypes).start_sum(Ranks.of_default_group())()
    return [(each.dtype, each.stride(), each.float().flatten().tolist()) for each in sums]


def test_tensors_of_any_size_and_layout_are_summed_in_the_dtype_asked_for(workers: WorkerPool) -> None:
    first, second = workers.run(2, summed_tensors)
    assert first == second
    assert [dtype for dtype, _, _ in first] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float16]
    assert [values for _, _, values in first[:3]] == [[3.0] * 40, [3.0] * 40, [3.0] * 3]
    _, stride, values = first[3]
    assert stride == torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).stride()
    assert values == [2.0 * each + 1.0 for each in range(120)]


def without_room_for_messages(rank: int, num_failures: int) -> dict[str, Any]:
    """A step after whose pass rank 1 lacks memory for messages, some times; the weights after it, or the error."""
    pack = reduce.pack
    failed: list[weakref.ref[Tensor]] = []

    def scarce(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> reduce.Packed:
        assert not any(message() is not None for message in failed)  # nor holds the retry what has failed
        packed = pack(tensors, dtypes)
        if rank == 1 and len(failed) < num_failures:
            failed.append(weakref.ref(packed.messages[0]))
            raise torch.OutOfMemoryError("no room for messages")
        return packed

    loop, ticks = loop_of(mlp(), blobs(24), fixed(12))
    with patch.object(reduce, "pack", scarce):
        try:
            loop.step()
        except torch.OutOfMemoryError as error:
            return {"error": str(error)}
    loop.tick()
    return outcome(loop, ticks)


def test_all_ranks_retreat_if_one_lacks_memory_for_its_messages(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained, 24, fixed(12), 1)
    for each in workers.run(2, without_room_for_messages, 1):
        assert each.get("parts") == 2, each
        assert ["no room for messages" in fault for fault in each["faults"]] == [True]
        assert_close(each["weights"], alone["weights"])
    for each in workers.run(2, without_room_for_messages, 10**9):
        assert "no room for messages" in each["error"]


class Stages(nn.Sequential):
    """Blocks that grow wider."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in ((8, 16), (16, 32))), nn.Linear(32, 4))


class Equal(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Sequential(Block(8), Block(8)), nn.Linear(8, 4))


def compiled_blocks(rank: int, kind: type[nn.Module]) -> tuple[int, bool]:
    """How many blocks are compiled, each for itself, and whether with dynamic sizes only."""
    loop, _ = loop_of(kind(), blobs(24), fixed(12))
    compilation = loop._training._compile()
    num_blocks, any_size = len(compilation.blocks), compilation._any_size
    compilation.remove()
    loop.close()
    return num_blocks, any_size


def test_several_ranks_compile_unequal_blocks_one_by_one_and_equal_ones_for_any_size(workers: WorkerPool) -> None:
    assert workers.run(1, compiled_blocks, Stages) == [(0, False)]
    assert workers.run(2, compiled_blocks, Stages) == [(2, False)] * 2
    assert workers.run(1, compiled_blocks, Equal) == [(2, False)]
    assert workers.run(2, compiled_blocks, Equal) == [(2, True)] * 2


def opened(rank: int) -> dict[str, Any]:
    """A run in which rank 1 reaches another weight when its step is captured than in the step before."""
    model = Unsteady(rank)
    model.is_open = False
    loop, ticks, _ = capturing(model, 96, fixed(12))
    loop.step()
    model.is_open = rank == 1
    run(loop, 7)
    return outcome(loop, ticks)


def test_gradients_that_arrive_otherwise_in_a_captured_step_end_capture_on_all_ranks(workers: WorkerPool) -> None:
    first, second = workers.run(2, opened)
    assert first == second
    assert not first["enabled"]
    text = "gradients have arrived otherwise than in the step before, on some rank"
    assert f"capture_failed: {text}" in first["faults"]
