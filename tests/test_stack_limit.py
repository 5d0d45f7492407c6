import subprocess
import sys

import pytest
import torch

from triaccel_ray import stack_limit
from triaccel_ray.stack_limit import restore_stacks, shrink_stacks

CUDA = torch.device("cuda")


class Driver:
    """A driver that keeps one number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
        self.limit = limit
        monkeypatch.setattr(stack_limit, "_limit", lambda device: self.limit)
        monkeypatch.setattr(stack_limit, "_set_limit", lambda device, num_bytes: setattr(self, "limit", num_bytes))


def test_stacks_shrink_from_the_size_that_cuda_chose_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 1024)
    shrink_stacks(CUDA)
    assert driver.limit == 256
    shrink_stacks(CUDA)
    assert driver.limit == 256
    restore_stacks(CUDA)
    assert driver.limit == 1024


@pytest.mark.parametrize("limit", [2048, 512, 0, None])
def test_a_size_that_somebody_chose_stays(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    driver = Driver(monkeypatch, limit)
    shrink_stacks(CUDA)
    assert driver.limit == limit


def test_stacks_that_the_driver_enlarged_come_back_and_larger_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    enlarged, larger = Driver(monkeypatch, 304), 4096
    restore_stacks(CUDA)
    assert enlarged.limit == 1024
    enlarged.limit = larger
    restore_stacks(CUDA)
    assert enlarged.limit == larger


def test_a_cpu_has_no_such_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 1024)
    shrink_stacks(torch.device("cpu"))
    assert driver.limit == 1024


OWN_BYTES = """
import os
import sys
import torch
from triaccel_ray.measure.memory import CudaMemory
from triaccel_ray.stack_limit import _limit, restore_stacks, shrink_stacks
device = torch.device("cuda", 0)
memory = CudaMemory(device, None)
print(_limit(device), memory.sample())
for change in (shrink_stacks, restore_stacks):
    change(device)
    print(_limit(device), memory.sample())
"""


@pytest.mark.gpu
def test_the_device_has_the_memory_meanwhile() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    shown = subprocess.run([sys.executable, "-c", OWN_BYTES], capture_output=True, text=True, check=True).stdout
    limits, held = zip(*(map(int, line.split()) for line in shown.splitlines()), strict=True)
    assert limits == (1024, 256, 1024)
    properties = torch.cuda.get_device_properties(0)
    num_threads = properties.multi_processor_count * properties.max_threads_per_multi_processor
    # Set aside in pieces of 2 MiB. Where NVML hides processes, the pool is all there is to see.
    expected = 768 * num_threads
    assert held[0] == held[1] == held[2] or held[0] - held[1] == pytest.approx(expected, abs=8 * 2**20)
    assert held[2] == pytest.approx(held[0], abs=8 * 2**20)
