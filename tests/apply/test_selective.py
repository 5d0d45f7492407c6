"""Regions of compiled code that are recomputed in part, with code that Inductor generates for a CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.apply.compiled import Block
from tests.build import CPU, ONE, gradients, step_of
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.compile import Compilation
from triaccel_ray.apply.step import Step
from triaccel_ray.records.plan import FaultKind, Storage

NAMES = ["blocks.0", "blocks.1", "blocks.2"]
KEEP, RECOMPUTE, OFFLOAD, JOIN, *SELECTIVE = Storage


class Deep(nn.Module):
    """Two feed-forward layers of a transformer in each block: there is much to choose from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.Sequential(*[nn.Sequential(Block(16), Block(16)) for _ in NAMES])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


@pytest.fixture
def step() -> Iterator[Step]:
    torch._dynamo.reset()
    model = Deep()
    generator = torch.Generator().manual_seed(0)
    step = step_of(model, (torch.randn(24, 6, generator=generator), torch.arange(24) % 3))
    step.compilation = Compilation(model, list(model.blocks))
    step.activations = Activations(dict(zip(NAMES, model.blocks, strict=True)), CPU, are_compiled=True)
    yield step
    torch._dynamo.reset()


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


def test_only_compiled_regions_are_recomputed_in_part(step: Step) -> None:
    step.activations = Activations(step.activations.regions, CPU)
    step.activations.set({NAMES[0]: Storage.SELECTIVE_50, NAMES[1]: Storage.RECOMPUTE})
    assert step.activations.storage == {NAMES[1]: Storage.RECOMPUTE}
