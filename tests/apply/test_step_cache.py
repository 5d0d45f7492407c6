"""What the cache of captured steps decides, on the CPU: a pool runs what a GPU would capture."""

import functools
import gc
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.utils import import_utils

from tests.apply.fusible import Block, fused
from tests.build import CPU, ONE, NoUpdate, RerunPool, Wired, blobs, cache_of, cross_entropy, mlp, step_of
from triaccel_ray.apply.activations import Activations
from triaccel_ray.apply.agreement import NotCapturableError
from triaccel_ray.apply.capture import MAX_GRAPHS, StepCache
from triaccel_ray.apply.compile import Compilation
from triaccel_ray.apply.static_batch import StaticBatch
from triaccel_ray.cuda.capture_checks import Obstacle
from triaccel_ray.data.sources import TensorSource
from triaccel_ray.records.plan import Fault, FaultKind

ALL = torch.arange(16)
NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def cache_with(*errors: Exception | None, model: nn.Module | None = None) -> tuple[StepCache, RerunPool, NoUpdate]:
    pool, update = RerunPool(*errors), NoUpdate()
    return cache_of(step_of(model or mlp(), blobs(16)), update, pool), pool, update


@pytest.mark.parametrize(
    ("is_capturable", "num_steps"),
    [(True, 1 + 1 + 3), (False, 1 + 3)],  # the first, what is run in place of capturing, one for each replay
)
def test_the_second_step_of_a_kind_is_captured_and_the_later_ones_replayed(is_capturable: bool, num_steps: int) -> None:
    cache, pool, update = cache_with()
    update.is_capturable = is_capturable
    for step in range(4):
        assert cache.run(ALL, ONE, step=step) == ()
    assert cache.num_captured == 1
    assert pool.num_tried == 1
    assert update.num_steps == num_steps
    cache.run(ALL[:8], ONE, step=4)  # of another kind, hence eager: no graph beside it
    gc.collect()
    assert not pool.holds_graphs


def test_the_graph_that_was_used_longest_ago_makes_room_for_one_too_many() -> None:
    cache, _, _ = cache_with()
    sizes = range(1, MAX_GRAPHS + 1)
    for step, size in enumerate([*sizes, MAX_GRAPHS + 1, *sizes]):
        cache.run(ALL[:size], ONE, step=step)
    assert cache.num_captured == MAX_GRAPHS
    cache.run(ALL[:1], ONE, step=98)  # used again, so that 2 is the one
    cache.run(ALL[: MAX_GRAPHS + 1], ONE, step=99)
    assert [kind.batch_size for kind in cache._entries] == [*range(3, MAX_GRAPHS + 1), 1, MAX_GRAPHS + 1]


def test_a_capture_without_memory_is_told_paid_for_and_not_repeated_until_there_is_some() -> None:
    cache, pool, update = cache_with(NO_ROOM)
    cache.step.set_num_micro_batches(3)
    cache.run(ALL, ONE, step=0)
    cache.take_cost()
    (fault,) = cache.run(ALL, ONE, step=1)
    kind, where = FaultKind.CAPTURE_OUT_OF_MEMORY, {"step": 1, "batch_size": 16, "micro_batch_size": 6}
    assert fault == Fault(kind=kind, phase="capture", detail=str(NO_ROOM), **where)
    assert cache.take_cost() > 0.0
    assert cache.run(ALL, ONE, step=2) == ()
    assert pool.num_tried == 1
    assert update.num_steps == 4  # one of them in the attempt
    pool.release()
    cache.run(ALL, ONE, step=3)
    assert cache.num_captured == 1


class OnTheHost(TensorSource):
    """Samples on the host, of which the third batch is what `third` makes of it."""

    num_batches = 0
    is_resident = False
    third: Any = staticmethod(lambda *batch: batch)

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        self.num_batches += 1
        batch = super().batch(indices, generator)
        return self.third(*batch) if self.num_batches == 3 else batch


def without_room(*_: Tensor) -> Any:
    raise NO_ROOM


@pytest.mark.parametrize(
    ("third", "kind", "detail"),
    [
        (without_room, FaultKind.CAPTURE_OUT_OF_MEMORY, str(NO_ROOM)),
        (lambda x, y: (x.clone(), y), None, ""),
        (lambda x, y: (x, y.int()), FaultKind.CAPTURE_FAILED, "differ in shapes, dtypes, keys or values"),
    ],
)
def test_a_batch_that_its_graph_cannot_read_is_made_eagerly_and_told(third: Any, kind: Any, detail: str) -> None:
    pool, source = RerunPool(), OnTheHost(*blobs(16))
    source.third = third
    cache = cache_of(step_of(mlp(), source, loss=lambda x, y: cross_entropy(x, y.long())), pool=pool)
    faults = [fault for step in range(4) for fault in cache.run(ALL, ONE, step=step)]
    found = [(fault.kind, fault.phase, fault.step, fault.batch_size, fault.micro_batch_size) for fault in faults]
    assert found == ([] if kind is None else [(kind, "capture", 2, 16, 16)])
    assert all(detail in fault.detail for fault in faults)
    assert cache.enabled == (kind is not FaultKind.CAPTURE_FAILED)
    pool.release()
    assert cache.run(ALL, ONE, step=4) == ()
    assert cache.num_captured == cache.enabled


def test_a_graph_reads_the_parts_of_batches_from_the_host() -> None:
    gradients = []
    for kind in (TensorSource, OnTheHost):
        cache = cache_of(step_of(mlp(), kind(*blobs(32))), pool=RerunPool())
        cache.step.set_num_micro_batches(2)
        for step, start in enumerate([0, 8, 16]):
            assert cache.run(torch.arange(start, start + 15), ONE, step=step) == ()
        assert cache.num_captured == 1
        gradients.append([parameter.grad for parameter in cache.step.model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.0, atol=0.0)


def test_a_capture_that_fails_leaves_the_augmentation_to_the_eager_step() -> None:
    drawn = []
    for errors in ((), (RuntimeError("not permitted"),)):
        source = OnTheHost(
            *blobs(16), augment=lambda x, generator: drawn.append(torch.rand(1, generator=generator)) or x
        )
        cache = cache_of(step_of(mlp(), source), pool=RerunPool(*errors))
        for step in range(3):
            cache.run(ALL, ONE, step=step)
    assert len(drawn) == 7  # what a failed capture drew is drawn again
    assert drawn[:3] == [drawn[3], *drawn[5:]]
    assert drawn[4] == drawn[5]


def test_a_wait_ends_capturing_only_if_the_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaccel_ray.apply.capture.has_capture_query", lambda: False)
    text = "the host waits for the device (model.py:1)"
    found = [Obstacle(text, is_certain=False)]
    monkeypatch.setattr("triaccel_ray.apply.step.watched", lambda into, device: nullcontext(into.extend(found)))
    cache, _, _ = cache_with()
    assert [cache.run(ALL, ONE, step=step) for step in range(3)] == [(), (), ()]
    assert cache.num_captured == 1
    cache, pool, _ = cache_with(RuntimeError("not permitted"))
    faults = [fault for step in range(3) for fault in cache.run(ALL, ONE, step=step)]
    assert [(fault.kind, fault.step) for fault in faults] == [(FaultKind.CAPTURE_FAILED, 1)]
    assert faults[0].detail == f"{text}; not permitted"
    assert (cache.enabled, pool.num_tried) == (False, 1)
    assert all(parameter.grad is not None for parameter in cache.step.model.parameters())  # an eager step's
    found.append(Obstacle("a certain obstacle"))
    cache, pool, _ = cache_with()
    assert [fault.detail for fault in cache.run(ALL, ONE, step=0)] == [f"{text}; a certain obstacle"]
    assert pool.num_tried == 0


@pytest.mark.parametrize("waits", [False, True])
def test_eager_and_captured_steps_of_transformers_run_the_same_code(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, is_told = import_utils.is_cuda_stream_capturing, list[bool]()
    assert original.__name__ in import_utils.is_tracing.__code__.co_names  # it is what models ask

    class Asks(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            is_told.append(import_utils.is_cuda_stream_capturing())
            return super().forward(inputs)

    def watched(obstacles: list[Obstacle], device: torch.device) -> Any:
        if waits and not import_utils.is_cuda_stream_capturing():
            obstacles.append(Obstacle("the host waits for the device (masking_utils.py:1)", is_certain=False))
        return nullcontext()

    monkeypatch.setattr("triaccel_ray.apply.step.watched", watched)
    cache, _, _ = cache_with(model=nn.Sequential(Asks(blobs(16)[0].shape[1], 4)))
    assert [cache.run(ALL, ONE, step=step) for step in range(4)] == [()] * 4
    assert cache.num_captured == 1
    # Eager; if that waited, eager as captured; the capture and replays.
    assert is_told == ([False, *[True] * 4] if waits else [False] * 5)
    assert import_utils.is_cuda_stream_capturing is original


def test_a_model_whose_blocks_cannot_be_captured_is_compiled_as_a_whole() -> None:
    model = mlp()
    cache, _, _ = cache_with(RuntimeError("not permitted"), model=model)
    cache.step.compilation = compilation = Compilation(model, [model[0]])
    compiled = []
    model[0]._compiled_call_impl = model[0]._call_impl
    compilation.compile_whole = lambda: compiled.append(compilation.remove())
    faults = [fault for step in range(6) for fault in cache.run(ALL, ONE, step=step)]
    assert [(fault.kind, fault.step) for fault in faults] == [(FaultKind.COMPILED, 2)]
    assert faults[0].detail.endswith("not permitted")
    assert len(compiled) == cache.num_captured == 1


def refusing_parts(fails: list[bool]) -> Any:
    """A backend of `torch.compile` that, once `fails` holds something, refuses code of a single linear layer."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        if fails and len(graph.graph.find_nodes(op="call_function", target=torch.nn.functional.linear)) == 1:
            raise RuntimeError("no code for a part")
        return graph.forward

    return backend


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, while it compiles
@pytest.mark.parametrize("has_plan", [False, True])
def test_if_blocks_cannot_be_compiled_the_whole_is_unless_memory_is_planned_by_blocks(
    has_plan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refusing_parts([True])))
    cache, _, _ = cache_with(model=model)
    blocks = {"0": model[0], "2": model[2]}
    cache.step.compilation = compilation = Compilation(model, list(blocks.values()))
    cache.step.activations = Activations(blocks, CPU)
    if has_plan:
        cache.step.activations.request_costs()
    faults = [fault for step in range(4) for fault in cache.run(ALL, ONE, step=step)]
    told = [fault.detail for fault in faults if fault.kind is FaultKind.COMPILED]
    consequence = "the model runs as it is" if has_plan else "the model is compiled as a whole"
    assert len(told) == 1
    assert told[0].startswith(f"torch.compile failed, {consequence}: ")
    assert "no code for a part" in told[0]
    assert cache.step.compilation is (None if has_plan else compilation)
    assert list(cache.step.activations.regions) == (["0", "2"] if has_plan else [])
    assert cache.num_captured == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, while it compiles
def test_a_loss_stays_compiled_when_blocks_fail_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fails = mlp(), list[bool]()
    torch._dynamo.reset()
    monkeypatch.setattr("triaccel_ray.apply.compile._MIN_OUTPUTS", 1)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refusing_parts(fails)))
    cache, _, _ = cache_with(model=model)
    cache.step.compilation = compilation = Compilation(model, [model[0], model[2]])
    assert cache.run(ALL, ONE, step=0) == ()
    assert compilation.compiles_loss
    fails.append(True)
    torch._dynamo.reset()  # as a new precision would, it needs new code
    (fault,) = cache.run(ALL, ONE, step=1)
    assert fault.detail.startswith("torch.compile failed, the model is compiled as a whole: ")
    assert compilation.compiles_loss
    assert [cache.run(ALL, ONE, step=step) for step in (2, 3)] == [(), ()]
    assert cache.num_captured == 1
    torch._dynamo.reset()


CHANGES: dict[str, Any] = {
    "hook": lambda model, _: model[0].weight.register_post_accumulate_grad_hook(lambda _: None),
    "frozen": lambda model, _: model[0].weight.requires_grad_(False),
    "moved": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.clone()),
    "mode": lambda model, _: model[1].eval(),
    "mode of the loss": lambda _, loss: loss.eval(),
    "buffer of the loss": lambda _, loss: setattr(loss, "weight", loss.weight.clone()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_ends_the_graphs_that_do_not_know_of_it(change: str) -> None:
    model, loss, pool = mlp(), nn.CrossEntropyLoss(weight=torch.ones(4)), RerunPool()
    cache = cache_of(step_of(model, blobs(16), loss=loss), pool=pool)
    for step in range(3):
        cache.run(ALL, ONE, step=step)
    CHANGES[change](model, loss)
    cache.run(ALL, ONE, step=3)
    assert cache.num_captured == 0
    cache.run(ALL, ONE, step=4)
    assert cache.num_captured == 1
    assert pool.num_tried == 2


def test_what_a_watched_step_found_does_not_reach_the_next() -> None:
    drawing = Wired(lambda self, inputs: inputs * float(torch.rand(()) >= 0.0))
    cache, pool, _ = cache_with(model=nn.Sequential(mlp(), drawing))
    (fault,) = cache.run(ALL, ONE, step=0)
    assert "draws random numbers on the host" in fault.detail
    assert not cache.enabled
    assert cache.run(ALL, ONE, step=1) == ()
    assert pool.num_tried == 0


def test_norms_that_the_kernel_refused_are_told_once_and_steps_are_captured_all_the_same() -> None:
    model = Block().train()
    fusion = fused(model)
    data = torch.randn(16, 4, 6, 6), torch.zeros(16)
    step = step_of(model, data, loss=lambda outputs, targets: outputs.square().mean())
    step.fusion = fusion
    cache = cache_of(step, pool=RerunPool())
    fusion.norms[0].refused_because = "activations are not in channels_last memory"  # as the first step on a GPU does
    (fault,) = cache.run(ALL, ONE, step=0)
    assert (fault.kind, fault.phase, fault.step) == (FaultKind.FUSION_REFUSED, "fuse", 0)
    assert fault.detail == "activations are not in channels_last memory"
    assert cache.run(ALL, ONE, step=1) == ()
    assert cache.num_captured == 1
    assert cache.run(ALL[:8], ONE, step=2) == ()


def part(number: float = 0.0, **others: Any) -> tuple[int, Any, Any]:
    return 2, {"a": torch.full((2, 3), number), "b": torch.full((2, 3), -number), **others}, torch.zeros(2)


def test_values_follow_their_names_whatever_the_order_and_what_is_no_tensor_stays() -> None:
    static = StaticBatch([part(), part(c="a word", d=None, e=3)])
    places = static.parts[1][1]
    swapped = dict(reversed(part(2.0, c="a word", d=None, e=3)[1].items()))
    static.fill([part(1.0), (2, swapped, torch.ones(2))])
    assert static.parts[1][1] is places
    assert (float(static.parts[0][1]["a"][0, 0]), float(places["a"][0, 0]), float(places["b"][0, 0])) == (1, 2, -2)
    assert float(static.parts[1][2][0]) == 1.0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"more": torch.zeros(2)}),
        ({"c": "a word"}, {"c": "another"}),
        ({"c": torch.zeros(2)}, {"c": torch.zeros(3)}),
        ({"c": torch.zeros(2)}, {"c": torch.zeros(2, dtype=torch.long)}),
        ({"c": torch.zeros(2)}, {"c": (torch.zeros(2),)}),
        ({"c": np.zeros(2)}, {"c": np.zeros(2)}),  # a constant of the graph
        ({"c": None}, {"c": torch.zeros(2)}),
    ],
)
def test_batches_of_another_kind_are_refused(before: dict[str, Any], after: dict[str, Any]) -> None:
    static = StaticBatch([part(**before)])
    with pytest.raises(NotCapturableError, match="differ in shapes, dtypes, keys or values that are not tensors"):
        static.fill([part(**after)])
