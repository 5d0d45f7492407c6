"""Which code unequal blocks and whole models run for which sizes; on a CPU, as PyTorch traces it, and on a GPU."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.apply.captured import fixed, images, loop_of
from tests.apply.compiled import Block, Graphs, recorded_by, told
from tests.build import BF16, FP32, Wired
from triaccel_ray.apply.compile import Compilation, is_compiled
from triaccel_ray.model.regions import are_faster_apart, find_regions


def test_of_unequal_blocks_only_the_batch_dimension_is_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of equal shapes share code. Maps of other sizes get code of their own; a third batch size does not."""
    seen: Graphs = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recorded_by(seen)))
    model = nn.Sequential(Block(4), Wired(lambda self, x: x[:, ::2].contiguous()), Block(4), Block(4))
    compilation = Compilation(model, [model[0], model[2], model[3]], are_equal=False)
    for size in (3, 5, 7):
        with compilation.in_force():
            compilation.forward_of(None)(torch.ones(size, 10, 4, requires_grad=True)).sum().backward()
    assert len(seen) == 4  # for the first batch size, then for any other
    for graph, length in zip(seen[2:], (10, 5), strict=True):
        entered = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        maps = [each.shape for each in entered if isinstance(each, torch.Tensor) and each.dim() == 3]
        assert {type(shape[0]) for shape in maps} == {torch.SymInt}
        assert {type(size) for shape in maps for size in shape[1:]} == {int}
        assert {shape[1] for shape in maps} == {length}
    compilation.remove()
    assert not is_compiled(model)


@pytest.mark.parametrize("dimension", [0, 1])
def test_sizes_that_vary_become_dynamic_at_the_second(dimension: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Graphs = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recorded_by(seen)))
    model = nn.Sequential(Block(4), Block(4))
    compilation = Compilation(model, list(model), are_equal=False)
    for size in (12, 9, 7, 5):
        shape = [12, 12, 4]
        shape[dimension] = size
        with compilation.in_force():
            compilation.forward_of(None)(torch.ones(shape, requires_grad=True)).sum().backward()
    assert len(seen) == 2  # with constant sizes, then with a dynamic one
    compilation.remove()


def test_the_first_sizes_of_unequal_blocks_keep_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that were tried and undone must not leave the whole batch with the slower code for any size."""
    seen: Graphs = []
    ran: list[int] = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recorded_by(seen, ran)))
    model = nn.Sequential(Block(4), Block(4))
    compilation = Compilation(model, list(model), are_equal=False)
    for size in (12, 6, 12, 3, 12):
        with compilation.in_force():
            compilation.forward_of(None)(torch.ones(size, 4, requires_grad=True)).sum().backward()
    assert ran[::2] == ran[1::2] == [0, 1, 0, 1, 0]
    compilation.remove()


@pytest.mark.parametrize(("num_short", "is_compiled"), [(32, False), (33, True)])
@pytest.mark.parametrize("has_blocks", [False, True])
def test_no_code_is_compiled_for_a_short_batch(
    num_short: int, is_compiled: bool, has_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more than half of the samples, an uncompiled pass might take more memory than a whole batch."""
    seen: Graphs = []
    ran: list[int] = []
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=recorded_by(seen, ran)))
    torch.manual_seed(0)
    num_samples = 128 + num_short
    data = torch.randn(num_samples, 8), torch.randint(0, 10, (num_samples,))
    config = fixed(FP32, compile="auto" if has_blocks else "on", activations="recompute")
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(Block(16), Block(16)), nn.Linear(16, 10))
    loop = loop_of(model, config, data=data)
    if has_blocks:
        loop._training.steps.step.compilation = Compilation(model, list(model[1]), are_equal=False)
    losses = [loop.train_epoch().loss for _ in range(2)]
    per_step = 4 if has_blocks else 1  # two blocks, and each again in the backward pass
    assert len(ran) == 2 * per_step * (3 if is_compiled else 2)
    assert len(seen) == (2 if is_compiled else 1)
    assert losses[1] < losses[0]
    loop.close()


class Separable(nn.Sequential):
    """A depthwise convolution, a norm and a layer, as in a ConvNeXt."""

    def __init__(self, width: int, size: int) -> None:
        depthwise = nn.Conv2d(width, width, size, padding=size // 2, groups=width)
        super().__init__(depthwise, nn.GroupNorm(1, width), nn.Conv2d(width, width, 1), nn.GELU())


def stages(size: int) -> nn.Module:
    parts = [part for width in (8, 16) for part in (nn.Conv2d(width // 2, width, 2, stride=2), Separable(width, size))]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.parametrize("size", [3, 7])
def test_unequal_regions_run_faster_apart_if_they_have_large_depthwise_convolutions(size: int) -> None:
    regions = find_regions(stages(size))
    assert len(regions) == 2
    assert are_faster_apart(regions) == (size == 7)
    assert not are_faster_apart({})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 7])
def test_a_network_of_unequal_blocks_is_compiled_as_it_is_faster_and_trains_as_the_plain_one(size: int) -> None:
    """With a short batch of 32 in each epoch."""
    losses = []
    for how in ("auto", "off"):
        torch.manual_seed(0)
        ticks: list[Any] = []
        loop = loop_of(stages(size).cuda(), fixed(BF16, compile=how), on_tick=ticks.append, data=images(672))
        losses.append([loop.train_epoch().loss for _ in range(3)])
        expected = "2 x Separable compiled: their large" if size == 7 else "Sequential compiled as a whole"
        assert any(expected in each for each in told(ticks)) == (how == "auto"), told(ticks)
        assert loop._training.steps.num_captured == 2
        loop.close()
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0.02)
