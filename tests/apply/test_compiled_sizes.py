"""Which code blocks and whole models run for which sizes; on a CPU, as PyTorch traces it, and on a GPU."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.apply.captured import fault_messages, fixed, images, loop_of
from tests.apply.compiled import Block, Recording
from tests.build import BF16, FP32, Wired
from triaccel_ray.apply.compile import Compilation, is_compiled
from triaccel_ray.loop import ControlLoop
from triaccel_ray.model.regions import have_large_depthwise_convolutions


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    """What `torch.compile` compiles and runs, instead of generated code."""
    record = Recording([], [])
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=record.backend))
    return record


def pass_samples(compilation: Compilation, *sizes: tuple[int, ...]) -> None:
    """Trains on inputs of these shapes, one after another."""
    for size in sizes:
        inputs = torch.ones(size, requires_grad=True)
        with compilation.in_force():
            compilation.forward_of(inputs)(inputs).sum().backward()


def compiling(blocks: list[nn.Module], num_samples: int = 160, config: Any = None, **options: Any) -> ControlLoop:
    """A loop over a model with these blocks, which are compiled, and 2.5 batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*blocks), nn.Linear(16, 10))
    data = torch.randn(num_samples, 8), torch.randint(0, 10, (num_samples,))
    loop: ControlLoop = loop_of(model, config or fixed(FP32), data=data, **options)
    loop._training.steps.step.compilation = loop._training._compile()
    return loop


def shapes(graph: torch.fx.GraphModule) -> list[torch.Size]:
    """Shapes of the tensors that enter a graph; dynamic sizes are symbols."""
    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    return [value.shape for value in values if isinstance(value, torch.Tensor)]


def test_of_unequal_blocks_only_the_batch_dimension_is_dynamic(recording: Recording) -> None:
    """Blocks of equal shapes share code. Maps of other sizes get code of their own; a third batch size does not."""
    model = nn.Sequential(Block(4), Wired(lambda self, x: x[:, ::2].contiguous()), Block(4), Block(4))
    compilation = Compilation(model, [model[0], model[2], model[3]], are_equal=False)
    pass_samples(compilation, (3, 10, 4), (5, 10, 4), (7, 10, 4))
    assert len(recording.graphs) == 4  # for the first batch size, then for any other
    for graph, length in zip(recording.graphs[2:], (10, 5), strict=True):
        maps = [shape for shape in shapes(graph) if len(shape) == 3]
        assert {type(shape[0]) for shape in maps} == {torch.SymInt}
        assert {type(size) for shape in maps for size in shape[1:]} == {int}
        assert {shape[1] for shape in maps} == {length}
    compilation.remove()
    assert not is_compiled(model)


def test_sizes_that_vary_become_dynamic_at_the_second(recording: Recording) -> None:
    model = nn.Sequential(Block(4), Block(4))
    compilation = Compilation(model, list(model), are_equal=False)
    pass_samples(compilation, *((12, size, 4) for size in (12, 9, 7, 5)))
    assert len(recording.graphs) == 2  # with constant sizes, then with a dynamic one
    compilation.remove()


@pytest.mark.parametrize("num_blocks", [2, 0])
def test_the_first_sizes_of_blocks_and_of_a_whole_model_keep_their_code(num_blocks: int, recording: Recording) -> None:
    """Micro-batches that were tried and undone must not leave the whole batch with the slower code for any size."""
    model = nn.Sequential(Block(4), Block(4))
    compilation = Compilation(model, list(model)[:num_blocks], are_equal=False)
    pass_samples(compilation, *((size, 4) for size in (12, 6, 12, 3, 12)))
    assert recording.calls[:: num_blocks or 1] == [0, 1, 0, 1, 0]
    assert len(recording.graphs) == 2
    compilation.remove()


def test_only_training_passes_set_the_first_sizes(recording: Recording) -> None:
    """An evaluation of other samples first must not leave training with code for sizes that vary."""
    loop, inputs = compiling([Block(16), Block(16)], 192), torch.randn(7, 8)
    loop._training.steps.step.compilation = Compilation(loop.model, list(loop.model[1]), are_equal=False)
    expected = loop.model(inputs[:5])
    loop.evaluate((inputs, torch.zeros(7, dtype=torch.long)))
    assert recording.graphs == []
    loop.train_epoch()
    loop.model(inputs[:5])
    loop.train_epoch()
    assert len(recording.graphs) == 1
    assert recording.calls == [0] * 12
    assert not torch.equal(loop.model(inputs[:5]), expected)
    loop.close()


class Scaled(Block):
    """A block with a number of its own, or given one."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__(width)
        self.scale = scale

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        return super().forward(x) * (self.scale if scale is None else scale)


class Annealed(nn.Module):
    """Blocks that are given a number, which changes in every step, or the length of their input."""

    def __init__(self, *, by_length: bool) -> None:
        super().__init__()
        self.blocks, self.by_length, self.step = nn.ModuleList(Scaled(4) for _ in range(3)), by_length, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        scale = float(x.shape[1]) if self.by_length else 1.0 / self.step
        for block in self.blocks:
            x = block(x, scale)
        return x


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("any_size", [False, True])
def test_numbers_given_to_equal_blocks_need_two_more_variants_at_most(
    by_length: bool, any_size: bool, recording: Recording
) -> None:
    model = Annealed(by_length=by_length)
    compilation = Compilation(model, list(model.blocks), any_size=any_size)
    for index in range(8):
        inputs = torch.randn(3, 5 + index if by_length else 5, 4, requires_grad=True)
        with compilation.in_force():
            outputs = compilation.forward_of(inputs)(inputs)
    expected = inputs
    for block in model.blocks:
        expected = block._call_impl(expected, float(inputs.shape[1]) if by_length else 1.0 / model.step)
    torch.testing.assert_close(outputs, expected)
    assert len(recording.graphs) <= 3
    compilation.remove()


@pytest.mark.parametrize(("have_numbers", "number"), [(False, 2), (True, 1)])
def test_blocks_with_numbers_of_their_own_have_code_for_any_size(
    have_numbers: bool, number: int, recording: Recording
) -> None:
    """For static sizes, each would have code of its own."""
    loop = compiling([Scaled(16, 0.5 + index / 8 if have_numbers else 0.5) for index in range(4)])
    for _ in range(2):
        loop.train_epoch()
    loop.close()
    assert len(recording.graphs) == number


@pytest.mark.parametrize(("grows", "headroom"), [(False, None), (True, None), (False, 8 * 2**30)])
def test_equal_blocks_have_code_for_the_size_of_a_fixed_batch_and_for_any_of_one_that_may_change(
    grows: bool, headroom: int | None, recording: Recording
) -> None:
    config = fixed(FP32)
    config = replace(config, batch=replace(config.batch, enabled=grows))
    loop = compiling([Block(16), Block(16)], config=config, memory_headroom=headroom)
    for _ in range(2):
        loop.train_epoch()
    loop.close()
    may_change = grows or headroom is not None
    assert recording.calls == ([0] * 6 if may_change else [0, 0, 0, 0, 1, 1]) * 2
    is_dynamic = [any(isinstance(size, torch.SymInt) for size in sum(shapes(each), ())) for each in recording.graphs]
    assert is_dynamic == ([True] if may_change else [False, True])


class Separable(nn.Sequential):
    """A depthwise convolution, a norm and a layer, as in a ConvNeXt."""

    def __init__(self, width: int, size: int) -> None:
        depthwise = nn.Conv2d(width, width, size, padding=size // 2, groups=width)
        super().__init__(depthwise, nn.GroupNorm(1, width), nn.Conv2d(width, width, 1), nn.GELU())


def stages(size: int) -> nn.Module:
    parts = [part for width in (8, 16) for part in (nn.Conv2d(width // 2, width, 2, stride=2), Separable(width, size))]
    return nn.Sequential(nn.Conv2d(3, 4, 1), *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.parametrize(
    ("convolution", "is_large"),
    [
        (nn.Conv2d(4, 4, 3, groups=4), False),
        (nn.Conv2d(4, 4, 3, groups=4, dilation=3), False),
        (nn.Conv2d(4, 4, (1, 11), groups=4), True),
        (nn.Conv2d(4, 4, 5, groups=4), True),
        (nn.Conv2d(4, 4, 7, groups=2), False),
        (nn.Conv2d(4, 4, 7), False),
    ],
)
def test_large_depthwise_convolutions_are_found_in_regions(convolution: nn.Module, is_large: bool) -> None:
    regions = {"first": nn.Sequential(nn.ReLU()), "second": nn.Sequential(nn.ReLU(), convolution)}
    assert have_large_depthwise_convolutions(regions) == is_large


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 7])
def test_unequal_blocks_are_compiled_one_by_one_with_large_depthwise_convolutions(size: int) -> None:
    """Each epoch has a short batch. The loss agrees with uncompiled code's to BF16's precision."""
    losses = []
    for how in ("auto", "off"):
        torch.manual_seed(0)
        ticks: list[Any] = []
        loop = loop_of(stages(size).cuda(), fixed(BF16, compile=how), on_tick=ticks.append, data=images(10 * 64 + 32))
        losses.append([loop.train_epoch().loss for _ in range(3)])
        expected = "2 x Separable compiled: depthwise" if size == 7 else "Sequential compiled as a whole"
        messages = fault_messages(ticks)
        assert any(expected in each for each in messages) == (how == "auto"), messages
        assert loop._training.steps.num_captured == 2
        loop.close()
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0.02)
