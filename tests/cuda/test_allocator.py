import os
import subprocess
import sys

import pytest
import torch

from triaccel_ray.cuda import allocator
from triaccel_ray.cuda.allocator import use_lean_memory

CHOSEN = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:9"}


@pytest.mark.parametrize(
    ("device", "stack", "environment", "maps_memory", "changes_stack", "changes_segments"),
    [
        pytest.param("cuda", 1024, {}, True, True, True, id="as CUDA has it"),
        pytest.param("cuda", 4096, {}, True, False, True, id="a stack of somebody's choice"),
        pytest.param("cuda", None, {}, True, False, True, id="a driver that does not say"),
        pytest.param("cuda", 1024, CHOSEN, True, True, False, id="an allocator of the user's choice"),
        pytest.param("cuda", 1024, {}, False, True, False, id="a GPU that maps no memory"),
        pytest.param("cpu", 1024, {}, True, False, False, id="a CPU"),
    ],
)
def test_stacks_and_segments_change_where_nobody_chose_them(
    device, stack, environment, maps_memory, changes_stack, changes_segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven: list[str] = []
    told: list[str] = []
    monkeypatch.setattr(allocator, "_stack_bytes", lambda index: stack)
    monkeypatch.setattr(allocator, "_drive", lambda index, function, *arguments: driven.append(function))
    monkeypatch.setattr(allocator, "_has_virtual_memory", lambda index: maps_memory)
    monkeypatch.setattr(allocator, "_set_allocator", told.append)
    for name in allocator._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use_lean_memory(torch.device(device, 0))
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
