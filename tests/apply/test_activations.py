"""Regions that are recomputed or offloaded: the same gradients, statistics and random numbers, for less memory."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from tests.apply.compiled import Recording
from tests.apply.fusible import fused
from tests.apply.test_split_weights import FIXED, IN_BF16, run
from tests.build import (
    BF16,
    CPU,
    FP32,
    ONE,
    RerunPool,
    cache_of,
    cross_entropy,
    gradients,
    loop_of,
    same,
    step_of,
    values,
)
from triaccel_ray.apply import offload, step_in_backward
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.compile import Compilation
from triaccel_ray.apply.divide import Divided, divide
from triaccel_ray.apply.step import Step
from triaccel_ray.config import ExecutionConfig
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.regions import find_regions
from triaccel_ray.records.plan import FaultKind, Precision, Storage
from triaccel_ray.trainables.models import resnet18

ALL = ("blocks.0", "blocks.1", "blocks.2")


class Residual(nn.Module):
    """A block with running statistics and random numbers, which takes several dtypes."""

    def __init__(self, width: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        both = torch.stack([self.norm(self.conv(x)), x])  # demands one dtype
        return x + scale * self.dropout(torch.relu(both.sum(0)))


class Network(nn.Module):
    def __init__(self, *dropouts: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(4, dropout) for dropout in dropouts or (0.3, 0.3, 0.3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def images(num_samples: int = 12, size: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, 3, size, size, generator=generator), torch.arange(num_samples) % 4


def storing(model: nn.Module, fixed: Storage | None = None) -> Step:
    """A step whose regions may be stored in any way, or only as `fixed` says."""
    step = step_of(model, images())
    step.activations = Activations(find_regions(model), CPU, fixed=fixed)
    return step


def recomputing(model: nn.Module) -> Step:
    return storing(model, Storage.RECOMPUTE)


def assert_same(*steps: Step, index: int = 0, num_samples: int = 12) -> None:
    """Asserts that a step of each gives the same loss, gradients, statistics and random numbers."""
    found = []
    for step in steps:
        torch.manual_seed(index)
        random.seed(index)
        outcome = step.run(torch.arange(num_samples), ONE, step=index)
        assert outcome.faults == ()
        found.append((outcome.loss_sum, gradients(step.model), values(step.model), torch.get_rng_state()))
    assert same(*found)


def test_regions_are_the_smallest_blocks_that_repeat_or_the_children_where_none_does() -> None:
    assert tuple(find_regions(Network())) == ALL
    assert list(find_regions(resnet18(10, "cifar"))) == [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
    stages = nn.Sequential(*[nn.Sequential(*[Residual(width) for _ in range(2)]) for width in (4, 8)])
    assert list(find_regions(stages)) == ["0.0", "0.1", "1.0", "1.1"]
    layers = nn.ModuleDict({"in": nn.Linear(2, 8), "hidden": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
    assert list(find_regions(layers)) == ["hidden"]
    shared = Residual(4)
    assert list(find_regions(nn.Sequential(shared, nn.ReLU(), shared))) == ["0"]
    assert find_regions(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == {}
    text = nn.Sequential(nn.Embedding(999, 4), nn.Sequential(Residual(4), Residual(4)))
    assert list(find_regions(nn.Sequential(text))) == ["0.1.0", "0.1.1"]  # however large the embedding is


class DenseBlock(Residual):
    def __init__(self) -> None:
        super().__init__(4)
        self.gain = nn.Parameter(torch.eye(6))  # no layer of the loop's, which has an autocast of its own

    def forward(self, xs: list[Tensor], *, scale: float = 1.0) -> Tensor:
        return super().forward(sum(xs), scale=scale * random.random()) @ self.gain


class Dense(Network):
    """Hands its blocks a list that grows, as DenseNet does, under an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[DenseBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x).float()]
        with torch.autocast("cpu", enabled=False):
            for block in self.blocks:
                found.append(block(found, scale=0.5).float())
        return self.head(sum(found).mean((2, 3)))


class Penalized(Network):
    """Differentiates its blocks itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        outputs = super().forward(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs + slope.square().mean()


@pytest.mark.parametrize(("make", "level"), [(Dense, BF16), (lambda: Penalized(0.0, 0.0, 0.0), FP32)])
def test_blocks_compute_the_same_the_second_time(make: Any, level: Precision) -> None:
    steps = step_of(make(), images()), recomputing(make())
    for step in steps:
        step.precision.set(dict.fromkeys(step.precision._regions, level))
    assert len(step.activations.storage) == 3
    assert_same(*steps)


def test_trajectories_are_those_of_kept_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_in_backward, "BUCKET_ELEMENTS", 30)
    monkeypatch.setattr(offload, "MIN_BYTES", 64)
    found = []
    for storage in (Storage.KEEP, Storage.RECOMPUTE, Storage.OFFLOAD):
        execution = ExecutionConfig(activations=storage.value)
        loop, _ = loop_of(Network(), images(40), replace(IN_BF16, step_in_backward=True, execution=execution))
        assert len(loop._training.steps.step.activations.storage) == (0 if storage is Storage.KEEP else 3)
        run(loop, 6)
        found.append((values(loop.model), float(loop.epoch_loss[0])))
        loop.close()
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_an_input_that_changes_before_the_backward_pass_is_an_error_and_not_a_wrong_gradient() -> None:
    class Overwriting(Network):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.stem(x)
            out = self.blocks[0](hidden)
            hidden.mul_(2.0)
            return self.head(out.mean((2, 3)))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recomputing(Overwriting()).run(torch.arange(12), ONE, step=0)


class Caching(nn.Sequential):
    """As a decoder that keeps its keys: called again with the same input it has less to do."""

    seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is not x:
            self.seen, self.keys = x, super().forward(x)
        return self.keys + x * random.random()  # a retried batch draws the same number


class Queue(nn.Sequential):
    """Fails in the backward pass, as a decoder whose cache has grown."""

    def forward(self, x: Tensor) -> Tensor:
        scales = [2.0] if torch._C._current_graph_task_id() == -1 else []  # -1: outside of a backward pass
        return super().forward(scales.pop() * x)


def spectral(conv: nn.Module, *parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(conv), *parts)


@pytest.mark.parametrize("block", [Caching, Queue, spectral])
def test_blocks_that_compute_something_else_when_called_again_are_kept(block: Any) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        random.seed(0)
        blocks = [block(nn.Conv2d(4, 4, 1), nn.Tanh()) for _ in range(2)]
        return nn.Sequential(nn.Conv2d(3, 4, 6), *blocks, nn.Flatten())

    kept = step_of(model(), images())
    kept.run(torch.arange(12), ONE, step=0)
    step = recomputing(model())
    assert len(step.activations.storage) == 2
    outcome = step.run(torch.arange(12), ONE, step=0)
    (fault,) = outcome.faults
    assert (fault.kind, "1, 2 are kept" in fault.detail) == (FaultKind.ACTIVATIONS_KEPT, True)
    assert not step.activations.storage
    assert same(gradients(step.model), gradients(kept.model))


def test_a_failure_of_the_users_own_checkpoint_comes_through() -> None:
    class Own(Network):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.differing, super().forward(x), use_reentrant=False)

        def differing(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return x.exp().exp() if self.num_calls == 1 else x.exp()

    step = recomputing(Own())
    num_regions = len(step.activations.storage)
    with pytest.raises(CheckpointError):
        step.run(torch.arange(12), ONE, step=0)
    assert len(step.activations.storage) == num_regions > 0


@pytest.mark.parametrize("storage", [Storage.RECOMPUTE, Storage.OFFLOAD])
def test_compiled_blocks_stay_compiled_and_share_their_code(storage: Storage) -> None:
    torch._dynamo.reset()
    model, recording = Network(0.0, 0.0, 0.0), Recording([], [])
    backend = recording.backend  # one for all: PyTorch compiles again for another
    step = step_of(model, images())
    step.compilation = Compilation(model, list(model.blocks))
    for block in model.blocks:
        block.compile(backend=backend)
    found = []
    for step.activations in (Activations({}, CPU), Activations(find_regions(model), CPU, fixed=storage)):
        recording.calls.clear()
        step.run(torch.arange(12), ONE, step=0)
        found.append((len(recording.graphs), len(recording.calls), gradients(model)))
    (code, once, kept), (same_code, in_all, again) = found
    assert 0 < code == same_code
    assert in_all == (2 * once if storage is Storage.RECOMPUTE else once)
    assert same(kept, again)
    torch._dynamo.reset()


def fused_step(model: nn.Module, fixed: Storage | None = None) -> Step:
    step, fusion, regions = step_of(model, images(8, size=32)), fused(model), find_regions(model)
    step.fusion = fusion
    step.activations = Activations(
        regions, CPU, fixed=fixed, divide=partial(divide, model, fusion.module, list(regions))
    )
    return step


def test_regions_are_kept_once_a_replay_has_drawn_other_random_numbers() -> None:
    step = recomputing(Network(0.0, 0.0, 0.0))
    cache = cache_of(step, pool=RerunPool())
    assert [cache.run(torch.arange(4), ONE, step=index) for index in range(2)] == [(), ()]
    cache._unverified = set(cache._entries)
    step.activations.rng.replay = lambda graph, kind: bool(graph.replay())
    (fault,) = cache.run(torch.arange(4), ONE, step=2)
    assert (fault.kind, fault.step) == (FaultKind.ACTIVATIONS_KEPT, 2)
    assert "activations of blocks.0, blocks.1, blocks.2 are kept" in fault.detail
    assert not step.activations.storage


@pytest.mark.parametrize("compiles", [False, True])
def test_where_there_is_nothing_to_checkpoint_a_fault_says_why(compiles: bool) -> None:
    model = Network() if compiles else nn.Sequential(nn.Conv2d(3, 4, 6), nn.Flatten())
    config = replace(FIXED, execution=ExecutionConfig(activations="recompute", compile="on" if compiles else "off"))
    loop = ControlLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, images(), config=config)
    found = {fault.kind: fault.detail for fault in loop._training.faults}
    assert ("compiled code" if compiles else "no blocks") in found[FaultKind.ACTIVATIONS_KEPT]
    assert not loop._training.steps.step.activations.regions


def test_a_plan_may_name_a_region_that_the_fused_model_turned_out_not_to_have() -> None:
    kept, left_out = nn.Linear(2, 2), nn.Linear(2, 2)

    def divided(joined: Any) -> Divided:
        return Divided(module=fx.symbolic_trace(kept), regions={"kept": kept}, before={}, spared={})

    activations = Activations({"kept": kept, "left_out": left_out}, torch.device("cpu"), divide=divided)
    for _ in range(2):
        activations.set(dict.fromkeys(("kept", "left_out"), Storage.RECOMPUTE))
        assert activations.storage == {"kept": Storage.RECOMPUTE}
