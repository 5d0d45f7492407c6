import pytest
import torch

from tests.build import CPU
from triaccel_ray.measure.memory import MIB, CudaMemory
from triaccel_ray.service.runs.gpu_share import RESERVE_BYTES, hold_to_part, part_of_device


@pytest.mark.parametrize("num_sharing", [2, 3, 16])
def test_the_parts_of_a_device_and_what_they_leave_free_fit_on_it(num_sharing: int) -> None:
    total = 16 * 1024 * MIB
    part = part_of_device(total, num_sharing)
    assert num_sharing * (part + RESERVE_BYTES) <= total
    assert part == pytest.approx(total / num_sharing - RESERVE_BYTES, abs=1)
    assert part_of_device(total, num_sharing, 100 * MIB) == 100 * MIB
    with pytest.raises(ValueError, match=rf"memory budget = .*: must be at most .* of each of {num_sharing} processes"):
        part_of_device(total, num_sharing, part + 1)


def test_a_part_that_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="trials-per-gpu = 8: of 4096 MiB nothing is left to each but the 512 MiB"):
        part_of_device(4096 * MIB, 8)


def test_on_a_cpu_or_alone_on_a_device_a_budget_stays_as_it_is() -> None:
    assert hold_to_part(CPU, 4, 10 * MIB) == 10 * MIB
    assert hold_to_part(CPU, 4) is None
    assert hold_to_part(torch.device("cuda"), 1) is None


@pytest.mark.gpu
def test_a_process_that_shares_a_device_is_held_to_its_part_from_then_on() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        part = hold_to_part(device, 8)
        assert part == part_of_device(total, 8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(part, dtype=torch.uint8, device=device)  # the CUDA context counts, so not even all of it
        assert CudaMemory(device, None, 2**50).limit_bytes > part
        memory = CudaMemory(device, part, 2**50)
        memory.require_room()
        assert memory.limit_bytes == part
    finally:
        CudaMemory(device, None)  # lifts the cap
