"""Regions of compiled code that are recomputed in part, with code that Inductor generates for a CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.apply.compiled import Block
from tests.build import CPU, ONE, cache_of, gradients, step_of
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.apply.compile import Compilation, _VaryingSizes
from triaccel_ray.apply.step import Step
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.records.codec import encode
from triaccel_ray.records.plan import FaultKind, Plan, Precision, Storage

NAMES = ["blocks.0", "blocks.1", "blocks.2"]
KEEP, RECOMPUTE, OFFLOAD, JOIN, *SELECTIVE = Storage


class Deep(nn.Module):
    """Two feed-forward layers of a transformer in each block: there is much to choose from."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(*[nn.Sequential(block(16), block(16)) for _ in NAMES])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Random(Block):
    """Draws random numbers by several operations."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(torch.relu(self.up(self.norm(x))), 0.3)
        y = y * torch.bernoulli(torch.full_like(y, 0.7))
        y = y * y.new_empty(len(y), 1).bernoulli_(0.8)  # as stochastic depth
        return x + nn.functional.rrelu(self.down(y), training=True)


@torch.library.custom_op("triaccel_tests::drop", mutates_args=())
def drop(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout as a library's attention has it: PyTorch does not know that the operation draws random numbers."""
    mask = (torch.rand_like(x) < 0.7).to(x.dtype)
    return x * mask, mask


drop.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
drop.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Custom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + drop(self.down(drop(torch.relu(self.up(self.norm(x))))[0]))[0]


def compiled(model: Deep, **options: Any) -> Step:
    generator = torch.Generator().manual_seed(0)
    step = step_of(model, (torch.randn(24, 6, generator=generator), torch.arange(24) % 3))
    step.compilation = Compilation(model, list(model.blocks), **options)
    step.activations = Activations(dict(zip(NAMES, model.blocks, strict=True)), CPU, are_compiled=True)
    return step


@pytest.fixture(autouse=True)
def _without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def step() -> Step:
    return compiled(Deep())


def run(step: Step, storage: dict[str, Storage]) -> tuple[int, list[Tensor]]:
    """Makes a step; returns the bytes that it saves for the backward pass, weights left out, and the gradients."""
    step.activations.set(storage)
    weights = {weight.untyped_storage().data_ptr() for weight in step.model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.run(torch.arange(24), ONE, step=0)
    return sum(saved.values()), gradients(step.model)


def test_code_keeps_its_share_of_what_it_saved_and_the_gradients_agree(step: Step) -> None:
    kept, expected = run(step, {})
    least, _ = run(step, dict.fromkeys(NAMES, Storage.RECOMPUTE))
    before = kept
    for each in SELECTIVE:
        held, found = run(step, dict.fromkeys(NAMES, each))
        torch.testing.assert_close(found, expected)
        assert held - least <= each.kept_share * (kept - least)
        assert held <= before
        before = held
    of_one, _ = run(step, {NAMES[1]: Storage.SELECTIVE_30})
    assert kept - of_one == (kept - before) / len(NAMES)
    assert run(step, {})[0] == kept


@pytest.mark.parametrize("block", [Random, Custom])
def test_random_numbers_are_those_of_the_forward_pass(block: type[Block]) -> None:
    step = compiled(Deep(block))
    found = []
    for storage in (KEEP, *SELECTIVE):
        torch.manual_seed(3)
        found.append(run(step, dict.fromkeys(NAMES, storage))[1])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


def test_a_users_pass_runs_in_selective_code_too(step: Step) -> None:
    seen = []

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(graph)

        def uuid(self) -> str:
            return str(id(self))  # no cache has it

    step.activations.set(dict.fromkeys(NAMES, Storage.SELECTIVE_50))
    with torch._inductor.config.patch(joint_custom_post_pass=Pass()):
        step.run(torch.arange(24), ONE, step=0)
    assert seen


def test_the_first_sizes_are_those_of_the_first_pass_in_any_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may begin with an epoch's short last batch, whose code is for sizes that vary."""
    found, match = [], _VaryingSizes.match_first

    def record(sizes: _VaryingSizes, value: Any) -> bool:
        found.append((len(value[0][0]), match(sizes, value)))
        return found[-1][1]

    monkeypatch.setattr(_VaryingSizes, "match_first", record)
    step = compiled(Deep(), any_size=False)
    step.run(torch.arange(24), ONE, step=0)
    step.activations.set(dict.fromkeys(NAMES, Storage.SELECTIVE_50))
    for number in (7, 24):
        step.run(torch.arange(number), ONE, step=1)
    assert set(found) == {(24, True), (7, False)}


def test_each_storage_may_have_as_many_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaccel_ray.apply.compile._RECOMPILE_LIMIT", 2)
    step = compiled(Deep(), any_size=False)
    for storage in (KEEP, *SELECTIVE):
        step.activations.set(dict.fromkeys(NAMES, storage))
        for number in (24, 7):
            assert step.run(torch.arange(number), ONE, step=0).faults == ()


def test_an_error_of_the_loss_is_not_blamed_on_selective_storage(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch._dynamo.exc.TorchDynamoException("no such loss")

    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    assert step.compilation is not None
    step.compilation._loss = fail
    step.activations.set(dict.fromkeys(NAMES, Storage.SELECTIVE_50))
    (fault,) = step.run(torch.arange(24), ONE, step=0).faults
    assert "the loss runs as it is" in fault.detail
    assert set(step.activations.storage.values()) == {Storage.SELECTIVE_50}


def test_a_run_that_is_resumed_without_compilation_keeps_what_was_selective(step: Step) -> None:
    step.activations = Activations(step.activations.regions, CPU)
    plan = Plan(batch_size=24, precision={"stem": Precision.FP32})
    actuators = Actuators(plan, cache_of(step), GraphPool(CPU))
    storage = {NAMES[0]: RECOMPUTE, NAMES[1]: Storage.SELECTIVE_50}
    state = actuators.state_dict() | {"plan": encode(replace(plan, storage=storage)), "storage": encode(storage)}
    levels = {"stem": (Precision.FP32,)}
    actuators.load_state_dict(state, levels, adapts_precision=True, adapts_batch=True)
    assert actuators.plan.storage == step.activations.storage == {NAMES[0]: RECOMPUTE}


def test_what_cannot_be_compiled_so_is_kept(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise NotImplementedError("no such setting")

    step.run(torch.arange(24), ONE, step=0)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", refuse)
    step.activations.set(dict.fromkeys(NAMES, Storage.SELECTIVE_30))
    outcome = step.run(torch.arange(24), ONE, step=1)
    (fault,) = outcome.faults
    assert fault.kind is FaultKind.ACTIVATIONS_KEPT
    assert "no such setting" in fault.detail
    assert step.activations.storage == {}
    assert step.compilation is not None
    step.activations.set(dict.fromkeys(NAMES, Storage.SELECTIVE_50))
    assert step.activations.storage == {}
