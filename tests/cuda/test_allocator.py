import os
import subprocess
import sys

import pytest
import torch

from triaccel_ray.cuda import allocator
from triaccel_ray.cuda.allocator import use_lean_memory

CASES: dict[str, tuple[int | None, dict[str, str], bool, str, bool, bool]] = {
    "as CUDA has it": (1024, {}, True, "cuda", True, True),
    "a stack of somebody's choice": (4096, {}, True, "cuda", False, True),
    "a driver that does not say": (None, {}, True, "cuda", False, True),
    "an allocator of the user's choice": (
        1024,
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:9"},
        True,
        "cuda",
        True,
        False,
    ),
    "a GPU that maps no memory": (1024, {}, False, "cuda", True, False),
    "a CPU": (1024, {}, True, "cpu", False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_stacks_and_segments_change_where_nobody_chose_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, environment, has_virtual_memory, device, changes_stack, changes_segments = CASES[case]
    driven: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(allocator, "_stack_bytes", lambda index: stack)
    monkeypatch.setattr(allocator, "_drive", lambda index, function, *arguments: driven.append(function))
    monkeypatch.setattr(allocator, "_has_virtual_memory", lambda index: has_virtual_memory)
    monkeypatch.setattr(allocator, "_set_allocator", told.append)
    for name in allocator._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use_lean_memory(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    assert driven == ["cuCtxSetLimit"] * changes_stack
    assert told == ["expandable_segments:True"] * changes_segments


def test_without_a_driver_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_driver", lambda: None)
    assert allocator._stack_bytes(0) is None
    assert not allocator._has_virtual_memory(0)


OWN_BYTES = """
import torch
from triaccel_ray.cuda.allocator import _stack_bytes, use_lean_memory
from triaccel_ray.measure.memory import CudaMemory
device = torch.device("cuda", 0)
memory = CudaMemory(device, None)
print(int(memory.source == "nvml process"), 0)
print(_stack_bytes(0), memory.sample())
use_lean_memory(device)
print(_stack_bytes(0), memory.sample())
"""


@pytest.mark.gpu
def test_the_device_has_the_stacks_memory_meanwhile() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in allocator._ALLOCATOR_VARIABLES}
    command = [sys.executable, "-c", OWN_BYTES]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    (sees_processes, _), *readings = ([int(word) for word in line.split()] for line in shown.splitlines())
    limits, held = zip(*readings, strict=True)
    assert limits == (1024, 256)
    if not sees_processes:
        pytest.skip("NVML hides processes here")
    properties = torch.cuda.get_device_properties(0)
    num_threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    assert held[0] - held[1] == pytest.approx(768 * num_threads, abs=8 * 2**20)  # set aside in pieces of 2 MiB
