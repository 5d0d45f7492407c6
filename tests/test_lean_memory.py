import subprocess
import sys

import pytest
import torch

from triaccel_ray import lean_memory
from triaccel_ray.lean_memory import set_lean

CUDA = torch.device("cuda")


class Machine:
    """A driver that keeps one number, and an allocator that keeps what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: int | None) -> None:
        self.stack = stack
        self.told: list[str] = []
        monkeypatch.setattr(lean_memory, "_stack_bytes", lambda device: self.stack)
        monkeypatch.setattr(lean_memory, "_set_stack_bytes", lambda device, size: setattr(self, "stack", size))
        monkeypatch.setattr(lean_memory, "_set_allocator", self.told.append)
        monkeypatch.setattr(lean_memory._Segments, "are_expandable", False)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)


def test_stacks_and_segments_change_once_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 1024)
    set_lean(CUDA, False)
    assert (machine.stack, machine.told) == (1024, [])
    for _ in range(2):
        set_lean(CUDA, True)
        assert (machine.stack, machine.told) == (256, ["expandable_segments:True"])
    set_lean(CUDA, False)
    assert (machine.stack, machine.told[1:]) == (1024, ["expandable_segments:False"])


@pytest.mark.parametrize("stack", [2048, 512, 0, None])
def test_stacks_of_a_size_that_somebody_chose_stay(monkeypatch: pytest.MonkeyPatch, stack: int | None) -> None:
    machine = Machine(monkeypatch, stack)
    set_lean(CUDA, True)
    assert machine.stack == stack


def test_stacks_that_the_driver_enlarged_come_back_and_larger_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 304)
    set_lean(CUDA, False)
    assert machine.stack == 1024
    machine.stack = 4096
    set_lean(CUDA, False)
    assert machine.stack == 4096


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_the_user_has_set_up_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine(monkeypatch, 1024)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    set_lean(CUDA, True)
    set_lean(CUDA, False)
    assert machine.told == []


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
print(_stack_bytes(device), memory.sample())
for lean in (True, False):
    set_lean(device, lean)
    print(_stack_bytes(device), memory.sample())
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
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return [[int(word) for word in line.split()] for line in result.stdout.splitlines()]


@pytest.mark.gpu
def test_the_device_has_the_stacks_memory_meanwhile() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    limits, held = zip(*shown(OWN_BYTES), strict=True)
    assert limits == (1024, 256, 1024)
    properties = torch.cuda.get_device_properties(0)
    num_threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    # Set aside in pieces of 2 MiB. Where NVML hides processes, the pool is all there is to see.
    expected = 768 * num_threads
    assert held[0] == held[1] == held[2] or held[0] - held[1] == pytest.approx(expected, abs=8 * 2**20)
    assert held[2] == pytest.approx(held[0], abs=8 * 2**20)


@pytest.mark.gpu
def test_blocks_of_other_sizes_find_room_where_smaller_ones_were() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    lean, usual = shown(BETWEEN, "lean")[0][0], shown(BETWEEN, "usual")[0][0]
    assert 4 * 96 * 2**20 <= lean < 4 * 96 * 2**20 + 40 * 2**20
    assert usual >= 4 * (64 + 96) * 2**20
