"""The engine on a real NVIDIA GPU, as a whole; each room's own GPU tests stand beside its others."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.decide.build import USUAL
from triaccel_ray.apply.precision import DTYPES, LayerPrecision
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.control.errors import BudgetTooSmallError
from triaccel_ray.decide import replay
from triaccel_ray.loop import ControlLoop
from triaccel_ray.measure.memory import CudaMemory
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.events import Tick
from triaccel_ray.records.plan import FaultKind, Precision

pytestmark = pytest.mark.gpu


class Mixed(nn.Module):
    """Convolution, batch and layer norm, a residual sum and attention written out: every kind of border."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(32)
        self.norm = nn.LayerNorm(32)
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        first = torch.relu(self.bn1(self.conv1(inputs)))
        both = torch.relu(first + self.bn2(self.conv2(first)))
        tokens = self.norm(both.flatten(2).transpose(1, 2))
        scores = self.query(tokens) @ self.key(tokens).transpose(1, 2)
        return self.head((scores.softmax(-1) @ tokens).mean(1))


@pytest.mark.parametrize("levels", list(itertools.product(USUAL, repeat=2)))
def test_every_border_between_precisions_computes_and_differentiates(levels: tuple[Precision, Precision]) -> None:
    torch.manual_seed(0)
    model = Mixed().cuda()
    layers = find_layers(model)
    precision = LayerPrecision(model, layers)
    plan = {layer.name: levels[index % 2] for index, layer in enumerate(layers)}
    precision.set(plan)
    seen: dict[str, torch.dtype] = {}
    for layer in layers:
        layer.modules[0].register_forward_hook(
            lambda module, args, output, name=layer.name: seen.__setitem__(name, output.dtype)
        )
    inputs = torch.randn(8, 3, 8, 8, device="cuda")
    with precision.in_force():
        outputs = model(inputs).float()
    outputs.square().mean().backward()
    assert seen == {name: DTYPES[level] for name, level in plan.items()}
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
    with torch.no_grad(), precision.suspended():
        reference = model(inputs)
    assert (outputs - reference).norm() / reference.norm() < 3e-2


def _data(num_samples: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 10, (num_samples,), generator=generator)
    inputs = torch.randn(num_samples, 3, size, size, generator=generator)
    inputs[:, 0] += targets.view(-1, 1, 1) / 3
    return inputs, targets


def _conv_net(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def _config(**batch: object) -> ControlConfig:
    return ControlConfig(
        every_steps=5,
        max_overhead=1.0,
        precision=PrecisionConfig(tau_low=1e-6, tau_high=1e-3),
        curvature=CurvatureConfig(every_steps=10, num_samples=16, alpha=0.01),
        batch=replace(BatchConfig(), **batch),  # type: ignore[arg-type]  # names checked by the dataclass
    )


@pytest.mark.parametrize("fused", [True, False])
def test_the_loop_learns_with_all_strategies_on_and_its_log_replays(fused: bool) -> None:
    torch.manual_seed(0)
    model = _conv_net(32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    ticks: list[Tick] = []
    config = _config()
    data = _data(4096, 16)
    loop = ControlLoop(model, optimizer, nn.functional.cross_entropy, data, config=config, on_tick=ticks.append)
    for _ in range(6):
        loop.train_epoch()
    assert loop.evaluate(data).metrics["accuracy"] > 60.0
    loop.memory.refresh_peaks()
    before = loop.memory.allocated_peak_bytes
    evaluation = loop.evaluate(data, is_last=True)
    loop.memory.refresh_peaks()
    assert (evaluation.num_samples, evaluation.faults) == (4096, ())
    assert loop.memory.allocated_peak_bytes == before
    assert {level for tick in ticks for level in tick.decision.plan.precision.values()} >= {Precision.BF16}
    assert any(layer.eigenvalues for tick in ticks for layer in tick.observation.layers)
    assert replay(config, [(tick.observation, tick.decision) for tick in ticks]).diverged_at is None


def test_a_budget_is_kept_as_nvml_sees_it_and_an_out_of_memory_error_is_survived() -> None:
    torch.manual_seed(0)
    model = _conv_net(64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    # Activations of 1024 images at 64 channels, 64 x 64, take several GiB: the budget allows a part of that.
    probe = ControlLoop(model, optimizer, nn.functional.cross_entropy, _data(64, 64))
    budget = probe.memory.idle_bytes + 1536 * 2**20
    probe.close()
    ticks: list[Tick] = []
    config = _config(start=1024, minimum=64, maximum=1024, granularity=64, step_up=64, step_down=128)
    loop = ControlLoop(
        model, optimizer, nn.functional.cross_entropy, _data(8192, 64), config=config, memory_budget=budget,
        on_tick=ticks.append,
    )  # fmt: skip
    for _ in range(3):
        stats = loop.train_epoch()
        assert stats.num_samples == 8192
    faults = [fault for tick in ticks for fault in tick.observation.faults]
    assert any(fault.kind is FaultKind.OUT_OF_MEMORY for fault in faults)
    assert loop.plan.batch_size < 1024
    assert loop.memory.peak_bytes <= budget
    loop.close()


def test_an_error_about_a_small_budget_names_one_that_suffices() -> None:
    def trained(budget: int | None) -> ControlLoop:
        torch.manual_seed(0)
        model = _conv_net(64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = _config(start=8, minimum=8, maximum=8)
        loop = ControlLoop(
            model, optimizer, nn.functional.cross_entropy, _data(64, 512), config=config, memory_budget=budget
        )
        try:
            for _ in range(8):
                loop.step()
        finally:
            loop.close()
        return loop

    idle = trained(None).memory.idle_bytes
    with pytest.raises(BudgetTooSmallError, match=r"Give a memory budget of [0-9]+ MiB or more") as raised:
        trained(idle + 240 * 2**20)
    least = int(str(raised.value).split("Give a memory budget of ")[1].split(" MiB")[0]) * 2**20
    assert least > idle + 240 * 2**20
    del raised
    assert trained(least).memory.peak_bytes <= least


def test_a_users_cap_holds_within_a_budget_and_after_it() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    given = pytest.approx(0.25)
    left_open = CudaMemory(device, total // 8)
    assert torch.cuda.get_per_process_memory_fraction() < 0.125
    for budget in (None, total // 2, total):
        memory = CudaMemory(device, budget)
        assert torch.cuda.get_per_process_memory_fraction() == given
        memory.close()
    left_open.close()
    assert torch.cuda.get_per_process_memory_fraction() == given
    memory = CudaMemory(device, total // 8)
    memory.limit_bytes = 1
    with pytest.raises(ValueError, match="the process already holds"):
        memory.require_room()
    assert torch.cuda.get_per_process_memory_fraction() == given
    memory = CudaMemory(device, total // 8)
    torch.cuda.set_per_process_memory_fraction(0.1)  # meanwhile
    memory.close()
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(0.1)


_NEIGHBOR = """
import sys, torch
torch.zeros(1, device="cuda")
held = []
for line in sys.stdin:
    leave = int(line)
    held.clear()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if leave:
        held.append(torch.empty(free - leave, dtype=torch.uint8, device="cuda"))
    print("done", flush=True)
"""


def test_a_neighbor_that_takes_memory_makes_the_batch_shrink_and_grow_again() -> None:
    torch.manual_seed(0)
    torch.cuda.set_per_process_memory_fraction(1.0)
    model = _conv_net(64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ticks: list[Tick] = []
    config = _config(start=512, minimum=64, maximum=512, granularity=64, step_up=64, step_down=192)
    # It grows whatever that costs: so short a run would not regain it.
    config = replace(config, curvature=CurvatureConfig(enabled=False), revert_slowdowns=False)
    loop = ControlLoop(
        model, optimizer, nn.functional.cross_entropy, _data(8192, 64), config=config, on_tick=ticks.append
    )
    with subprocess.Popen(
        [sys.executable, "-c", _NEIGHBOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as neighbor:
        assert neighbor.stdin is not None
        assert neighbor.stdout is not None

        def leave(num_bytes: int) -> None:
            neighbor.stdin.write(f"{num_bytes}\n")
            neighbor.stdin.flush()
            assert neighbor.stdout.readline() == "done\n"

        loop.train_epoch()
        assert loop.plan.batch_size == 512, [reason.text for tick in ticks for reason in tick.decision.reasons]
        leave(64 * 2**20)
        for _ in range(9):  # a tick comes within 5, and decides 3 later
            loop.step()
        squeezed = loop.plan.batch_size
        for _ in range(20):
            loop.step()
        leave(0)
        neighbor.stdin.close()
        for _ in range(20):  # what was left for want of memory stays closed for a while
            assert loop.train_epoch().num_samples == 8192
            if loop.plan.batch_size == 512:
                break
    assert squeezed < 512
    assert loop.plan.batch_size == 512, [reason.text for tick in ticks for reason in tick.decision.reasons]
    # It shrank at a tick, by what it saw, before anything failed.
    assert not [f for t in ticks for f in t.observation.faults if f.kind is FaultKind.OUT_OF_MEMORY]
