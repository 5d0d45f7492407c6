"""Recomputed and offloaded activations on a real NVIDIA GPU: in captured, compiled, fused and eager steps."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apply.captured import fixed, loop_of, sgd
from tests.build import run
from triaccel_ray.records.plan import FaultKind, Precision, Storage
from triaccel_ray.trainables.models import resnet18
from triaccel_ray.trainables.text import GPT

pytestmark = pytest.mark.gpu

PEAK_SHARE = {
    ("resnet18", "recompute"): 0.9, ("gpt", "recompute"): 0.8, ("resnet18", "offload"): 0.95, ("gpt", "offload"): 0.95,
}  # fmt: skip
"""Below which the peak of such a step must be, of that of a step that keeps everything."""


def job(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if name == "resnet18":
        data = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
        return resnet18(10, "cifar").cuda(), data, nn.functional.cross_entropy
    text = torch.randint(0, 96, (512, 129))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return GPT(layers=4, width=128, heads=4, context=128).cuda(), (text[:, :-1], text[:, 1:]), loss


def store(loop: Any, storage: dict[str, Storage]) -> None:
    applied = loop._actuators.apply(replace(loop.plan, storage=storage), step=0)
    assert applied.faults == ()


def peak_of_a_step(loop: Any) -> int:
    """Bytes beyond those at rest of a step that is captured anew, since the graphs are dropped."""
    loop._training.make_room()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    loop.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - resting


@pytest.mark.parametrize("level", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    "execution", [{"compile": "auto"}, {"compile": "auto", "capture": False}, {"fuse": False, "compile": "off"}]
)
@pytest.mark.parametrize("storage", ["recompute", "offload"])
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_captured_compiled_fused_and_eager_steps_recompute_or_fetch_what_they_do_not_keep(
    name: str, storage: str, execution: Any, lean: bool, level: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    leanly: Any = {"weights": "split", "step_in_backward": True} if lean else {}
    found, peaks = [], []
    for activations in ("keep", storage):
        config = fixed(level, activations=activations, **execution)
        model, data, loss = job(name)
        loop = loop_of(model, replace(config, every_steps=100, **leanly), sgd, data, loss=loss)
        run(loop, 8)
        torch.cuda.synchronize()
        assert loop._training.steps.num_captured == execution.get("capture", True)
        found.append({key: value.clone() for key, value in loop.model.state_dict().items()})
        peaks.append(peak_of_a_step(loop))
        assert {fault.kind for fault in loop.tick().observation.faults} <= {FaultKind.COMPILED}
        loop.close()
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0] if key.endswith("num_batches_tracked"))
    assert peaks[1] < PEAK_SHARE[name, storage] * peaks[0]


@pytest.mark.parametrize("capture", [True, False])
def test_compiled_blocks_recompute_in_part_for_less_memory(capture: bool) -> None:
    found, peaks = [], []
    for storage in (Storage.KEEP, Storage.SELECTIVE_70, Storage.SELECTIVE_30, Storage.RECOMPUTE):
        model, data, loss = job("gpt")
        config = fixed(Precision.BF16, compile="auto", capture=capture)
        loop = loop_of(model, replace(config, every_steps=100), sgd, data, loss=loss)
        loop.step()
        store(loop, dict.fromkeys(loop._training.steps.step.activations.regions, storage))
        run(loop, 7)
        assert loop._training.steps.num_captured == capture
        found.append([parameter.detach().clone() for parameter in loop.model.parameters()])
        peaks.append(peak_of_a_step(loop))
        loop.close()
    for parameters in found[1:]:
        torch.testing.assert_close(parameters, found[0], rtol=1e-2, atol=1e-3)
    assert peaks[0] > peaks[1] > peaks[2] >= peaks[3]


class Attending(nn.Module):
    """A transformer's attention with dropout of the scores and of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(128), nn.Linear(128, 384), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), -1, 3, 2, 64).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return x + nn.functional.dropout(self.out(torch.tanh(y.transpose(1, 2).flatten(2))), 0.3)


@pytest.mark.parametrize("capture", [True, False])
def test_blocks_recomputed_in_part_drop_out_the_same(capture: bool) -> None:
    moved = []
    for storage in (Storage.KEEP, Storage.SELECTIVE_70, Storage.SELECTIVE_50, Storage.SELECTIVE_30):
        torch.manual_seed(0)
        blocks = nn.Sequential(*[Attending() for _ in range(4)])
        model = nn.Sequential(nn.Linear(16, 128), blocks, nn.Flatten(), nn.Linear(32 * 128, 10)).cuda()
        data = torch.randn(512, 32, 16), torch.randint(0, 10, (512,))
        config = fixed(Precision.BF16, compile="auto", capture=capture)
        loop = loop_of(model, replace(config, every_steps=100), sgd, data)
        loop.step()
        store(loop, dict.fromkeys(loop._training.steps.step.activations.regions, storage))
        first = nn.utils.parameters_to_vector(loop.model.parameters()).detach().clone()
        torch.manual_seed(1)
        run(loop, 5)
        assert loop._training.steps.num_captured == capture
        moved.append(nn.utils.parameters_to_vector(loop.model.parameters()).detach() - first)
        loop.close()
    for each in moved[1:]:
        assert (each - moved[0]).norm() < 0.05 * moved[0].norm()


class Block(nn.Module):
    def __init__(self, width: int, following: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 256), nn.Linear(256, following)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.relu(self.up(self.norm(x)))))


@pytest.mark.parametrize(
    ("widths", "compiled"),
    [
        ([64, 64, 64], "its blocks repeat"),
        ([64, 128, 256], "what becomes of their activations can be chosen"),  # else as a whole
    ],
)
def test_what_a_captured_step_checkpoints_and_how_it_is_compiled(widths: list[int], compiled: str) -> None:
    torch.manual_seed(0)
    blocks = [Block(*pair, 0.5) for pair in itertools.pairwise(widths)]
    model = nn.Sequential(nn.Linear(16, widths[0]), *blocks, nn.Linear(widths[-1], 10)).cuda()
    config = fixed(Precision.BF16, activations="recompute", compile="auto")
    loop = loop_of(model, replace(config, every_steps=100), data=(torch.randn(512, 16), torch.randint(0, 10, (512,))))
    run(loop, 6)
    told = {fault.kind: fault.detail for fault in loop.tick().observation.faults}
    assert compiled in told.pop(FaultKind.COMPILED)
    assert not told
    assert loop._training.steps.num_captured == 1
    loop.close()


def wide(num_blocks: int = 6, dropout: float = 0.0) -> nn.Module:
    """A model whose kernels are deterministic, and whose blocks each save megabytes."""
    torch.manual_seed(0)
    blocks = [Block(512, 512, dropout) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(16, 512), nn.Dropout(dropout), *blocks, nn.Linear(512, 10)).cuda()


SAMPLES = torch.randn(8192, 16), torch.randint(0, 10, (8192,))


def offloading(capture: bool, **options: Any) -> Any:
    config = replace(fixed(Precision.BF16, batch=4096, capture=capture, **options), every_steps=100)
    return loop_of(wide(), config, data=SAMPLES)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("compile_", ["auto", "off"])
def test_a_captured_step_draws_the_same_random_numbers_again(compile_: str, num_parts: int) -> None:
    found = []
    for activations, capture in (("keep", True), ("recompute", True), ("recompute", False)):
        config = fixed(Precision.BF16, batch=4096, activations=activations, compile=compile_, capture=capture)
        loop = loop_of(wide(dropout=0.5), replace(config, every_steps=100), data=SAMPLES)
        loop._training.steps.step.set_num_micro_batches(num_parts)
        torch.manual_seed(1)
        run(loop, 8)
        assert loop._training.steps.num_captured == capture
        found.append([parameter.detach().clone() for parameter in loop.model.parameters()])
        loop.close()
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


class Moody(Block):
    """Draws more random numbers while it is captured."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x) if torch.cuda.is_current_stream_capturing() else x)


def test_what_draws_otherwise_in_captured_steps_is_not_recomputed_in_them() -> None:
    model = nn.Sequential(nn.Linear(16, 64), Moody(64, 64, 0.5), Moody(64, 64, 0.5), nn.Linear(64, 10)).cuda()
    config = fixed(Precision.BF16, activations="recompute", compile="off")
    loop = loop_of(model, replace(config, every_steps=100), data=(torch.randn(512, 16), torch.randint(0, 10, (512,))))
    run(loop, 6)
    (fault,) = loop.tick().observation.faults
    assert fault.kind is FaultKind.ACTIVATIONS_KEPT
    assert "captured steps draw other random numbers" in fault.detail
    assert "activations of 1, 2 are kept" in fault.detail
    assert loop._training.steps.num_captured == 1
    loop.close()


@pytest.mark.parametrize("capture", [False, True])
def test_offloaded_steps_are_equal_bit_for_bit_and_pin_no_memory_in_every_step(capture: bool) -> None:
    kept, moved = offloading(capture, activations="keep"), offloading(capture, activations="offload")
    for loop in (kept, moved):
        run(loop, 2)
    engine = moved._training.steps.step.activations._offloading
    pinned = sum(map(len, engine.arena._chunks))
    assert pinned > 2**24
    allocations = []
    for loop in (kept, moved):
        before = torch.cuda.host_memory_stats()["num_host_alloc"]
        run(loop, 8)
        allocations.append(torch.cuda.host_memory_stats()["num_host_alloc"] - before)
    assert allocations[1] < allocations[0] + 8  # fewer than one a step
    assert sum(map(len, engine.arena._chunks)) == pinned
    assert moved._training.steps.num_captured == capture
    for name, value in kept.model.state_dict().items():
        assert torch.equal(value, moved.model.state_dict()[name]), name
    for loop in (kept, moved):
        loop.close()


@pytest.mark.parametrize("capture", [False, True])
def test_storage_changes_between_steps_and_results_do_not(capture: bool) -> None:
    loops = offloading(capture, activations="keep"), offloading(capture, activations="auto")
    for loop in loops:
        loop.step()
    names = list(loops[1]._training.steps.step.activations.regions)
    mixed = dict(zip(names, itertools.cycle(list(Storage)[:4]), strict=False))  # selective ones round differently
    for storage in (dict.fromkeys(names, Storage.OFFLOAD), mixed, {}, mixed):
        store(loops[1], storage)
        for loop in loops:
            run(loop, 3)
    assert loops[1]._training.steps.num_captured == capture
    for first, second in zip(*(loop.model.state_dict().values() for loop in loops), strict=True):
        assert torch.equal(first, second)
    for loop in loops:
        loop.close()


def test_a_capture_that_lacks_pinned_memory_fails_with_a_fault() -> None:
    loop = offloading(True, activations="offload")
    loop.step()
    engine = loop._training.steps.step.activations._offloading
    engine.arena._chunks.clear()
    run(loop, 2)
    faults = loop.tick().observation.faults
    assert ["more pinned memory" in fault.detail for fault in faults if fault.kind is FaultKind.CAPTURE_FAILED] == [
        True
    ]
    loop.close()


@pytest.mark.parametrize("storage", Storage)
@pytest.mark.parametrize("execution", [{}, {"compile": "auto"}, {"capture": False}])
def test_times_of_regions_make_up_the_step(execution: Any, storage: Storage) -> None:
    torch.manual_seed(0)
    _, _, loss = job("gpt")
    text = torch.randint(0, 96, (512, 129))
    model = GPT(layers=8, width=768, heads=12, context=128).cuda()
    config = replace(fixed(Precision.BF16, **execution), every_steps=100)
    loop = loop_of(model, config, data=(text[:, :-1], text[:, 1:]), loss=loss, memory_headroom=40 * 2**30)
    names = list(loop._training.steps.step.activations.regions)
    kept: Any = None
    for each in dict.fromkeys((Storage.KEEP, storage)):
        loop._actuators.apply(replace(loop.plan, storage=dict.fromkeys(names, each)), step=0)
        run(loop, 20)
        tick = loop.tick()
        kept = kept or tick
    profile, step_ms = tick.observation.profile, kept.observation.step_ms
    assert [region.name for region in profile.regions] == names
    assert all(region.forward_ms > 0.0 and region.backward_ms > 0.0 for region in profile.regions)
    total = sum(region.forward_ms + region.backward_ms for region in profile.regions)
    assert 0.4 * step_ms < total < 2.5 * step_ms  # other tests may run on the GPU
    assert all(0 < region.input_bytes < region.saved_bytes for region in profile.regions)
    assert all(0 < region.offloadable_bytes <= region.saved_bytes for region in profile.regions)
    assert min(profile.to_host_bytes_per_ms, profile.to_device_bytes_per_ms) > 1e6
    loop.close()
