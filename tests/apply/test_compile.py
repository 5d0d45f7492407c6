"""What is compiled of a model, and its loss; on a CPU, with the code that PyTorch traces run as it is."""

import functools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.apply.captured import fault_messages, faults_of, fixed, loop_of
from tests.apply.compiled import Block, Recording
from tests.build import BF16, FP32, Wired, blobs, mlp
from triaccel_ray.apply.compile import Compilation, is_compiled, loss_in_fp32, share_kernel_cache
from triaccel_ray.apply.precision import LayerPrecision
from triaccel_ray.apply.weights import ComputeCopies, Weights
from triaccel_ray.model.layers import find_layers
from triaccel_ray.model.regions import repeated_blocks
from triaccel_ray.records.plan import Precision


def test_the_largest_blocks_that_repeat_are_found_whatever_holds_them() -> None:
    def found(model: nn.Module) -> list[str]:
        return [type(block).__name__ for block in repeated_blocks(model)]

    model = nn.ModuleDict({"embed": nn.Embedding(1000, 8), "head": nn.Linear(8, 2)})
    model["blocks"] = nn.ModuleList(Block(8) for _ in range(3))
    assert found(model) == ["Block"] * 3
    assert found(nn.Sequential(*[nn.Sequential(Block(8), Block(8)) for _ in range(2)])) == ["Block"] * 4
    pairs = [Wired(len, first=Block(8), second=Block(8)) for _ in range(2)]
    assert found(nn.Sequential(*pairs)) == ["Wired"] * 2
    both = nn.Transformer(16, 2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=32, batch_first=True)
    assert found(both) == ["TransformerEncoderLayer"] * 2 + ["TransformerDecoderLayer"] * 3
    # None where they grow wider, or are a small part.
    assert found(nn.Sequential(*[Block(width) for width in (8, 16, 32, 64)])) == []
    assert found(nn.Sequential(Block(4), Block(4), nn.Linear(100, 100))) == []


@pytest.mark.parametrize("has_copies", [False, True])
def test_equal_blocks_share_compiled_code_and_a_plan_adds_only_its_variants(has_copies: bool) -> None:
    """Compiled code must depend on the dtypes of a block's layers alone, not on which block it is."""
    torch._dynamo.reset()  # other tests may have used up the variants of such a block
    recording = Recording([], [])
    blocks = [Block(4) for _ in range(4)]
    model = nn.Sequential(*blocks)
    layers = find_layers(model)
    weights = ComputeCopies(layers, model.parameters()) if has_copies else Weights()
    precision = LayerPrecision(model, layers, weights=weights)
    precision.set({layer.name: BF16 for layer in layers})
    backend = recording.backend  # one for all: PyTorch compiles again for another
    for block in blocks:
        block.compile(backend=backend, dynamic=True)
    for size in (3, 5):
        with precision.in_force():
            model(torch.ones(size, 4, requires_grad=True)).sum().backward()
    assert len(recording.graphs) == 1
    entered = [node.meta["example_value"] for node in recording.graphs[0].graph.find_nodes(op="placeholder")]
    shapes = [each.shape for each in entered if isinstance(each, nn.Parameter) and each.dim() == 2]
    assert shapes == [(16, 4), (4, 16)]
    assert all(type(number) is int for shape in shapes for number in shape)  # constants, although batch sizes vary
    for parameter in blocks[0].up.parameters():
        assert (parameter.grad is None) == has_copies
        assert not has_copies or weights.companions[id(parameter)].grad is not None
    precision.set({"1.up": FP32, "2.up": FP32})
    with precision.in_force():
        outputs = model(torch.ones(3, 4, requires_grad=True))
    assert len(recording.graphs) == 2
    with precision.suspended():
        exact = model(torch.ones(3, 4))
    assert len(recording.graphs) == 2
    assert exact.dtype is torch.float32
    torch.testing.assert_close(outputs.float(), exact, rtol=0.1, atol=0.1)


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("given", [None, "/somewhere"])
def test_inductor_and_this_project_share_a_folder_of_kernels(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    usual = triton.knobs.cache.dir
    share_kernel_cache()
    assert os.environ["TRITON_CACHE_DIR"] == triton.knobs.cache.dir == (given or usual)


def test_a_checkpoint_within_compiled_code_does_not_split_it() -> None:
    recording = Recording([], [])
    model = nn.Sequential(Checkpointed(4), Checkpointed(4))
    layers = find_layers(model)
    precision = LayerPrecision(model, layers, weights=ComputeCopies(layers, model.parameters()))
    precision.set({layer.name: BF16 for layer in layers})
    compiled = torch.compile(model, backend=recording.backend)
    with Compilation(model).in_force(), precision.in_force():
        compiled(torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert len(recording.graphs) == 1


def test_with_a_budget_inductor_times_kernels_without_a_buffer_of_the_caches_size() -> None:
    from torch._inductor.runtime.benchmarking import InductorBenchmarker, benchmarker

    assert isinstance(vars(InductorBenchmarker)["L2_cache_size"], functools.cached_property)
    before = dict(vars(benchmarker))
    compilation = Compilation(nn.Linear(2, 2), spares_memory=True)
    with compilation.in_force(), compilation.in_force():  # recomputation is within the pass
        assert benchmarker.L2_cache_size == 4  # type: ignore[attr-defined]
    assert vars(benchmarker) == before


def test_norms_and_embeddings_beside_the_blocks_are_compiled_one_by_one() -> None:
    blocks = [Block(8), Block(8)]
    plain, bounded = nn.Embedding(10, 8), nn.Embedding(10, 8, max_norm=1.0)  # the latter is changed by its forward pass
    model = nn.ModuleDict(
        {"plain": plain, "bounded": bounded, "blocks": nn.Sequential(*blocks), "norm": nn.LayerNorm(8)}
    )
    assert not is_compiled(model)
    compilation = Compilation(model, blocks)
    assert is_compiled(model)
    found = [module for module in model.modules() if module._compiled_call_impl is not None]
    assert set(found) == {*blocks, plain, model["norm"]}
    assert str(compilation) == "2 x Block compiled"
    compilation.remove()
    assert not is_compiled(model)


class Tower(nn.Module):
    """Blocks between an embedding of vectors and a head; between them the host waits, `eagerly` only or `always`."""

    def __init__(self, *, waits: str = "", width: int = 32) -> None:
        super().__init__()
        self.waits = waits
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        may_wait = self.waits == "always" or (self.waits and not torch.cuda.is_current_stream_capturing())
        if may_wait and not torch.compiler.is_compiling() and bool((y > 1e9).any()):
            raise AssertionError
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def tower_loop(
    compile_: str, *, waits: str = "", device: str = "cuda", level: Precision = BF16, grows: bool = False
) -> Any:
    torch.manual_seed(0)
    generator, ticks = torch.Generator().manual_seed(0), list[Any]()
    inputs, targets = torch.randn(640, 8, generator=generator), torch.randint(0, 10, (640,), generator=generator)
    data, config = (inputs.to(device), targets.to(device)), fixed(level, compile=compile_)
    config = replace(config, batch=replace(config.batch, enabled=grows))
    return loop_of(Tower(waits=waits).to(device), config, data=data, on_tick=ticks.append), ticks


@pytest.mark.gpu
@pytest.mark.parametrize("waits", ["", "eagerly", "always"])
def test_a_compiled_step_is_captured_and_trains_as_the_plain_one(waits: str) -> None:
    losses = []
    for how in ("auto", "off"):
        loop, ticks = tower_loop(how, waits=waits if how == "auto" else "")
        losses.append([loop.train_epoch().loss for _ in range(3)])
        assert loop._training.steps.num_captured == 1
        if how == "auto":
            assert any("8 x Block compiled: its blocks repeat" in each for each in fault_messages(ticks)), (
                fault_messages(ticks)
            )
            whole = [each for each in fault_messages(ticks) if "compiled as a whole: the host waits" in each]
            assert len(whole) == (waits == "always"), fault_messages(ticks)
        blocks = list(loop.model.blocks)
        loop.close()
        assert all(block._compiled_call_impl is None for block in blocks)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_another_batch_size_needs_no_new_code_for_blocks_if_the_batch_may_change() -> None:
    loop, _ = tower_loop("auto", grows=True)
    loop.train_epoch()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loop._actuators.apply(replace(loop.plan, batch_size=32), step=loop.num_steps)
    loop.train_epoch()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    loop.close()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, while it compiles
def test_a_model_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(*_: Any) -> Any:
        raise RuntimeError("no code today")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    loop, ticks = tower_loop("on", device="cpu", level=FP32)
    stats = loop.train_epoch()
    loop.close()
    assert stats.num_steps == 10
    assert any("Tower compiled as a whole: as asked" in each for each in fault_messages(ticks))
    (text,) = [each for each in fault_messages(ticks) if "failed" in each]
    assert text.startswith("compiled: torch.compile failed, the model runs as it is: ")
    assert "no code today" in text


def gradient_and_saved(
    targets: torch.Tensor, compilation: Compilation | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradient of the mean loss of BF16 outputs, and the saved tensors of the outputs' size."""
    torch.manual_seed(0)
    outputs = torch.randn(*targets.shape, 50, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == outputs.numel():
            saved.append(tensor)
        return tensor

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out["logits"].flatten(0, 1), y.flatten())

    compute = loss_in_fp32 if compilation is None else compilation.loss
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = compute(loss, {"logits": outputs * 2}, targets)
    value.backward()
    assert value.dtype is torch.float32
    assert outputs.grad is not None
    return outputs.grad, saved


def test_a_compiled_loss_is_computed_in_fp32_and_stores_no_fp32_copy_of_the_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1000)
    compilation, counts = Compilation(nn.Linear(2, 2)), []
    for batch_size in (8, 12, 20):
        targets = torch.randint(0, 50, (batch_size, 16))
        expected, widened = gradient_and_saved(targets, None)
        found, saved = gradient_and_saved(targets, compilation)
        torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-6)
        assert torch.float32 in {tensor.dtype for tensor in widened}
        assert {tensor.dtype for tensor in saved} == {torch.bfloat16}
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1]  # of any batch size
    assert compilation.compiles_loss


def test_only_the_losses_of_one_loop_share_its_limit_of_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    monkeypatch.setattr("triaccel_ray.apply.compile._LOSS_RECOMPILE_LIMIT", 1)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    loops = [Compilation(nn.Linear(2, 2)) for _ in range(3)]

    def compute(compilation: Compilation, smoothing: float) -> torch.Tensor:
        outputs, targets = torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
        with compilation.in_force():
            return compilation.loss(functools.partial(F.cross_entropy, label_smoothing=smoothing), outputs, targets)

    for index, compilation in enumerate(loops):
        compute(compilation, 0.1 * index)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="too many variants"):
        compute(loops[0], 0.9)


class Annealed(nn.Module):
    """A loss whose weight depends on the number of steps, which compiled code takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return F.cross_entropy(outputs, targets) * min(1.0, self.num_steps / 1000)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, while it compiles
@pytest.mark.parametrize(("of_each_step", "limit"), [(False, 16), (True, 3)])
def test_a_loss_that_cannot_be_compiled_runs_as_it_is_beside_a_compiled_model(
    of_each_step: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend refuses it, or each step would need code of its own."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        if not of_each_step and any(node.target is F.cross_entropy for node in graph.graph.nodes):
            raise RuntimeError("no code today")
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    monkeypatch.setattr("triaccel_ray.apply.compile._LOSS_RECOMPILE_LIMIT", limit)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    ticks: list[Any] = []
    loss = Annealed() if of_each_step else F.cross_entropy
    loop = loop_of(mlp(), fixed(FP32, compile="on"), data=blobs(640), loss=loss, on_tick=ticks.append)
    assert loop.train_epoch().num_steps == 10
    (text,) = [fault.detail for fault in faults_of(ticks) if "failed" in fault.detail]
    assert text.startswith("torch.compile failed, the loss runs as it is: ")
    assert ("too many variants" if of_each_step else "no code today") in text
    compilation = loop._training.steps.step.compilation
    assert compilation is not None
    assert compilation._loss is None
    loop.close()
    torch._dynamo.reset()
