import os
import subprocess
import sys

import pytest
import torch

from triaccel_ray.cuda import allocator
from triaccel_ray.cuda.allocator import hold_less

CUDA = torch.device("cuda", 0)


class Machine:
    """A driver that keeps one number, and an allocator that keeps what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: int | None) -> None:
        self.stack = stack
        self.told: list[str] = []
        monkeypatch.setattr(allocator, "_stack_bytes", lambda index: self.stack)
        monkeypatch.setattr(allocator, "_set_stack_bytes", self.set_stack)
        monkeypatch.setattr(allocator, "_set_allocator", self.tell)
        monkeypatch.setattr(allocator, "_has_virtual_memory", lambda index: True)
        for name in allocator._ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def set_stack(self, index: int, num_bytes: int) -> bool:
        self.stack = num_bytes
        return True

    def tell(self, settings: str) -> bool:
        self.told.append(settings)
        return True


def test_stacks_and_segments_change(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    for _ in range(2):
        hold_less(CUDA)
        assert (machine.stack, machine.told[0]) == (256, "expandable_segments:True")


@pytest.mark.parametrize("stack", [4096, 256, 0, None])
def test_stacks_of_a_size_that_somebody_chose_stay(monkeypatch: pytest.MonkeyPatch, stack: int | None) -> None:
    machine = Machine(monkeypatch, stack)
    hold_less(CUDA)
    assert machine.stack == stack


def test_an_allocator_that_the_user_has_set_up_and_a_gpu_that_maps_no_memory_keep_their_segments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, 1024)
    for name in allocator._ALLOCATOR_VARIABLES:
        with monkeypatch.context() as environment:
            environment.setenv(name, "max_split_size_mb:64")
            hold_less(CUDA)
    monkeypatch.setattr(allocator, "_has_virtual_memory", lambda index: False)
    hold_less(CUDA)
    assert (machine.stack, machine.told) == (256, [])


def test_without_a_driver_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_driver", lambda: None)
    assert allocator._stack_bytes(0) is None
    assert not allocator._set_stack_bytes(0, 256)
    assert not allocator._has_virtual_memory(0)


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    hold_less(torch.device("cpu"))
    assert (machine.stack, machine.told) == (1024, [])


OWN_BYTES = """
import torch
from triaccel_ray.cuda.allocator import _stack_bytes, hold_less
from triaccel_ray.measure.memory import CudaMemory
device = torch.device("cuda", 0)
memory = CudaMemory(device, None)
print(int(memory.source == "nvml process"), 0)
print(_stack_bytes(0), memory.sample())
hold_less(device)
print(_stack_bytes(0), memory.sample())
"""

BETWEEN = """
import sys
import torch
from triaccel_ray.cuda.allocator import hold_less
if sys.argv[1] == "lean":
    hold_less(torch.device("cuda", 0))
for size in (64, 48, 96, 80):  # each larger than any hole that the ones before have left
    parts = [torch.empty(size * 2**18, device="cuda") for _ in range(4)]
    del parts
print(torch.cuda.memory_reserved())
"""


def shown(code: str, *arguments: str) -> list[list[int]]:
    environment = {name: value for name, value in os.environ.items() if name not in allocator._ALLOCATOR_VARIABLES}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [[int(word) for word in line.split()] for line in result.stdout.splitlines()]


@pytest.mark.gpu
def test_the_device_has_the_stacks_memory_meanwhile() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    (sees_processes, _), *readings = shown(OWN_BYTES)
    limits, held = zip(*readings, strict=True)
    assert limits == (1024, 256)
    if not sees_processes:
        pytest.skip("NVML hides processes here")
    properties = torch.cuda.get_device_properties(0)
    num_threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    assert held[0] - held[1] == pytest.approx(768 * num_threads, abs=8 * 2**20)  # set aside in pieces of 2 MiB


@pytest.mark.gpu
def test_blocks_of_other_sizes_find_room_where_smaller_ones_were() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    lean, usual = shown(BETWEEN, "lean")[0][0], shown(BETWEEN, "usual")[0][0]
    assert 4 * 96 * 2**20 <= lean < 4 * 96 * 2**20 + 40 * 2**20
    assert usual >= 4 * (64 + 96) * 2**20
