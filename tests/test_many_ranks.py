"""One run on several ranks: processes of a real process group, on CPUs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triaccel_ray.control.training
import triaccel_ray.loop
from tests.build import (
    BF16,
    CONFIG,
    FP32,
    QUIET,
    CountingSource,
    Limited,
    Rerun,
    RerunPool,
    blobs,
    cross_entropy,
    loop_of,
    mlp,
    plain,
    shift_and_noise,
)
from tests.crew import Crew
from triaccel_ray.apply.agreement import Agreement, NotCapturableError
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.reduce import Reduction, SharedGradients
from triaccel_ray.apply.weights import ComputeCopies
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import BatchConfig, ControlConfig, PrecisionConfig
from triaccel_ray.cuda.graphs import Graph
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.decide import replay
from triaccel_ray.distributed.ranks import Ranks, RanksDifferError
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.gradients import gradient_of
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.codec import encode
from triaccel_ray.records.plan import FaultKind


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew(3)
    yield crew
    crew.close()


def fixed(size: int, *, accumulate: int = 1) -> ControlConfig:
    """A batch of one size, in FP32."""
    batch = BatchConfig(
        enabled=False, start=size, minimum=size, maximum=size, accumulate=accumulate, granularity=1, step_up=1,
        step_down=1,
    )  # fmt: skip
    return replace(QUIET, batch=batch)


def listed(model: nn.Module) -> list[list[float]]:
    return [p.detach().flatten().tolist() for p in model.parameters()]


def trained(
    rank: int, num_samples: int, config: ControlConfig, num_steps: int, state: Any = None, clip: bool = False
) -> dict[str, Any]:
    """Weights, loss and state after steps on blobs; each rank begins with weights of its own."""
    model = mlp(seed=rank)
    data = blobs(num_samples)
    loop, _ = loop_of(model, data, replace(config, clip_norm=0.5 if clip else None))
    if state is not None:
        loop.load_state_dict(copy.deepcopy(state))  # it arrives in memory that the ranks share
    for _ in range(num_steps):
        loop.step()
    loss_sum, count = loop.epoch_loss.tolist()
    saved = loop.state_dict()
    evaluation = loop.evaluate(blobs(31, seed=1))
    loop.close()
    figures = [evaluation.loss, evaluation.metrics["accuracy"], evaluation.num_samples]
    return {"weights": listed(model), "loss": loss_sum, "count": count, "state": saved, "evaluation": figures}


def assert_close(first: list[list[float]], second: list[list[float]], *, within: float = 1e-5) -> None:
    for one, other in zip(first, second, strict=True):
        a, b = torch.tensor(one), torch.tensor(other)
        assert (a - b).norm() <= within * b.norm()


@pytest.mark.parametrize(
    ("num_samples", "config", "clip"),
    [(98, fixed(12), False), (62, fixed(10, accumulate=3), True), (41, fixed(7), False)],
    ids=["short last batch", "last batch smaller than the group, in parts, clipped", "shares that differ"],
)
def test_weights_and_losses_do_not_depend_on_the_number_of_ranks(
    crew: Crew, num_samples: int, config: ControlConfig, clip: bool
) -> None:
    (alone,) = crew.run(1, trained, num_samples, config, 30, None, clip)
    for world_size in (2, 3):
        found = crew.run(world_size, trained, num_samples, config, 30, None, clip)
        for each in found:
            assert each["weights"] == found[0]["weights"]  # to the bit
            assert each["evaluation"] == found[0]["evaluation"]
            assert_close(each["weights"], alone["weights"])
            assert each["count"] == alone["count"]
            assert each["loss"] == pytest.approx(alone["loss"], rel=1e-5)
            assert each["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)


def drawn(rank: int, num_samples: int, config: ControlConfig, num_epochs: int) -> list[list[int]]:
    """Indices of the samples that this rank drew in each epoch."""
    source = CountingSource(*blobs(num_samples))
    loop, _ = loop_of(mlp(), source, config)
    found = []
    for _ in range(num_epochs):
        source.drawn.clear()
        loop.train_epoch()
        found.append(torch.cat([*source.drawn, torch.zeros(0, dtype=torch.int64)]).tolist())
    loop.close()
    return found


@pytest.mark.parametrize(("num_samples", "size"), [(62, 10), (100, 7), (24, 12)])
def test_each_sample_is_drawn_once_an_epoch_by_one_rank(crew: Crew, num_samples: int, size: int) -> None:
    shares = crew.run(3, drawn, num_samples, fixed(size), 2)
    for epoch in range(2):
        together = [index for share in shares for index in share[epoch]]
        assert sorted(together) == list(range(num_samples))
        sizes = [len(share[epoch]) for share in shares]
        assert max(sizes) - min(sizes) <= 1


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
    model = mlp(seed=rank)
    loop, ticks = loop_of(model, source, replace(CONFIG, revert_slowdowns=True))
    parts, sizes = [], []
    for step in range(num_steps):
        if rank == 1:
            source.limit = 2 if 40 <= step < 60 or step == 120 else 10**9
        before = len(source.drawn)
        loop.step()
        parts.append(loop._training.steps.step.num_micro_batches)
        sizes.append(sum(map(len, source.drawn[before:])))
    faults = [fault for tick in ticks for fault in tick.observation.faults]
    logged = [(tick.observation, tick.decision) for tick in ticks]
    found = {
        "decisions": [encode(tick.decision) for tick in ticks],
        "observations": [encode(tick.observation) for tick in ticks],
        "replays": replay(loop.config, logged).diverged_at is None,
        "parts": parts,
        "batches": [tick.applied.plan.batch_size for tick in ticks],
        "faults": sorted({fault.kind.value for fault in faults}),
        "details": [fault.detail for fault in faults if fault.kind is FaultKind.OUT_OF_MEMORY],
        "eigenvalues": any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers),
        "weights": listed(model),
    }
    loop.close()
    return found


def test_ranks_decide_the_same_while_one_of_them_runs_short_of_memory(crew: Crew) -> None:
    first, second = crew.run(2, pressed, 200)
    assert len(first["decisions"]) == 50
    for name in ("decisions", "observations", "parts", "batches", "weights"):
        assert first[name] == second[name], name
    assert first["replays"]
    assert first["eigenvalues"]
    assert "out_of_memory" in first["faults"]
    assert "rank 1 raised OutOfMemoryError: no room on this rank" in first["details"][0]
    assert min(first["batches"]) < max(first["batches"])


def retreated(rank: int) -> dict[str, Any]:
    """A step of 12 samples of which rank 1 can pass two at once, and the weights after it."""
    model = nn.Sequential(mlp(), Limited(2 if rank == 1 else 10**9))
    source = CountingSource(*blobs(24))
    loop, _ = loop_of(model, source, fixed(12))
    loop.step()
    found = {"weights": listed(model), "parts": loop._training.steps.step.num_micro_batches}
    found["loss"] = loop.epoch_loss.tolist()
    passed = model[1].sizes[-found["parts"] :]
    loop.close()
    return found | {"passed": sum(passed), "largest": max(passed)}


def test_all_ranks_retreat_in_the_step_in_which_one_runs_out_of_memory(crew: Crew) -> None:
    (alone,) = crew.run(1, trained, 24, fixed(12), 1)
    found = crew.run(3, retreated)
    for each in found:
        assert each["parts"] == 2  # of 4 samples each
        assert (each["passed"], each["largest"]) == (4, 2)
        assert each["loss"] == [pytest.approx(alone["loss"], rel=1e-5), 12]
        assert_close(each["weights"], alone["weights"])


def too_large(rank: int) -> str:
    loop, _ = loop_of(nn.Sequential(mlp(), Limited(0 if rank == 1 else 10**9)), blobs(24), fixed(12))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        loop.step()
    loop.close()
    return str(raised.value)


def test_a_sample_that_does_not_fit_on_one_rank_ends_the_run_on_all(crew: Crew) -> None:
    texts = crew.run(3, too_large)
    assert texts[1] == "no room for more samples"
    assert texts[0] == texts[2] == "rank 1 raised OutOfMemoryError: no room for more samples"


def broken(rank: int) -> str:
    class Broken(CountingSource):
        def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
            if rank == 1 and generator is not None and self.drawn:
                raise OSError("a file is missing")
            return super().batch(indices, generator)

    loop, _ = loop_of(mlp(), Broken(*blobs(24)), fixed(12))
    with pytest.raises((OSError, RuntimeError)) as raised:
        loop.train_epoch()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_an_error_on_one_rank_ends_all_at_once_and_is_named(crew: Crew) -> None:
    first, second = crew.run(2, broken)
    assert second == "OSError: a file is missing"
    assert first == "PeerError: rank 1 raised OSError: a file is missing"


def diverged(rank: int) -> dict[str, Any]:
    """Five steps, in the third of which rank 1 finds a gradient that is not finite."""
    step = 0

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        value = cross_entropy(outputs, targets)
        return value * math.nan if rank == 1 and step == 2 else value

    model = mlp()
    loop, _ = loop_of(model, blobs(96), fixed(8), loss=loss)
    history = []
    for step in range(5):  # noqa: B007  # `loss` reads it
        loop.step()
        history.append(listed(model))
    skipped, count = loop.num_skipped, loop.epoch_loss[1].item()
    loop.close()
    return {"skipped": skipped, "history": history, "count": count}


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(crew: Crew) -> None:
    first, second = crew.run(2, diverged)
    assert first == second
    assert (first["skipped"], first["count"]) == (1, 32)
    assert first["history"][1] == first["history"][2] != first["history"][3]


def refusal(rank: int, kind: str) -> str:
    """The error with which a loop, or its first steps, are refused."""
    model, config, options = mlp(), fixed(4), {}
    data: Any = blobs(24)
    if kind == "settings":
        config = replace(config, every_steps=4 + rank)
    elif kind == "seed":
        options["seed"] = rank
    elif kind == "model":
        model, data = mlp(features=8 + rank), blobs(24, features=8 + rank)
    elif kind == "data":
        data = blobs(24 + rank)
    elif kind == "batch":
        config = fixed(2)
    elif kind == "step_in_backward":
        config = replace(config, step_in_backward=True)
    elif kind == "stream":
        data = Stream()
    if kind == "baseline":
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(ValueError, match=r".") as raised:
            BaselineLoop(model, optimizer, cross_entropy, data, method="fp32", batch_size=4)
        return str(raised.value)
    with pytest.raises(ValueError, match=r".") as raised:
        loop_of(model, data, config, **options)
    return str(raised.value)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        inputs, targets = blobs(8)
        return iter(zip(inputs, targets, strict=True))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("settings", "every_steps = 4 on rank 0 and 5 on rank 1: must be the same on all ranks"),
        ("seed", "seed = 0 on rank 0 and 1 on rank 1: must be the same"),
        ("model", 'model = [[["0.weight", [16, 8], '),
        ("data", "number of samples = 24 on rank 0 and 25 on rank 1"),
        ("batch", "batch minimum (batch_min) = 2: must be at least the number of ranks, 3"),
        ("step_in_backward", "step_in_backward = True: must be False on 3 ranks"),
        ("stream", "data = an iterable data set, on 3 ranks: must be one with __getitem__"),
        ("baseline", "the process group has several ranks: a baseline trains in one process; use ControlLoop"),
    ],
)
def test_what_ranks_cannot_share_is_refused_on_all_of_them(crew: Crew, kind: str, text: str) -> None:
    for found in crew.run(3, refusal, kind):
        assert text in found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(crew: Crew, world_size: int) -> None:
    (whole,) = crew.run(1, trained, 98, fixed(12), 24)
    first, second = crew.run(2, trained, 98, fixed(12), 11)
    assert first["weights"] == second["weights"]
    for each in crew.run(world_size, trained, 98, fixed(12), 13, first["state"]):
        assert_close(each["weights"], whole["weights"])
        assert each["count"] == whole["count"]
        assert each["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def saved(rank: int) -> dict[str, Any]:
    loop, _ = loop_of(mlp(), blobs(96))
    for _ in range(30):
        loop.step()
    state = loop.state_dict()
    loop.close()
    return plain(state)


def test_ranks_hold_equal_states_apart_from_their_random_numbers_and_clocks(crew: Crew) -> None:
    first, second = crew.run(2, saved)
    own = {"sampler", "random", "memory_peaks", "epoch_seconds", "adapting_ms", "sensors", "undecided"}
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} <= own
    differing = {name for name in first["sampler"] if first["sampler"][name] != second["sampler"][name]}
    assert differing == {"generator", "rank"}


def unlike(rank: int) -> str:
    if rank == 1:
        decide = triaccel_ray.loop.decide

        def other(*args: Any) -> Any:
            decision = decide(*args)
            return replace(decision, plan=replace(decision.plan, batch_size=decision.plan.batch_size + 4))

        triaccel_ray.loop.decide = other
    try:
        loop, _ = loop_of(mlp(), blobs(96))
        with pytest.raises(RanksDifferError) as raised:
            loop.train_epoch()
        assert loop.num_steps == 4
        loop.close()
    finally:
        if rank == 1:
            triaccel_ray.loop.decide = decide
    return str(raised.value)


def test_a_decision_that_differs_ends_the_run_at_once(crew: Crew) -> None:
    first, second = crew.run(2, unlike)
    assert first == second
    assert "the decision of tick 0 differs between ranks (rank 0: ..." in first
    assert '"batch_size": 12,' in first.partition("rank 1: ")[0]
    assert '"batch_size": 16,' in first.partition("rank 1: ")[2]


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


def captured(rank: int, fails_on: int | None) -> dict[str, Any]:
    """A run whose steps are captured, for a stand-in of a graph; the capture fails on one rank, if any."""
    error = RuntimeError("no graph here") if rank == fails_on else None
    pool = Recorder(error)
    before = triaccel_ray.control.training.GraphPool
    triaccel_ray.control.training.GraphPool = lambda device: pool
    try:
        model = mlp(seed=rank)
        loop, ticks = loop_of(model, blobs(62), fixed(10))
        pool.loop = loop
        for _ in range(21):
            loop.step()
        if fails_on is None and rank == 1:
            pool.release()  # as an evaluation that ran out of memory does, on one rank
        loop.evaluate(blobs(31))
        for _ in range(9):
            loop.step()
        loop.close()
    finally:
        triaccel_ray.control.training.GraphPool = before
    faults = [fault.detail for tick in ticks for fault in tick.observation.faults]
    return {"weights": listed(model), "enabled": loop._training.steps.enabled, "tried": pool.num_tried,
            "faults": faults}  # fmt: skip


@pytest.mark.parametrize("fails_on", [None, 1])
def test_all_ranks_replay_a_step_or_none_does(crew: Crew, fails_on: int | None) -> None:
    (alone,) = crew.run(1, trained, 62, fixed(10), 30)
    found = crew.run(3, captured, fails_on)
    for each in found:
        assert_close(each["weights"], alone["weights"])
        assert each["enabled"] == (fails_on is None)
        assert each["tried"] == found[0]["tried"]
        assert (each["tried"] > 1) == (fails_on is None)
        assert each["faults"] == ([] if fails_on is None else found[0]["faults"])


def augmented(rank: int) -> dict[str, Any]:
    source = TensorSource(*blobs(48), augment=shift_and_noise)
    loop, _ = loop_of(mlp(), source, fixed(12))
    first = torch.rand(2, generator=loop.sampler.generator).tolist()
    loop.close()
    return {"drawn": first, "order": loop.sampler._order.tolist()}


def test_augmentation_differs_between_ranks_and_the_order_does_not(crew: Crew) -> None:
    first, second = crew.run(2, augmented)
    assert first["order"] == second["order"]
    assert first["drawn"] != second["drawn"]


def test_a_process_alone_has_no_peers() -> None:
    ranks = Ranks.found()
    assert ranks.is_alone
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.gather("value") == ["value"]
    assert not ranks.any(False)


def mixed(rank: int) -> dict[str, Any]:
    """A run in FP16 and BF16, in parts."""
    precision = PrecisionConfig(enabled=False, initial=BF16, allow_slow_precisions=True)
    model = mlp()
    loop, _ = loop_of(model, blobs(62), replace(fixed(10, accumulate=2), precision=precision))
    for _ in range(14):
        loop.step()
    loop.close()
    return {"weights": listed(model)}


def test_ranks_stay_equal_in_sixteen_bits(crew: Crew) -> None:
    first, second = crew.run(2, mixed)
    assert first == second


class Unsteady(nn.Module):
    """Has a branch that training reaches only while `is_open`, on rank 1 alone."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.trunk, self.branch = mlp(), nn.Linear(4, 4)
        self.is_open = rank == 1

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.trunk(inputs)
        return self.branch(outputs) if self.is_open else outputs


def branched(rank: int) -> dict[str, Any]:
    """One step of SGD with weight decay on a model of which rank 0 does not reach all."""
    model = Unsteady(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    loop = ControlLoop(model, optimizer, cross_entropy, blobs(24), config=fixed(12))
    before = listed(model.branch)
    loop.step()
    found = {"weights": listed(model), "moved": listed(model.branch) != before}
    loop.close()
    return found


def test_a_weight_that_one_rank_reaches_has_a_gradient_on_all(crew: Crew) -> None:
    first, second = crew.run(2, branched)
    assert first == second
    assert first["moved"]


def overlapped(rank: int) -> dict[str, Any]:
    """How many messages leave during a captured backward pass, and before its end."""
    pool, before = Recorder(), triaccel_ray.control.training.GraphPool
    triaccel_ray.control.training.GraphPool = lambda device: pool
    sent: list[str] = []
    try:
        loop, _ = loop_of(mlp(seed=rank), blobs(240), fixed(12))
        pool.loop = loop
        reduction = loop._training.steps.step._reduction
        assert reduction is not None
        reduction._buckets = [[index] for index in reversed(range(len(reduction.parameters)))]
        start = reduction._ranks.start_sum

        def start_sum(tensors: Sequence[Tensor]) -> Callable[[], None]:
            sent.append("during" if reduction._pass is not None else "after")
            return start(tensors)

        reduction._ranks.start_sum = start_sum  # type: ignore[method-assign]
        for _ in range(3):
            sent.clear()
            loop.step()
        loop.close()
    finally:
        triaccel_ray.control.training.GraphPool = before
    return {"sent": sent, "weights": listed(loop.model)}


def test_a_captured_step_sends_gradients_during_the_backward_pass(crew: Crew) -> None:
    (alone,) = crew.run(1, trained, 240, fixed(12), 3)
    for each in crew.run(2, overlapped):
        assert each["sent"] == ["during"] * 6 + ["after"]  # a message for each parameter, then the loss
        assert_close(each["weights"], alone["weights"])


def summed_copies(rank: int) -> list[list[float]]:
    """Gradients of a model with low-precision copies of its weights: of this rank, summed after and during the pass."""
    model = mlp()
    layers = find_layers(model)
    weights = ComputeCopies(layers, model.parameters())
    precision = LayerPrecision(model, layers, weights=weights)
    precision.set({layer.name: BF16 if index else FP32 for index, layer in enumerate(layers)})
    parameters = list(model.parameters())
    gradients = SharedGradients(Reduction(parameters, parameters, Ranks.found()))
    inputs, targets = blobs(8, seed=rank)
    found = []
    for publishes in (True, False):
        gradients.begin(publishes=publishes)
        for tensor in (*parameters, *weights.in_force.values()):
            tensor.grad = None
        with precision.in_force():
            loss = cross_entropy(model(inputs).float(), targets)
        with gradients._reduction.taking(weights.in_force, is_whole=True):
            loss.backward()
        assert (gradients._reduction._pass is None) == publishes
        if publishes:
            own = [gradient_of(p, weights.in_force.get(id(p)), None).float().flatten() for p in parameters]
            found.append(torch.cat(own).tolist())
        gradients.collect(weights.in_force)
        assert {tensor.dtype for tensor in gradients.tensors} == {torch.bfloat16, torch.float32}
        found.append(torch.cat([tensor.float().flatten() for tensor in gradients.tensors]).tolist())
    precision.remove()
    return found


def test_gradients_of_low_precision_copies_are_summed_in_their_dtype(crew: Crew) -> None:
    (own, after, during), (others, *same) = crew.run(2, summed_copies)
    assert after == during
    assert [after, during] == same
    torch.testing.assert_close(torch.tensor(after), torch.tensor(own) + torch.tensor(others), rtol=1e-2, atol=1e-4)


def opened(rank: int) -> dict[str, Any]:
    """A run in which rank 1 reaches another weight when its step is captured than in the step before."""
    pool, before = Recorder(), triaccel_ray.control.training.GraphPool
    triaccel_ray.control.training.GraphPool = lambda device: pool
    try:
        model = Unsteady(rank)
        model.is_open = False
        loop, ticks = loop_of(model, blobs(96), fixed(12))
        pool.loop = loop
        loop.step()
        model.is_open = rank == 1
        for _ in range(7):
            loop.step()
        loop.close()
    finally:
        triaccel_ray.control.training.GraphPool = before
    faults = [fault.detail for tick in ticks for fault in tick.observation.faults]
    return {"weights": listed(model), "enabled": loop._training.steps.enabled, "faults": faults}


def test_gradients_that_arrive_otherwise_in_a_captured_step_end_capture_on_all_ranks(crew: Crew) -> None:
    first, second = crew.run(2, opened)
    assert first == second
    assert not first["enabled"]
    assert "gradients have arrived otherwise than in the step before, on some rank" in first["faults"]


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
    agreement = Agreement(Ranks.found())
    found = []
    for own in [(None, error) for error in errors] + [(errors[1], errors[4])]:  # of two, the worse one wins
        try:
            with agreement.agreeing(), agreement.agreeing():  # the outer one has nothing to add
                raising(own[rank])
        except Exception as error:
            found.append(type(error).__name__)
    return found


def raising(error: Exception | None) -> None:
    if error is not None:
        raise error


def test_an_error_of_one_rank_is_one_of_the_same_kind_on_the_others(crew: Crew) -> None:
    first, second = crew.run(2, agreed)
    assert second == [
        "BudgetExceededError", "OutOfMemoryError", "TorchDynamoException", "NotCapturableError", "KeyError", "KeyError"
    ]  # fmt: skip
    assert first == [
        "BudgetExceededError", "PeerOutOfMemoryError", "PeerCompileError", "NotCapturableError", "PeerError",
        "PeerError",
    ]  # fmt: skip
