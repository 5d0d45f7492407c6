"""The part of a GPU's memory that each of several trials on it may hold."""

from __future__ import annotations

import torch

from triaccel_ray.measure.memory import MIB, memory_meter, mib

RESERVE_BYTES = 512 * MIB
"""Left free by each process that shares a device: CUDA modules are loaded between two enforcements of a cap, and a
driver that hides processes hides their contexts too."""


def part_of_device(total_bytes: int, num_sharing: int, budget_bytes: int | None = None) -> int:
    """Returns what one of `num_sharing` processes may hold of a device of `total_bytes`: its part, less a reserve.

    A smaller budget that is given stays as it is.

    Raises:
        ValueError: the budget is larger than the part, or the part less the reserve is nothing.
    """
    part = total_bytes // num_sharing - RESERVE_BYTES
    if part <= 0:
        raise ValueError(
            f"trials-per-gpu = {num_sharing}: of {mib(total_bytes)} nothing is left to each but the "
            f"{mib(RESERVE_BYTES)} that it must leave free; let fewer share the device"
        )
    if budget_bytes is not None and budget_bytes > part:
        raise ValueError(
            f"memory budget = {mib(budget_bytes)}: must be at most {mib(part)}, the part of each of {num_sharing} "
            f"processes that share {mib(total_bytes)}; leave it out, or let fewer share the device"
        )
    return part if budget_bytes is None else budget_bytes


def hold_to_part(device: torch.device, num_sharing: int, budget_bytes: int | None = None) -> int | None:
    """Returns the budget of a process that shares `device` with others, and has the device enforce it from now on.

    One that has the device to itself, or a CPU, keeps the budget that it was given.

    Raises:
        ValueError: see `part_of_device`; or the CUDA context alone takes more.
    """
    if num_sharing == 1 or device.type != "cuda":
        return budget_bytes
    part = part_of_device(torch.cuda.get_device_properties(device).total_memory, num_sharing, budget_bytes)
    memory_meter(device, part)
    return part
