"""What regions save moves to the host and back: the same gradients, once per tensor, in memory that is used again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.build import CPU, ONE, blobs, gradients, same, step_of
from triaccel_ray.apply import offload
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.offload import Arena, Offloading, RegionWeights, movable_bytes
from triaccel_ray.records.plan import FaultKind, Storage

ALL = torch.arange(16)
SIZE = 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", SIZE)
    monkeypatch.setattr(offload, "_CHUNK_BYTES", 8192)


class Block(nn.Module):
    """Saves one tensor three times, as a whole, as a view and squared, and passes it to the next block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(torch.relu_(self.linear(x).mul_(2.0)))
        left, right = hidden.chunk(2, dim=1)
        return hidden * hidden + torch.cat([right, left], 1) * torch.cat([left.exp(), right], 1) * self.gain


def network(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)], nn.Linear(8, 4))


def offloading(model: nn.Module) -> Any:
    step = step_of(model, blobs(16))
    regions = {name: module for name, module in model.named_children() if isinstance(module, Block)}
    step.activations = Activations(regions, CPU, fixed=Storage.OFFLOAD)
    return step


def passed(engine: Offloading, blocks: list[nn.Module], x: Tensor) -> tuple[Tensor, list[int], list[list[Any]]]:
    """The output of the blocks, and for each block the bytes that it has sent, and what the engine holds of them."""
    sent, held = [], []
    for index, block in enumerate(blocks):
        x = engine.run(str(index), RegionWeights.of(block), lambda: torch.no_grad(), block, x)
        before = engine.arena._offset
        engine.send(str(index))
        sent.append(engine.arena._offset - before)
        held.append(list(engine._last.blocks.values()))
    return x, sent, held


def test_memory_goes_once_however_often_it_is_saved_and_weights_stay() -> None:
    saved: set[int] = set()
    engine, blocks = Offloading(CPU), list(network(2))[:2]
    x = torch.randn(4, 8)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.add(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        kept = blocks[0](x)  # so that no address is used twice
    weights = {p.untyped_storage().data_ptr() for p in blocks[0].parameters()}
    with engine.in_force():
        y, sent, _ = passed(engine, blocks, x)
        assert sent == [512 * len(saved - weights)] * 2  # each tensor has 128 bytes, and starts a line of its own
        engine.send()
        y.sum().backward()
    assert kept.shape == y.shape
    assert 0 < len(saved - weights) < 8


def test_the_device_holds_no_tensor_that_has_left() -> None:
    engine, blocks = Offloading(CPU), list(network(3))[:3]
    with engine.in_force():
        y, _, held = passed(engine, blocks, torch.randn(4, 8))
        assert all(each.source is None and each.memory is None for each in (*held[0], *held[1]))
        own = [each for each in held[2] if each not in held[1]]
        assert all(each.source is not None for each in own)  # until the next region has been called
        y.sum().backward()
        assert all(each.memory is not None for each in (*held[0], *held[1]))
        assert not engine._leaving
    assert engine._last is None


@pytest.mark.parametrize("when", ["before it has left", "after that"])
@pytest.mark.parametrize("num_features", [8, 2])
def test_a_write_to_a_saved_tensor_is_an_error_or_comes_too_late_to_matter(when: str, num_features: int) -> None:
    engine = Offloading(CPU)
    x = torch.full((4, num_features), 2.0, requires_grad=True)
    hidden = x * 1.0
    with engine.in_force():
        y = engine.run("a", RegionWeights.of(nn.Module()), lambda: torch.no_grad(), torch.square, hidden)
        engine.send("a")
        if when == "after that":
            engine.send()
        with torch.no_grad():
            hidden.zero_()
        if when == "after that" and num_features == 8:
            y.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, 4.0))
            return
        engine.send()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()  # a small tensor is kept, and checked at any time


def test_what_is_moved() -> None:
    x = torch.randn(8, 8)
    assert movable_bytes(x, CPU) == movable_bytes(x[:, :4], CPU) == 256
    assert movable_bytes(torch.randn(64, 32)[:1], CPU) == 0  # of a far larger memory
    assert movable_bytes(torch.randn(1, 8), CPU) == 0
    assert movable_bytes(x.as_subclass(type("Own", (Tensor,), {})), CPU) == 0
    assert movable_bytes(x.to_sparse(), CPU) == 0
    assert movable_bytes(torch.randn(8, 8, dtype=torch.complex64).conj(), CPU) == 0
    linear = nn.Linear(8, 4)  # alive, so that its addresses are no one else's
    weights = RegionWeights.of(linear)
    assert weights.include(torch.empty(8, 4, dtype=torch.bfloat16))  # a transposed copy
    assert not weights.include(torch.empty(8, 4))  # activations of that shape, by chance


def test_host_memory_that_is_missing_is_an_error_of_the_capture_and_else_a_fault() -> None:
    arena = Arena(pinned=False)
    with pytest.raises(RuntimeError, match="more pinned memory than the step before: 100 bytes"):
        arena.take(100, grows=False)
    assert [len(arena.take(size)) for size in (100, 9000)] == [100, 9000]
    assert list(map(len, arena._chunks)) == [8192, 16384]
    arena.rewind()
    assert len(arena.take(8192, grows=False)) == 8192

    def refuse(num_bytes: int) -> None:
        raise RuntimeError("cannot pin")

    kept, step = step_of(network(), blobs(16)), offloading(network())
    step.activations._offloading.arena._grow = refuse
    kept.run(ALL, ONE, step=0)
    (fault,) = step.run(ALL, ONE, step=0).faults
    assert (fault.kind, fault.phase) == (FaultKind.ACTIVATIONS_KEPT, "checkpoint")
    assert "cannot pin" in fault.detail
    assert "0, 1, 2 are kept" in fault.detail
    assert step.activations.storage == {}
    assert same(gradients(step.model), gradients(kept.model))


class Void(Offloading):
    """Cannot wait for its copies, as in a capture that is void."""

    def _join(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_a_capture_that_is_void_leaves_nothing_behind() -> None:
    engine = Void(CPU)
    wide = torch.randn(4, 9)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), engine.in_force():
        passed(engine, [nn.Sigmoid(), Block()], wide)
    assert engine._last is engine._leaving is None


def test_gradients_off_save_nothing() -> None:
    step = offloading(network())
    with torch.no_grad(), step.activations.in_force(step.model, step._recomputing):
        step.model(blobs(16)[0])
        assert step.activations._offloading._last is None
