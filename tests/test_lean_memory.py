import os
import subprocess
import sys

import pytest
import torch

from triaccel_ray import lean_memory
from triaccel_ray.lean_memory import set_lean

CUDA = torch.device("cuda", 0)


class Machine:
    """A driver that keeps one number, and an allocator that keeps what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: int | None, *, refuses: bool = False) -> None:
        self.stack, self.refuses = stack, refuses
        self.told: list[str] = []
        monkeypatch.setattr(lean_memory, "_stack_bytes", lambda index: self.stack)
        monkeypatch.setattr(lean_memory, "_set_stack_bytes", self.set_stack)
        monkeypatch.setattr(lean_memory, "_set_allocator", self.tell)
        monkeypatch.setattr(lean_memory, "_has_virtual_memory", lambda index: True)
        monkeypatch.setattr(lean_memory._Process, "stacks", set())
        monkeypatch.setattr(lean_memory._Process, "segments", False)
        for name in lean_memory._ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name, raising=False)

    def set_stack(self, index: int, num_bytes: int) -> bool:
        self.stack = self.stack if self.refuses else num_bytes
        return not self.refuses

    def tell(self, settings: str) -> bool:
        self.told.append(settings)
        return not self.refuses


def test_stacks_and_segments_change_once_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    set_lean(CUDA, False)
    assert (machine.stack, machine.told) == (1024, [])
    for _ in range(2):
        set_lean(CUDA, True)
        assert (machine.stack, machine.told) == (256, ["expandable_segments:True"])
    machine.stack = 304  # the driver has enlarged them
    set_lean(CUDA, False)
    assert (machine.stack, machine.told[1:]) == (1024, ["expandable_segments:False"])


@pytest.mark.parametrize("stack", [4096, 512, 256, 0, None])
def test_stacks_of_a_size_that_somebody_chose_stay(monkeypatch: pytest.MonkeyPatch, stack: int | None) -> None:
    machine = Machine(monkeypatch, stack)
    for lean in (True, False):
        set_lean(CUDA, lean)
        assert machine.stack == stack


@pytest.mark.parametrize("name", lean_memory._ALLOCATOR_VARIABLES)
def test_an_allocator_that_the_user_has_set_up_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine(monkeypatch, 1024)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    for lean in (True, False):
        set_lean(CUDA, lean)
    assert machine.told == []


def test_a_gpu_that_maps_no_memory_keeps_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    monkeypatch.setattr(lean_memory, "_has_virtual_memory", lambda index: False)
    for lean in (True, False):
        set_lean(CUDA, lean)
    assert (machine.stack, machine.told) == (1024, [])


def test_what_is_refused_is_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024, refuses=True)
    set_lean(CUDA, True)
    machine.refuses = False
    machine.stack = 256  # somebody else's
    set_lean(CUDA, False)
    assert (machine.stack, machine.told) == (256, ["expandable_segments:True"])


def test_without_a_driver_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_memory, "_driver", lambda: None)
    assert lean_memory._stack_bytes(0) is None
    assert not lean_memory._set_stack_bytes(0, 256)
    assert not lean_memory._has_virtual_memory(0)


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    set_lean(torch.device("cpu"), True)
    assert (machine.stack, machine.told) == (1024, [])


OWN_BYTES = """
import torch
from triaccel_ray.lean_memory import _stack_bytes, set_lean
from triaccel_ray.measure.memory import CudaMemory
device = torch.device("cuda", 0)
memory = CudaMemory(device, None)
print(int(memory.source == "nvml process"), 0)
print(_stack_bytes(0), memory.sample())
for lean in (True, False):
    set_lean(device, lean)
    print(_stack_bytes(0), memory.sample())
"""

BETWEEN = """
import sys
import torch
from triaccel_ray.lean_memory import set_lean
set_lean(torch.device("cuda", 0), sys.argv[1] == "lean")
for size in (64, 48, 96, 80):  # each larger than any hole that the ones before have left
    parts = [torch.empty(size * 2**18, device="cuda") for _ in range(4)]
    del parts
print(torch.cuda.memory_reserved())
"""


def shown(code: str, *arguments: str) -> list[list[int]]:
    environment = {name: value for name, value in os.environ.items() if name not in lean_memory._ALLOCATOR_VARIABLES}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [[int(word) for word in line.split()] for line in result.stdout.splitlines()]


@pytest.mark.gpu
def test_the_device_has_the_stacks_memory_meanwhile() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    (sees_processes, _), *readings = shown(OWN_BYTES)
    limits, held = zip(*readings, strict=True)
    assert limits == (1024, 256, 1024)
    if not sees_processes:
        pytest.skip("NVML hides processes here")
    properties = torch.cuda.get_device_properties(0)
    num_threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    assert held[0] - held[1] == pytest.approx(768 * num_threads, abs=8 * 2**20)  # set aside in pieces of 2 MiB
    assert held[2] == pytest.approx(held[0], abs=8 * 2**20)


@pytest.mark.gpu
def test_blocks_of_other_sizes_find_room_where_smaller_ones_were() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    lean, usual = shown(BETWEEN, "lean")[0][0], shown(BETWEEN, "usual")[0][0]
    assert 4 * 96 * 2**20 <= lean < 4 * 96 * 2**20 + 40 * 2**20
    assert usual >= 4 * (64 + 96) * 2**20
