import mmap

import psutil
import pytest
import torch

from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.cuda.out_of_memory import BudgetExceededError
from triaccel_ray.measure.memory import (
    LAZY_LOADING_BYTES,
    LIBRARIES_BYTES,
    MIB,
    CudaMemory,
    ResidentMemory,
    memory_meter,
)

CPU = torch.device("cpu")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def allocate(num_mib: int) -> torch.Tensor:
    return torch.ones(num_mib * MIB, dtype=torch.uint8)


def map_and_unmap(num_mib: int) -> None:
    """Fills pages of its own: the heap of a process that has run long may serve and keep what `allocate` takes."""
    with mmap.mmap(-1, num_mib * MIB) as memory:
        memory[:: mmap.PAGESIZE] = b"1" * (len(memory) // mmap.PAGESIZE)


def test_the_reading_is_what_the_system_sees() -> None:
    memory = memory_meter(CPU, None)
    assert isinstance(memory, ResidentMemory)
    held = allocate(50)
    signal = memory.read()
    assert signal.used_bytes == pytest.approx(resident(), rel=0.1)
    assert signal.used_bytes <= signal.window_peak_bytes <= signal.peak_bytes
    assert signal.limit_bytes == psutil.virtual_memory().total
    assert signal.free_bytes == pytest.approx(psutil.virtual_memory().available, rel=0.5)
    assert len(held) == 50 * MIB


def test_a_peak_between_two_readings_counts_in_its_window_alone() -> None:
    memory = ResidentMemory(None)
    before = memory.read().used_bytes
    map_and_unmap(100)
    during = memory.read()
    after = memory.read()
    assert during.used_bytes < before + 50 * MIB
    assert during.window_peak_bytes >= before + 95 * MIB
    assert after.window_peak_bytes < before + 50 * MIB
    assert after.peak_bytes >= during.window_peak_bytes


def test_memory_outside_the_window_counts_in_the_runs_peak_alone() -> None:
    memory = ResidentMemory(None)
    before = memory.read().used_bytes
    with memory.outside_window():
        map_and_unmap(100)
    signal = memory.read()
    assert signal.window_peak_bytes < before + 50 * MIB
    assert signal.peak_bytes >= before + 95 * MIB


def test_what_the_heap_holds_between_steps_is_no_batchs_memory() -> None:
    memory = ResidentMemory(None, 64 * MIB)
    memory.require_room()
    before = memory.read()
    held = [allocate(100)]
    after = memory.read()
    assert after.idle_bytes - before.idle_bytes == pytest.approx(100 * MIB, rel=0.05)
    assert after.limit_bytes - after.idle_bytes == before.limit_bytes - before.idle_bytes == 64 * MIB
    held.clear()
    assert memory.read().idle_bytes < after.idle_bytes - 90 * MIB


@pytest.mark.parametrize("num_held", [0, 100, 200])
def test_a_batch_takes_as_much_where_others_have_freed_memory(num_held: int) -> None:
    held = [allocate(num_held)]
    memory = ResidentMemory(None)
    memory.require_room()
    held.clear()
    memory.begin_window()
    batch = allocate(100)
    del batch
    signal = memory.read()
    assert signal.window_peak_bytes - signal.idle_bytes == pytest.approx(100 * MIB, rel=0.1)


def test_idle_memory_is_at_most_what_is_resident() -> None:
    memory = ResidentMemory(None)
    memory.require_room()
    before = memory.idle_bytes
    untouched = torch.empty(500 * MIB, dtype=torch.uint8)
    signal = memory.read()
    assert signal.idle_bytes <= signal.used_bytes < before + 100 * MIB
    assert len(untouched) == 500 * MIB


@pytest.mark.parametrize("budget", [0, -MIB, psutil.virtual_memory().total + 1])
def test_a_budget_that_cannot_be_is_refused(budget: int) -> None:
    with pytest.raises(
        ValueError, match=r"memory budget = -?\d+ MiB: must be positive and at most the \d+ MiB of this"
    ):
        memory_meter(CPU, budget)


def test_a_headroom_stays_within_the_budget() -> None:
    for headroom, limit in ((64 * MIB, None), (4096 * MIB, resident() + 1024 * MIB)):
        memory = ResidentMemory(resident() + 1024 * MIB if limit is None else limit, headroom)
        memory.require_room()
        assert memory.has_budget
        assert memory.limit_bytes == (limit or memory.idle_bytes + headroom)


def test_going_beyond_the_budget_raises_until_memory_is_given_back() -> None:
    memory = memory_meter(CPU, resident() + 64 * MIB)
    memory.require_room()
    memory.check()
    held = [allocate(128)]
    with pytest.raises(BudgetExceededError, match=r"the process holds \d+ MiB of a budget of \d+ MiB"):
        memory.check()
    held.clear()
    memory.release()
    memory.check()
    assert memory.peak_bytes > memory.limit_bytes


def test_memory_in_small_pieces_is_given_back_too() -> None:
    memory = ResidentMemory(None)
    pieces = [torch.ones(1000) for _ in range(10_000)]
    full = memory.sample()
    pieces.clear()
    memory.release()
    assert memory.sample() < full - 20 * MIB


@pytest.mark.gpu
def test_the_reading_is_what_the_driver_sees() -> None:
    device = torch.device("cuda", 0)
    memory = memory_meter(device, None)
    assert isinstance(memory, CudaMemory)
    before = memory.read()
    free = torch.cuda.mem_get_info(device)[0]
    held = torch.ones(512 * MIB, dtype=torch.uint8, device=device)
    signal = memory.read()
    assert signal.used_bytes - before.used_bytes == pytest.approx(512 * MIB, rel=0.1)
    assert free - torch.cuda.mem_get_info(device)[0] == pytest.approx(512 * MIB, rel=0.1)
    assert signal.allocated_bytes - before.allocated_bytes == len(held)
    assert signal.used_bytes >= torch.cuda.memory_reserved(device)


@pytest.mark.gpu
def test_a_peak_of_the_pool_counts_in_its_window_alone() -> None:
    device = torch.device("cuda", 0)
    memory = CudaMemory(device, None)
    memory.release()
    before = memory.read().used_bytes
    torch.ones(512 * MIB, dtype=torch.uint8, device=device)
    memory.release()
    during, after = memory.read(), memory.read()
    assert during.window_peak_bytes >= before + 500 * MIB
    assert during.allocated_peak_bytes >= 512 * MIB
    assert after.window_peak_bytes < before + 100 * MIB
    assert after.peak_bytes >= during.window_peak_bytes


@pytest.mark.gpu
def test_a_peak_of_the_pool_outside_the_window_counts_in_the_runs_alone() -> None:
    device = torch.device("cuda", 0)
    memory = CudaMemory(device, None)
    memory.release()
    before = memory.read().used_bytes
    with memory.outside_window():
        torch.ones(512 * MIB, dtype=torch.uint8, device=device)
        memory.release()
    signal = memory.read()
    assert signal.window_peak_bytes < before + 100 * MIB
    assert signal.peak_bytes >= before + 500 * MIB


@pytest.mark.gpu
def test_the_allocator_keeps_the_budget() -> None:
    device = torch.device("cuda", 0)
    idle = CudaMemory(device, None)
    idle.release()
    memory = CudaMemory(device, idle.sample() + 256 * MIB)
    try:
        memory.require_room()
        torch.ones(128 * MIB, dtype=torch.uint8, device=device)
        memory.release()
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(512 * MIB, dtype=torch.uint8, device=device)
        memory.check()
        assert memory.sample() <= memory.limit_bytes
    finally:
        memory.close()
    torch.ones(512 * MIB, dtype=torch.uint8, device=device)


@pytest.mark.gpu
def test_a_budget_keeps_room_for_libraries_until_require_room() -> None:
    device = torch.device("cuda", 0)
    idle = CudaMemory(device, None)
    idle.release()
    memory = CudaMemory(device, idle.sample() + 512 * MIB)
    most = 512 * MIB - (LIBRARIES_BYTES + LAZY_LOADING_BYTES) // 2
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(most, dtype=torch.uint8, device=device)
        memory.release()
        memory.require_room()
        torch.ones(most, dtype=torch.uint8, device=device)
    finally:
        memory.close()


@pytest.mark.gpu
def test_until_the_first_tick_room_is_kept_for_what_libraries_will_take() -> None:
    device = torch.device("cuda", 0)
    memory = CudaMemory(device, None, 512 * MIB)
    most = 512 * MIB - LAZY_LOADING_BYTES // 2
    try:
        memory.require_room()
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(most, dtype=torch.uint8, device=device)
        memory.release()
        memory.read()  # what they have taken is known
        torch.ones(most, dtype=torch.uint8, device=device)
    finally:
        memory.close()


@pytest.mark.gpu
def test_the_memory_of_captured_graphs_counts() -> None:
    device = torch.device("cuda", 0)
    memory, pool = CudaMemory(device, None), GraphPool(device)
    memory.release()
    before = memory.read()
    graph = pool.capture(lambda: torch.ones(256 * MIB, dtype=torch.uint8, device=device).sum())
    held = memory.read()
    assert held.used_bytes >= before.used_bytes + 256 * MIB
    assert held.allocated_bytes < before.allocated_bytes + 100 * MIB
    del graph
    pool.release()
    assert memory.read().used_bytes < before.used_bytes + 100 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("budget", "message"),
    [(0, "must be positive"), (2**60, "must be positive and at most"), (MIB, "the CUDA context alone takes")],
)
def test_a_budget_that_no_gpu_keeps_is_refused(budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CudaMemory(torch.device("cuda", 0), budget)
